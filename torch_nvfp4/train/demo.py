"""The demo: make a base model, quantise its experts, fine-tune it on other text, and check each claim."""

from __future__ import annotations

import math
import shutil
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_nvfp4 import hf
from torch_nvfp4.train import demo_merge
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError
from torch_nvfp4.train.data import eval_batches, load_data
from torch_nvfp4.train.demo_base import BaseRecipe, BaseReport, make_base
from torch_nvfp4.train.demo_merge import MergeFigures
from torch_nvfp4.train.demo_text import hold_out, source_files
from torch_nvfp4.train.loop import finetune
from torch_nvfp4.train.needs import check_needs
from torch_nvfp4.train.report import FinetuneResult, size
from torch_nvfp4.train.step import mean_loss

BASE_UNDER_UNIGRAM = 1.5
QUANTIZING_COSTS = 0.1
FINETUNE_GAINS = 0.15  # of the base's loss, which is another on every Python's texts
EXPERTS_MATTER = 0.3
PEFT_AGREES = 1e-3
MERGED_AGREES = 1e-4
PACKED_SHARE = 0.15  # of fp32: 4.5 bits of 32 (a code, and a scale per 16), and room for the global scales

_MARKER = ".torch-nvfp4-demo"
_PARTS = ("base", "adapter", "dequantized", *demo_merge.PARTS)


@dataclass(frozen=True)
class Claim:
    """One line of the verdict."""

    text: str
    figure: str
    limit: str
    holds: bool


def run_demo(output: Path, *, seed: int = 0, format: str = "nvfp4", console: Console | None = None) -> int:
    """Run the demo in the folder `output`, its experts in `format`; returns 0 if every claim holds, else 1.

    Raises FinetuneError if the folder holds other things, or this Python lacks documentation or sources.
    """
    console = console or Console()
    start = time.perf_counter()
    config = finetune_config(output, seed, format)
    check_needs(config)
    prepare_folder(output)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console.rule("1. a base model, trained on Python's documentation")
    base = make_base(output / "base", recipe=BaseRecipe(), seed=seed, console=console)
    console.print(f"base: held-out documentation {base.held_out_loss:.3f} nat per token, {base.seconds:.0f} s")
    console.rule(f"2. quantised to {format.upper()} and fine-tuned on Python's source code")
    result = finetune(config, console=console)
    console.rule("3. the adapter in stock PEFT, on the dequantised model")
    peft_loss = stock_peft_loss(config, output / "dequantized", console)
    console.rule("4. adapters merged into the 4-bit weights")
    merges = demo_merge.train_and_merge(config, output, console)
    console.rule("5. what the demo claims")
    claims = judge(base, result, peft_loss, *merges, format=format)
    print_claims(console, claims)
    console.print(f"plot: {result.plot_path}", soft_wrap=True)
    failed = sum(not claim.holds for claim in claims)
    verdict = f"FAIL: {failed} of {len(claims)} claims" if failed else f"PASS: all {len(claims)} claims hold"
    console.print(f"{verdict} ({time.perf_counter() - start:.0f} s, {result.path})")
    return 1 if failed else 0


def prepare_folder(output: Path) -> None:
    """Make the folder, or clear what an earlier demo left. Raises FinetuneError if it holds other things."""
    marker = output / _MARKER
    try:
        if output.exists() and not marker.exists() and any(output.iterdir()):
            raise FinetuneError(f"{output} is not empty and not from a demo: give another --output")
        output.mkdir(parents=True, exist_ok=True)
        marker.touch()
        for part in _PARTS:
            shutil.rmtree(output / part, ignore_errors=True)
    except OSError as e:
        raise FinetuneError(f"{output} cannot be written ({e.strerror}): give another --output") from None


def finetune_config(output: Path, seed: int, format: str = "nvfp4") -> FinetuneConfig:
    """The main job: whole source files held out, rank 16 on every expert, rank 8 on attention."""
    train, held_out = hold_out(source_files())
    return FinetuneConfig(
        model=str(output / "base"),
        text=tuple(train),
        eval_text=tuple(held_out),
        output=output / "adapter",
        rank=8,
        expert_rank=16,
        alpha=16.0,
        lr=1e-2,
        steps=400,
        batch=8,
        seq_len=128,
        dtype="float32",  # so that PEFT's loss can be held to 0.001 nat
        device="cpu",
        eval_batches=24,  # all that is held out
        eval_every=100,
        save_every=0,
        seed=seed,
        format=format,
        resume="never",
    )


def stock_peft_loss(config: FinetuneConfig, folder: Path, console: Console) -> float:
    """Held-out loss of the saved adapter on the dequantised model, run by transformers and PEFT alone.

    The dequantised model is saved in `folder` and loaded from there: an ordinary dense model.
    """
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    original = expert_weights(model)
    hf.quantize_experts(model, config.format)
    hf.dequantize_experts(model)
    error = ((expert_weights(model) - original).norm() / original.norm()).item()
    console.print(f"expert weights, quantised and dequantised: {error:.1%} from the base's (RMS)", highlight=False)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    tokenizer.save_pretrained(folder)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers renames.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = PeftModel.from_pretrained(dense, str(config.output))
    batches = eval_batches(load_data(config, tokenizer, dense.config.vocab_size), config.batch)
    loss = mean_loss(adapted, batches, "cpu")
    console.print(f"held-out loss with the adapter: {loss:.4f}")
    return loss


def expert_weights(model: nn.Module) -> Tensor:
    """All dense expert weights in one flat tensor, a copy."""
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if ".experts." in name])


def judge(
    base: BaseReport,
    result: FinetuneResult,
    peft_loss: float,
    ordinary: MergeFigures,
    aware: MergeFigures,
    *,
    format: str = "nvfp4",
) -> list[Claim]:
    """Hold every claim of the demo against its limit. A figure that is not a number holds for nothing."""
    learned = base.unigram_entropy - base.held_out_loss
    cost = result.quantized_loss - result.base_loss
    gain = result.base_loss - result.final_loss
    experts = result.expert_adapters_zeroed_loss - result.final_loss
    difference = abs(peft_loss - result.final_loss)
    merged_difference = abs(aware.merged - aware.trained)
    before, after = result.experts_bytes_before, result.experts_bytes_after
    return [
        Claim(
            "base, documentation",
            f"{base.held_out_loss:.4f} ({-learned:+.4f}; unigram {base.unigram_entropy:.4f})",
            f"≤ -{BASE_UNDER_UNIGRAM}",
            learned >= BASE_UNDER_UNIGRAM,
        ),
        Claim(
            "base, source code",
            f"{result.base_loss:.4f}",
            "finite",
            math.isfinite(result.base_loss),
        ),
        Claim(
            f"experts in {format.upper()}",
            f"{result.quantized_loss:.4f} ({cost:+.4f})",
            f"< +{QUANTIZING_COSTS}",
            cost < QUANTIZING_COSTS,
        ),
        Claim(
            "memory of the experts",
            f"{size(before)} -> {size(after)} ({after / before:.3f}x)",
            f"≤ {PACKED_SHARE}x",
            after <= PACKED_SHARE * before,
        ),
        Claim(
            "fine-tuned",
            f"{result.final_loss:.4f} ({-gain:+.4f}, {-gain / result.base_loss:+.0%})",
            f"≤ -{FINETUNE_GAINS:.0%}",
            gain >= FINETUNE_GAINS * result.base_loss,
        ),
        Claim(
            "expert adapters zeroed",
            f"{result.expert_adapters_zeroed_loss:.4f} ({experts:+.4f})",
            f"≥ +{EXPERTS_MATTER}",
            experts >= EXPERTS_MATTER,
        ),
        Claim(
            "adapter in stock PEFT",
            f"{peft_loss:.4f} (differs by {difference:.1e})",
            f"≤ {PEFT_AGREES}",
            difference <= PEFT_AGREES,
        ),
        Claim(
            "merge-aware, merged alone",
            f"{aware.merged:.4f} (differs by {merged_difference:.1e})",
            f"≤ {MERGED_AGREES}",
            merged_difference <= MERGED_AGREES,
        ),
    ]


def print_claims(console: Console, claims: list[Claim]) -> None:
    """The verdict, one claim a line; losses in nat per token."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("held-out loss, nat per token", "figure", "limit", ""):
        table.add_column(heading, overflow="fold")
    for claim in claims:
        verdict = "[green]PASS[/green]" if claim.holds else "[bold red]FAIL[/bold red]"
        table.add_row(claim.text, claim.figure, claim.limit, verdict)
    console.print(table)
