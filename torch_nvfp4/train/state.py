"""Checkpoints: whole or not there. A folder is filled under another name, synced to disk and then renamed.

    checkpoint-00000050/
        adapter_model.safetensors, adapter_config.json   the adapter, loadable by PEFT
        training.safetensors    optimiser tensors (optimizer/<parameter>/<key>) and RNG states (rng/<device>)
        state.json              step (which is also scheduler and data position), fingerprint, losses so far

Whatever its name starts with a dot is unfinished or being deleted, and is removed when the next run starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torch_nvfp4 import lora
from torch_nvfp4._lora.sharded import copy_whole, to_shards, whole
from torch_nvfp4.distributed import whole_adapters
from torch_nvfp4.distributed.adapters import expert_factors, gathered, part_of
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, one_line
from torch_nvfp4.train.ranks import ALONE, Ranks

_NAME = re.compile(r"checkpoint-\d{8}")
_LEFTOVER = re.compile(r"\.checkpoint-\d{8}\.(partial|old)")


@dataclass
class Progress:
    """Where a run stands. Losses are mean cross-entropy per token in nat.

    Attributes:
        step: optimiser steps done.
        base_loss, quantized_loss: held-out loss before and after quantising, before training.
        train_losses: (step, loss) of every step.
        eval_losses: (step, held-out loss).
    """

    step: int = 0
    base_loss: float = float("nan")
    quantized_loss: float = float("nan")
    train_losses: list[tuple[int, float]] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)


def checkpoints(output: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest step first."""
    return sorted(path for path in output.glob("checkpoint-*") if _NAME.fullmatch(path.name))


def prepare_output(config: FinetuneConfig) -> Path | None:
    """Make the output folder, remove leftovers of a killed run, and find the checkpoint to resume, if any.

    Raises FinetuneError if the folder cannot be written, holds other things, or lacks that checkpoint.
    """
    output = config.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as e:
        raise FinetuneError(f"{output} cannot be written ({e.strerror}): give another --output") from None
    for path in output.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
    if config.resume not in ("auto", "never"):
        path = Path(config.resume)
        if not (path / "state.json").is_file():
            raise FinetuneError(
                f"{path} is no checkpoint (no state.json): give --resume a checkpoint-<step> folder, or auto"
            )
        return path
    if config.resume == "auto" and (found := checkpoints(output)):
        return found[-1]
    if any(output.iterdir()):
        remedy = "resume it with --resume auto or " if checkpoints(output) else ""
        raise FinetuneError(f"{output} is not empty: {remedy}give another --output")
    return None


def check_fingerprint(checkpoint: Path, wanted: dict[str, Any]) -> None:
    """Raise FinetuneError if the checkpoint was made with another value of any setting in `wanted`."""
    saved = _read_state(checkpoint)["fingerprint"]
    differing = sorted(key for key, value in wanted.items() if saved.get(key) != value)
    if differing:
        key = differing[0]
        what = f"another {key}" if key in ("model", "text") else f"{key}={saved.get(key)}, this run has {wanted[key]}"
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise FinetuneError(f"{checkpoint} was made with {what}{more}: use the same settings, or another --output")


def step_of(checkpoint: Path) -> int:
    """How many optimiser steps a checkpoint has behind it."""
    return int(_read_state(checkpoint)["step"])


def save_checkpoint(
    config: FinetuneConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    fingerprint: dict[str, Any],
    ranks: Ranks = ALONE,
) -> Path:
    """Write `checkpoint-<step>`; a kill at any moment leaves it or the one before. Prune old ones.

    All ranks gather what is sharded or split, the first writes: the files are those of a run of one process.
    """
    output, name = config.output, f"checkpoint-{progress.step:08d}"
    partial, final = output / f".{name}.partial", output / name
    tensors = _optimizer_tensors(model, optimizer, keep=ranks.is_first) | _rng_tensors()
    if ranks.is_first:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
    save_adapter(config, model, partial, ranks)
    if not ranks.is_first:
        ranks.wait()
        return final
    save_file(tensors, partial / "training.safetensors")
    state = {"version": 1, "fingerprint": fingerprint, **asdict(progress)}
    (partial / "state.json").write_text(json.dumps(state, indent=1))
    for path in partial.iterdir():
        _sync(path)
    _sync(partial)
    if final.exists():
        _retire(final)
    os.rename(partial, final)
    _sync(output)
    # newer ones can be here when an older one was resumed by its path; they are not this run's to delete
    for stale in [path for path in checkpoints(output) if path.name <= name][: -config.keep]:
        _retire(stale)
    ranks.wait()
    return final


def save_adapter(config: FinetuneConfig, model: nn.Module, folder: Path, ranks: Ranks = ALONE) -> None:
    """Write the whole adapter; every rank calls it."""
    with _whole(model, ranks):
        if ranks.is_first or not ranks.splits_experts:  # of a sharded model all must ask
            lora.save_adapter(model, folder, base_model_name_or_path=config.model)


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE
) -> Progress:
    """Put adapters, optimiser and RNG states back in place and return where the run stood.

    Raises FinetuneError if a file is damaged or does not fit the model.
    """
    state = _read_state(checkpoint)
    try:
        tensors = load_file(checkpoint / "training.safetensors")
        with _whole(model, ranks):
            lora.load_adapter(model, checkpoint)
        _restore_optimizer(model, optimizer, tensors)
        _restore_rng(tensors)
        return Progress(
            step=int(state["step"]),
            base_loss=float(state["base_loss"]),
            quantized_loss=float(state["quantized_loss"]),
            train_losses=[(int(step), float(loss)) for step, loss in state["train_losses"]],
            eval_losses=[(int(step), float(loss)) for step, loss in state["eval_losses"]],
        )
    except (SafetensorError, OSError, KeyError, ValueError) as e:
        raise _damaged(checkpoint, e) from e


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        if state["version"] != 1 or not isinstance(state["fingerprint"], dict):
            raise ValueError("state.json has another version")
        return state
    except (OSError, KeyError, ValueError, TypeError) as e:
        raise _damaged(checkpoint, e) from e


def _damaged(checkpoint: Path, error: Exception) -> FinetuneError:
    return FinetuneError(
        f"{checkpoint} is damaged ({one_line(error)}): delete that folder to resume from the one before it"
    )


def _whole(model: nn.Module, ranks: Ranks) -> AbstractContextManager[None]:
    """Within it the adapters of split experts are those of all experts."""
    return whole_adapters(model) if ranks.splits_experts else nullcontext()


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Tensor]:
    """All moments, whole, on the CPU; every rank asks, and those that do not `keep` them get none."""
    to_shards(model)  # parameters that a forward left gathered are not the optimiser's
    shares = expert_factors(model)
    tensors = {}
    for name, parameter in trainable(model).items():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                everything = whole(value)
                if name in shares and value.shape == parameter.shape:
                    everything = gathered(everything, shares[name])
                if keep:
                    tensors[f"optimizer/{name}/{key}"] = everything.cpu()
    return tensors


def _restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters, shares = trainable(model), expert_factors(model)
    places = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Tensor]] = {i: {} for i in places.values()}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, name, what = key.split("/")
            if name in shares and value.dim() == parameters[name].dim():
                value = part_of(value, shares[name])
            state[places[id(parameters[name])]][what] = _like(value, parameters[name])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A moment sharded as its parameter is; what has another shape, such as a count of steps, as it is."""
    if value.shape != parameter.shape or not hasattr(parameter, "full_tensor"):
        return value
    sharded = torch.empty_like(parameter, dtype=value.dtype)
    copy_whole(sharded, value)
    return sharded.detach()


def _rng_tensors() -> dict[str, Tensor]:
    tensors = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore_rng(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["rng/cpu"])
    if torch.cuda.is_initialized() and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def _sync(path: Path) -> None:
    """Have the system write a file or a folder's entries to disk."""
    if path.is_dir() and os.name == "nt":
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _retire(checkpoint: Path) -> None:
    """Delete a checkpoint; under another name first, so that no half of one is ever taken for a whole."""
    old = checkpoint.with_name(f".{checkpoint.name}.old")
    if old.exists():
        shutil.rmtree(old)
    os.rename(checkpoint, old)
    shutil.rmtree(old)
