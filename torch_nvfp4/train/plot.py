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
    levels = [("quantised base", progress.quantized_loss, "tab:red", ":")]
    if progress.base_loss != progress.quantized_loss:
        levels.insert(0, ("base", progress.base_loss, "black", "--"))
    for name, loss, color, style in levels:
        axes.axhline(loss, color=color, linestyle=style, linewidth=1, label=f"{name}, held-out: {loss:.3f}")
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("loss (nat per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]
