"""loss.png: the training loss, the held-out loss, and the two levels they started from."""

from __future__ import annotations

from pathlib import Path

from torch_nvfp4.train.state import Progress


def write_plot(progress: Progress, path: Path) -> None:
    """Draw the losses (nat per token) over the optimiser steps into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_columns(progress.train_losses), linewidth=1, alpha=0.7, label="training text")
    axes.plot(*_columns(progress.eval_losses), "o-", markersize=4, label="held-out text")
    if progress.base_loss != progress.quantized_loss:
        axes.axhline(
            progress.base_loss,
            color="black",
            linestyle="--",
            linewidth=1,
            label=f"base, held-out: {progress.base_loss:.3f}",
        )
    axes.axhline(
        progress.quantized_loss,
        color="tab:red",
        linestyle=":",
        linewidth=1,
        label=f"quantised base, held-out: {progress.quantized_loss:.3f}",
    )
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("loss (nat per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]
