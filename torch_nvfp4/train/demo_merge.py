"""The demo's last act: adapters merged into the 4-bit weights, one trained the ordinary way and one merge-aware."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_nvfp4.checkpoint import quantize_folder
from torch_nvfp4.hf import skeletons
from torch_nvfp4.merge import merge_folder
from torch_nvfp4.train.config import FinetuneConfig
from torch_nvfp4.train.data import Batch, eval_batches, load_data
from torch_nvfp4.train.loop import finetune
from torch_nvfp4.train.step import mean_loss

PARTS = ("packed", "ordinary", "ordinary-merged", "merge-aware", "merge-aware-merged")
STEPS = 80
LEARNING_RATE = 1e-3  # a tenth of the main job's: deltas so small that rounding them shows


@dataclass(frozen=True)
class MergeFigures:
    """Of one adapter on a packed base; losses in nat per token of the held-out text.

    Attributes:
        beside: the adapter's, served beside the base.
        merged: of the merged checkpoint, loaded by itself.
        trained: what the fine-tune ended with.
        kept: how much of the experts' deltas is in the merged weights, along them.
    """

    beside: float
    merged: float
    trained: float
    kept: float


def train_and_merge(base: FinetuneConfig, output: Path, console: Console) -> tuple[MergeFigures, MergeFigures]:
    """(ordinary, merge-aware): two short fine-tunes on the base written packed, each merged into it and reloaded.

    base: the demo's main job. Both run eager: on a CPU rounding takes most of a merge-aware step, compiled or not.
    """
    quantize_folder(Path(base.model), output / "packed", format=base.format, share_gate_up=False)
    short = replace(
        base, model=str(output / "packed"), steps=STEPS, lr=LEARNING_RATE, compile="off", eval_every=0, plot=False
    )
    tokenizer = AutoTokenizer.from_pretrained(short.model)
    batches = eval_batches(load_data(short, tokenizer, len(tokenizer)), short.batch)
    ordinary = _one(replace(short, output=output / "ordinary"), batches, console)
    with_rounding = replace(short, output=output / "merge-aware", merge_aware=True, merge_aware_start=0.5)
    aware = _one(with_rounding, batches, console)
    _print(console, ordinary, aware)
    return ordinary, aware


def _one(config: FinetuneConfig, batches: list[Batch], console: Console) -> MergeFigures:
    result = finetune(config, console=Console(quiet=True))
    merged = config.output.with_name(f"{config.output.name}-merged")
    report = merge_folder(config.model, config.output, merged, skeletons=skeletons)
    experts = [tensor for tensor in report.tensors if tensor.format == config.format]
    kept = sum(tensor.along for tensor in experts) / sum(tensor.delta_squares for tensor in experts)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    loss = mean_loss(model, batches, "cpu")
    console.print(f"{config.output.name}: {result.steps} steps, merged and loaded again", highlight=False)
    beside = result.final_loss if result.unmerged_loss is None else result.unmerged_loss
    return MergeFigures(beside, loss, result.final_loss, kept)


def _print(console: Console, ordinary: MergeFigures, aware: MergeFigures) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("held-out loss", "beside the base", "merged", "experts' delta kept"):
        table.add_column(heading, overflow="fold")
    for name, figures in (("ordinary adapter", ordinary), ("merge-aware adapter", aware)):
        table.add_row(name, f"{figures.beside:.4f}", f"{figures.merged:.4f}", f"{figures.kept:.0%}")
    console.print(table)
