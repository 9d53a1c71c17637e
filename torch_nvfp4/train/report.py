"""What a run says: its memory plan at the start, progress, and a summary at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torch_nvfp4.train.memory import MemoryPlan, peak_bytes


@dataclass(frozen=True)
class FinetuneResult:
    """What a fine-tune ended with. Losses are mean cross-entropy per token in nat, on the held-out split.

    Attributes:
        base_loss, quantized_loss: before and after quantising the experts, before training. Both are the latter where
            the experts were packed already, or by each of several processes before the first loss.
        final_loss: with the trained adapters.
        expert_adapters_zeroed_loss: with the adapters of the experts alone switched off.
        steps: optimiser steps, resumed ones included.
        tokens_per_second: of the training steps of this process; 0 if it trained none.
        peak_memory_bytes, predicted_peak_bytes: of this process (CPU) or of torch's allocator (CUDA).
        path: what ran the step: "compiled (inductor, C++)" or "eager".
        experts_bytes_before, experts_bytes_after: expert weights, dense and packed.
        loss_history, eval_history: (step, loss) on the training batches and on the held-out split.
        unmerged_loss: of a merge-aware adapter served beside the base; None for an adapter that is not merge-aware, and
            `final_loss` is then that of the adapter, otherwise of the merged model.
    """

    base_loss: float
    quantized_loss: float
    final_loss: float
    expert_adapters_zeroed_loss: float
    steps: int
    tokens_per_second: float
    peak_memory_bytes: int
    predicted_peak_bytes: int
    path: str
    experts_bytes_before: int
    experts_bytes_after: int
    adapter_dir: Path
    plot_path: Path | None
    loss_history: tuple[tuple[int, float], ...]
    eval_history: tuple[tuple[int, float], ...]
    unmerged_loss: float | None = None


def size(count: int) -> str:
    """Bytes for people: 1536 is "1.5 KiB"."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def print_plan(console: Console, plan: MemoryPlan, optim: str, device: str) -> None:
    """The bytes that the run keeps, part by part, and the peak expected of them."""
    table = _table("memory", "bytes")
    moments = {"adamw": "AdamW moments", "sgd": "SGD momentum"}[optim]
    adapter = plan.adapter + plan.gradients + plan.moments
    table.add_row("experts, packed", f"{size(plan.packed_experts)} (dense: {size(plan.dense_experts)})")
    table.add_row("other weights", size(plan.other))
    table.add_row("adapters", size(plan.adapter))
    table.add_row("their gradients", size(plan.gradients))
    table.add_row(moments, size(plan.moments))
    table.add_row("adapters in all", f"{size(adapter)} ({adapter / max(1, plan.packed_experts):.1f}x packed experts)")
    table.add_row("kept by all layers (estimate)", size(plan.activations.kept))
    table.add_row("backward of a layer (estimate)", size(plan.activations.layer))
    table.add_row("logits and loss (estimate)", size(plan.activations.logits))
    if plan.compiler:
        table.add_row("torch.compile (estimate)", size(plan.compiler))
    table.add_row("held now", f"{size(plan.held)} (at most so far: {size(plan.highest)})")
    table.add_row("predicted peak", f"{size(plan.peak)} ({'GPU' if device == 'cuda' else 'process'})")
    console.print(table)


def print_summary(console: Console, result: FinetuneResult) -> None:
    """The last words of a run."""
    table = _table("result", "")
    tuned = "fine-tuned" if result.unmerged_loss is None else "fine-tuned, as merged"
    losses = [
        *_base_rows(result),
        (tuned, result.final_loss, result.quantized_loss),
        ("fine-tuned, expert adapters off", result.expert_adapters_zeroed_loss, result.final_loss),
    ]
    if result.unmerged_loss is not None:
        losses.append(("fine-tuned, adapter not merged", result.unmerged_loss, result.final_loss))
    for name, loss, reference in losses:
        change = "" if reference is None else f" ({loss - reference:+.4f})"
        table.add_row(f"held-out loss: {name}", f"{loss:.4f} nat per token{change}")
    table.add_row("expert weights", f"{size(result.experts_bytes_before)} -> {size(result.experts_bytes_after)}")
    if result.tokens_per_second:
        table.add_row("speed", f"{result.tokens_per_second:,.0f} tokens/s")
    measured = size(result.peak_memory_bytes) if result.peak_memory_bytes else "not known on this system"
    table.add_row("peak memory", f"{measured} (predicted: {size(result.predicted_peak_bytes)})")
    table.add_row("ran", result.path)
    purpose = "" if result.unmerged_loss is None else " (merge-aware: for torch-nvfp4 merge)"
    table.add_row("adapter", f"{result.adapter_dir}{purpose}")
    if result.plot_path:
        table.add_row("plot", str(result.plot_path))
    console.print(table)


def _base_rows(result: FinetuneResult) -> list[tuple[str, float, float | None]]:
    if result.base_loss == result.quantized_loss:  # packed before the first loss was measured
        return [("base, experts packed", result.quantized_loss, None)]
    return [
        ("base", result.base_loss, None),
        ("base, experts quantised", result.quantized_loss, result.base_loss),
    ]


def _table(first: str, second: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    table.add_column(second, overflow="fold")
    return table


class TrainingDisplay:
    """A progress bar with loss, tokens/s and peak memory; without a terminal, a line now and then instead."""

    def __init__(self, console: Console, device: str, done: int, steps: int) -> None:
        self._console = console
        self._device = device
        self._steps = steps
        self._line_every = max(1, steps // 10)
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=done, status="")

    def __enter__(self) -> TrainingDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show one optimiser step's training loss."""
        status = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, peak {size(peak_bytes(self._device))}"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._line_every == 0 or step == self._steps):
            self._console.print(f"step {step}/{self._steps}: {status}")

    def evaluation(self, step: int, loss: float) -> None:
        """Show the held-out loss at a step."""
        self._console.print(f"step {step}/{self._steps}: held-out loss {loss:.4f}")
