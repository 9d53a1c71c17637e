"""The calculator's tables, and which layout it takes."""

from __future__ import annotations

from collections.abc import Sequence

from .card import Card
from .layout import Job, Plan, candidates, plan
from .model import Model

_COLUMNS = (
    "layout", "weights", "adapters", "activations", "peak", "fits", "gathered", "exchanged", "reduced", "step s",
    "tokens/s",
)  # fmt: skip


def report(model: Model, card: Card, gpus: int, job: Job) -> str:
    """Markdown: a line of what is planned, a table with a row for each layout, and the choice."""
    plans = [plan(model, card, layout, job) for layout in candidates(model, gpus)]
    lines = [
        f"{model.name}: {model.parameters / 1e9:.0f} B parameters on {gpus} x {card.name}, "
        f"{job.batch} x {job.seq_len} tokens each",
        "",
        _row(_COLUMNS),
        _row(["---"] + ["---:"] * (len(_COLUMNS) - 1)),
        *(_row(_cells(p, gpus, job)) for p in plans),
        "",
        _choice(plans, card),
    ]
    return "\n".join(lines)


def choose(plans: Sequence[Plan]) -> Plan | None:
    """The fastest of those that fit; of equally fast ones (within 2 %) the one that needs least memory."""
    fitting = [p for p in plans if p.fits]
    if not fitting:
        return None
    fastest = min(p.step_s for p in fitting)
    return min((p for p in fitting if p.step_s <= 1.02 * fastest), key=lambda p: p.peak)


def _choice(plans: Sequence[Plan], card: Card) -> str:
    chosen = choose(plans)
    if chosen is None:
        least = min(plans, key=lambda p: p.peak)
        return (
            f"None fits {card.name}: {least.layout.name} needs {_gib(least.peak)} GiB of {_gib(card.memory)}. "
            "More cards, a smaller rank, or fewer tokens."
        )
    too_large = [p.layout.name for p in plans if not p.fits]
    reasons = [f"**{chosen.layout.name}**: the fastest that fits"]
    if too_large:
        reasons.append(f"too large: {', '.join(too_large)}")
    others = [p for p in plans if p.fits and p is not chosen]
    if others:
        other = min(others, key=lambda p: p.step_s)
        reasons.append(f"next is {other.layout.name} with {other.step_s:.2f} s and {_gib(other.peak)} GiB")
    computing = chosen.compute_s / chosen.step_s
    reasons.append(f"{computing:.0%} of its step is computation")
    return "; ".join(reasons) + "."


def _cells(p: Plan, gpus: int, job: Job) -> list[str]:
    return [
        p.layout.name, _gib(p.weights), _gib(p.adapters), _gib(p.transient), _gib(p.peak), "yes" if p.fits else "no",
        f"{p.gathered / 1e9:.1f}", f"{p.exchanged / 1e9:.1f}", f"{p.reduced / 1e9:.1f}", f"{p.step_s:.2f}",
        f"{gpus * job.tokens / p.step_s:.0f}",
    ]  # fmt: skip


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
