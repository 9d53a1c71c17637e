"""What `explain` returns."""

from __future__ import annotations

from dataclasses import dataclass

from .._table import aligned
from .card import Card


@dataclass(frozen=True)
class OpReport:
    """Calls of one op that took the same way.

    op: without its namespace; "combine" and "plain torch" are no ops of the library, but part of a layer.
    path: "CPU kernel", "Triton kernel", "decode to scratch", "block-scaled product", "emulated w4a4" (the product of
        4-bit rows with and without instructions for it), "Inductor", "Inductor template" or "plain torch".
    why: what decided the path.
    kernels: what one call launches, with tile sizes.
    launches, nbytes, flops: of all calls; bytes are an estimate, each argument and result once.
    """

    op: str
    path: str
    why: str
    calls: int
    kernels: tuple[str, ...] = ()
    launches: int = 0
    nbytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Explanation:
    """Which path ran for each op of one forward (and backward, where something requires a gradient).

    device: its name.
    compiled: whether generated code ran.
    backward: whether there was one.
    layers: calls of moe_route, at least 1.
    kernels: launches by name, all that the device ran where a profiler could tell, else those of the library.
    card: the rates of the card, measured or given; None on a CPU.
    measured_ms: time of forward and backward on the card, or None.
    notes: what could not be found out.
    """

    device: str
    compiled: bool
    backward: bool
    layers: int
    ops: tuple[OpReport, ...]
    kernels: dict[str, int]
    card: Card | None = None
    measured_ms: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(op.nbytes for op in self.ops)

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)

    @property
    def launches(self) -> int:
        return sum(self.kernels.values())

    @property
    def launches_per_layer(self) -> float:
        return self.launches / self.layers

    @property
    def floor_ms(self) -> float | None:
        """The least time in which the card could do it: its products and its traffic, whichever takes longer."""
        return None if self.card is None else self.card.floor_ms(self.flops, self.nbytes)

    @property
    def share_of_floor(self) -> float | None:
        """Floor / measured time: 1 is perfect."""
        return self.floor_ms / self.measured_ms if self.floor_ms is not None and self.measured_ms else None

    def __str__(self) -> str:
        passes = "forward + backward" if self.backward else "forward"
        lines = [
            f"{self.device}, {'compiled' if self.compiled else 'eager'}, {passes}, {_plural(self.layers, 'layer')}"
        ]
        lines += _table(self)
        lines += [f"  {op.op}: {kernel}" for op in self.ops for kernel in op.kernels]
        for path, why in dict.fromkeys((op.path, op.why) for op in self.ops):
            lines.append(f"{path}: {why}")
        if self.kernels:
            lines.append(f"launches: {self.launches}, {self.launches_per_layer:.1f} a layer")
            lines += [f"  {count:5d} x {name}" for name, count in self.kernels.items()]
        lines.append(f"moved about {_mb(self.nbytes)} MB, computed {_gflop(self.flops)} GFLOP")
        if self.card is not None and self.floor_ms is not None:
            rates = f"{self.card.flops / 1e12:.0f} TFLOP/s, {self.card.bandwidth / 1e9:.0f} GB/s"
            lines.append(f"floor of {self.card.name} ({rates}): {self.floor_ms:.3f} ms")
        if self.share_of_floor is not None:
            lines.append(f"took {self.measured_ms:.3f} ms: {100 * self.share_of_floor:.0f}% of what the card allows")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


_COLUMNS = ("op", "path", "calls", "launches", "MB", "GFLOP", "floor us")


def _table(explanation: Explanation) -> list[str]:
    card = explanation.card
    rows = [_COLUMNS]
    for op in explanation.ops:
        floor = "-" if card is None else f"{1e3 * card.floor_ms(op.flops, op.nbytes):.1f}"
        rows.append((op.op, op.path, str(op.calls), str(op.launches), _mb(op.nbytes), _gflop(op.flops), floor))
    return [f"  {line}" for line in aligned(rows, left=2)]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _mb(value: float) -> str:
    return f"{value / 1e6:.3g}"


def _gflop(value: float) -> str:
    return f"{value / 1e9:.3g}"
