"""Load a transformers model folder or hub id: safetensors only, no code from it, one line per mistake."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from torch_nvfp4._lora.sharded import whole
from torch_nvfp4.distributed import ParallelExperts
from torch_nvfp4.nn import NVFP4Experts
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, one_line

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
)


def load_description(config: FinetuneConfig) -> tuple[Any, Any]:
    """(model configuration, tokenizer): what can be checked before the weights are read."""
    _check_folder(config.model)
    try:
        description = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as e:
        raise FinetuneError(_explain(config.model, "config.json", e)) from e
    limit = getattr(description.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.seq_len > limit:
        raise FinetuneError(
            f"--seq-len {config.seq_len} is longer than the model's {limit} positions: give {limit} or less"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as e:
        raise FinetuneError(_explain(config.model, "tokenizer", e)) from e
    return description, tokenizer


def load_model(config: FinetuneConfig, device: str) -> nn.Module:
    """The dense model in `config.dtype` on `device`. FinetuneError for a damaged file or missing weight."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except SafetensorError as e:
        raise FinetuneError(f"{config.model} has a damaged safetensors file ({one_line(e)}): copy it again") from e
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise FinetuneError(_explain(config.model, "weights", e)) from e
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise FinetuneError(
            f"{config.model} lacks {len(missing)} weights, first {missing[0]}: copy the whole folder again"
        )
    check_format(config, model)
    placed: nn.Module = model.to(device)
    return placed


def check_format(config: FinetuneConfig, model: nn.Module) -> None:
    """Refuse a --format, other than the default, that is not that of experts which are packed already."""
    packed = {module.format for module in model.modules() if isinstance(module, NVFP4Experts)}
    if packed and config.format not in packed | {FinetuneConfig.format}:
        raise FinetuneError(
            f"--format {config.format}: the experts of {config.model} are packed already, in "
            f"{' and '.join(sorted(packed))}: leave --format out, or give the dense model"
        )


def weights_digest(model: nn.Module) -> str:
    """Fingerprint of the weights: names, shapes, dtypes and up to 256 values of each, evenly spread.

    Without the adapters that may be on it. Of a model that several ranks share all must ask: it is that of the whole.
    """
    digest = hashlib.sha256()
    shares = {id(p): m.share for m in model.modules() if isinstance(m, ParallelExperts) for p in m.parameters()}
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            continue
        name, share = path.replace(".base_layer.", "."), shares.get(id(parameter))
        shape = tuple(parameter.shape)
        if share is not None:
            shape = (shape[0] * share.ranks, *shape[1:])
        digest.update(f"{name} {shape} {parameter.dtype}".encode())
        digest.update(_sample(whole(parameter.detach()).flatten(), math.prod(shape), share).numpy().tobytes())
    return digest.hexdigest()


def _sample(flat: Tensor, count: int, share: Any) -> Tensor:
    """The bytes of values evenly spread over `count`, of which `flat` holds all, or one rank's share."""
    step = max(1, count // 256)
    if share is None:
        return flat[::step].contiguous().cpu().view(torch.uint8)
    begin = share.rank * flat.numel()
    first = -(-begin // step)  # of the values, the first that is here
    mine = flat[first * step - begin :: step].contiguous().view(torch.uint8)
    size = flat.element_size()
    everyone = mine.new_zeros(-(-count // step) * size)
    everyone[first * size : first * size + mine.numel()] = mine
    dist.all_reduce(everyone, group=share.group)  # each byte from one rank
    return everyone.cpu()


def _check_folder(model: str) -> None:
    """Say what a local folder lacks. A name that is no folder and looks like no path is left to the hub."""
    folder = Path(model)
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") > 1 or not model:
            raise FinetuneError(f"{model or '--model'} does not exist: check the path given to --model")
        return
    if not folder.is_dir():
        raise FinetuneError(f"{model} is a file: give --model the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise FinetuneError(f"{model} has no config.json: give --model the folder of a transformers model")
    if not any(folder.glob("*.safetensors")):
        raise FinetuneError(
            f"{model} has no *.safetensors, and other formats are not read: "
            "save the model with save_pretrained, which writes them"
        )
    # without any, transformers makes a tokenizer that knows no token
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise FinetuneError(f"{model} has no tokenizer: save it there too with tokenizer.save_pretrained")


def _explain(model: str, what: str, error: Exception) -> str:
    if Path(model).is_dir():
        return f"{model}: cannot load the {what} ({one_line(error)})"
    return (
        f"{model} is no folder here, and the hub did not give its {what} ({one_line(error)}): "
        "check the name and the network"
    )
