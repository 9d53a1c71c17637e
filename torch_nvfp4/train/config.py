"""What a fine-tune is told: one frozen dataclass, one field per command-line flag."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float32")
OPTIMIZERS = ("adamw", "sgd")
FORMATS = ("nvfp4", "mxfp4")
COMPILE_MODES = ("auto", "on", "off")
DEVICES = ("auto", "cpu", "cuda")
TRAIN_ON = ("assistant", "all")
DEFAULT_TARGETS = ("experts", "q_proj", "k_proj", "v_proj", "o_proj")

# What may differ between a run and the run that resumes it: where files lie, how often things are written and
# shown, and how the step is executed. The model is compared by content instead, and so is what is trained on.
_FILES = ("model", "text", "eval_text", "dataset", "eval_dataset", "chat_template", "output")
_NOT_IN_FINGERPRINT = frozenset(
    {*_FILES, "compile", "device", "eval_every", "save_every", "keep", "resume", "plot", "fsdp", "ep"}
)


class FinetuneError(Exception):
    """The run cannot go on, and the user can mend it: one line says what is wrong and how."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the state is saved, the text says how to go on.

    Args:
        signum: the signal that ended the run (2 for SIGINT, 15 for SIGTERM).
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tune of LoRA adapters on 4-bit experts; the flags of `torch-nvfp4 finetune` are these fields."""

    model: str = field(
        metadata={"help": "Folder of a transformers model (config.json, safetensors, tokenizer), or a hub id."}
    )
    output: Path = field(metadata={"help": "Folder for the adapter, the plot and the checkpoints."})
    text: tuple[Path, ...] = _flag(
        (), "UTF-8 file to train on: text, or .jsonl with a chat or a text a line; give it once per file."
    )
    dataset: tuple[str, ...] = _flag((), "NAME[:SPLIT] of the datasets library to train on; once per dataset.")
    eval_text: tuple[Path, ...] = _flag((), "File to evaluate on; without it a share of every text is held out.")
    eval_dataset: tuple[str, ...] = _flag((), "NAME[:SPLIT] to evaluate on.")
    eval_fraction: float = _flag(0.1, "Share that is held out when there is no --eval-text and no --eval-dataset.")
    eval_batches: int = _flag(16, "Evaluate on this many batches at most.")
    train_on: str = _flag("assistant", "Tokens of a chat that are learnt: assistant (what the assistant says) or all.")
    chat_template: Path | None = _flag(None, "Jinja file of a chat template, in place of the tokenizer's own.")
    pack: bool = _flag(True, "Put several samples into a sequence; they do not see each other.")
    rank: int = _flag(16, "LoRA rank of the dense linear layers.")
    expert_rank: int = _flag(16, "LoRA rank of every expert.")
    alpha: float = _flag(32.0, "LoRA scaling is alpha / rank.")
    rslora: bool = _flag(False, "LoRA scaling is alpha / sqrt(rank) instead.")
    targets: tuple[str, ...] = _flag(DEFAULT_TARGETS, "Modules that get an adapter, separated by commas.")
    lr: float = _flag(2e-4, "Peak learning rate; a cosine lowers it to 0.")
    steps: int = _flag(200, "Optimiser steps.")
    batch: int = _flag(4, "Sequences in a forward pass.")
    seq_len: int = _flag(256, "Tokens in a sequence.")
    grad_accum: int = _flag(1, "Forward passes in an optimiser step.")
    warmup: int = _flag(None, "Steps over which the learning rate rises. Default: a tenth of --steps, 10 at most.")
    weight_decay: float = _flag(0.0, "Weight decay of the optimiser.")
    clip: float = _flag(1.0, "Largest gradient norm; 0 does not clip.")
    format: str = _flag("nvfp4", "Format that dense experts are quantised to: nvfp4 or mxfp4.")
    merge_aware: bool = _flag(
        False, "Train through the 4-bit rounding that merging the adapter does; such an adapter is for merging."
    )
    merge_aware_start: float = _flag(0.0, "First step that is merge-aware: a step, or below 1 a share of --steps.")
    lora_dtype: str = _flag("float32", "Dtype of adapters, gradients and optimiser: float32 or bfloat16.")
    dtype: str = _flag("bfloat16", "Dtype of weights and activations: bfloat16 or float32.")
    optim: str = _flag("adamw", "Optimiser: adamw, or sgd (momentum 0.9, half the bytes).")
    compile: str = _flag("auto", "torch.compile: auto (if its compilers are here), on or off.")
    device: str = _flag("auto", "Where to train: auto, cpu or cuda.")
    gradient_checkpointing: bool = _flag(False, "Recompute layers in backward: less memory, more time.")
    fsdp: int = _flag(0, "Shard the model over this many processes of torchrun (FSDP2); 0: one process has it whole.")
    ep: int = _flag(
        0, "Split the experts over this many processes of torchrun, each part sharded by --fsdp if given; 0: no."
    )
    eval_every: int = _flag(50, "Steps between evaluations; 0 evaluates only at the end.")
    save_every: int = _flag(50, "Steps between checkpoints; 0 saves only at the end.")
    keep: int = _flag(2, "Checkpoints to keep, newest first.")
    seed: int = _flag(0, "Seed of the adapters and of the data order.")
    resume: str = _flag("auto", "auto (newest checkpoint in --output, if any), never, or a checkpoint folder.")
    plot: bool = _flag(True, "Draw loss.png.")

    def __post_init__(self) -> None:
        for name in ("text", "dataset", "eval_text", "eval_dataset", "targets"):
            if isinstance(value := getattr(self, name), str | Path):  # a string would be taken by its letters
                object.__setattr__(self, name, (value,))
        warmup: Any = self.warmup
        if warmup is None:  # not given
            object.__setattr__(self, "warmup", min(10, self.steps // 10))

    def validate(self) -> None:
        """Raise FinetuneError, naming the flag, if a value can train nothing."""
        for name in ("rank", "expert_rank", "steps", "batch", "grad_accum", "eval_batches", "keep"):
            if getattr(self, name) < 1:
                raise FinetuneError(f"{flag(name)} is {getattr(self, name)}: give 1 or more")
        if self.seq_len < 2:
            raise FinetuneError(f"--seq-len is {self.seq_len}: give 2 or more")
        for name in ("alpha", "lr"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise FinetuneError(f"{flag(name)} is {value:g}: give a number above 0")
        for name in ("warmup", "weight_decay", "clip", "fsdp", "ep", "eval_every", "save_every", "seed"):
            if not getattr(self, name) >= 0:
                raise FinetuneError(f"{flag(name)} is {getattr(self, name):g}: give 0 or more")
        if self.warmup >= self.steps:
            raise FinetuneError(
                f"--warmup {self.warmup} leaves none of the {self.steps} steps: give fewer than --steps"
            )
        start = self.merge_aware_start
        if start and not self.merge_aware:
            raise FinetuneError("--merge-aware-start says when, and not that: give --merge-aware too")
        if not (0 <= start < 1 or (1 <= start < self.steps and start == int(start))):
            raise FinetuneError(
                f"--merge-aware-start is {start:g}: give a whole step below --steps {self.steps}, or a share below 1"
            )
        if not 0 < self.eval_fraction < 1:
            raise FinetuneError(f"--eval-fraction is {self.eval_fraction:g}: give a number between 0 and 1")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise FinetuneError(f"{flag(name)} is {getattr(self, name)!r}: give one of {', '.join(allowed)}")
        if not (self.text or self.dataset):
            raise FinetuneError("nothing to train on: give --text FILE or --dataset NAME, once for each")
        if not self.targets:
            raise FinetuneError("no --targets: name the modules that get an adapter, for example --targets experts")

    @property
    def merge_aware_from(self) -> int | None:
        """How many steps are done before the first merge-aware one; None where none is."""
        if not self.merge_aware:
            return None
        start = self.merge_aware_start
        return int(start) if start >= 1 else int(start * self.steps)

    def fingerprint(self) -> dict[str, Any]:
        """Every setting that changes the trained numbers, as JSON values; without model and data."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_IN_FINGERPRINT}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}


_CHOICES = {
    "format": FORMATS,
    "train_on": TRAIN_ON,
    "lora_dtype": DTYPES,
    "dtype": DTYPES,
    "optim": OPTIMIZERS,
    "compile": COMPILE_MODES,
    "device": DEVICES,
}


def flag(name: str) -> str:
    """The command-line flag of a field: `expert_rank` is `--expert-rank`."""
    return "--" + name.replace("_", "-")


def one_line(error: Exception, limit: int = 200) -> str:
    """An exception's text on one line, cut short."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
