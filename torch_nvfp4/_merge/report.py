"""What merging an adapter did to each weight: how much of its delta is in the new numbers."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._table import aligned
from ..checkpoint import PackedWeight
from ..format import dequantize

NEARLY_NOTHING = 0.1
"""Share of a delta, along itself, under which it is said that merging lost it."""
MOSTLY_NOISE = 2.0
"""||applied|| / ||delta|| above which it is said that what changed is mostly rounding."""
_FULL_SCALE = 2688.0  # 6 * 448: the largest value over the global scale


@dataclass
class TensorReport:
    """One weight, all its experts together. delta: scaling · b a. applied: the new values minus the old ones.

    Attributes:
        name: of the weight, by the model's name for it.
        format: "nvfp4", "mxfp4", or the dtype of a dense weight.
        delta_norm, applied_norm: Frobenius norms.
        along: <applied, delta>, the part of what was applied that points where the delta does, times its norm.
        clipped: values beyond what the base's global scale can hold.
    """

    name: str
    format: str
    delta_squares: float = 0.0
    applied_squares: float = 0.0
    along: float = 0.0
    clipped: int = 0

    @property
    def delta_norm(self) -> float:
        return math.sqrt(self.delta_squares)

    @property
    def applied_norm(self) -> float:
        return math.sqrt(self.applied_squares)

    @property
    def survived(self) -> float | None:
        """||applied|| / ||delta||; None for a delta of zeros."""
        return None if self.delta_squares == 0 else math.sqrt(self.applied_squares / self.delta_squares)

    @property
    def direction(self) -> float | None:
        """<applied, delta> / ||delta||^2: how much of the delta itself is there, rounding noise aside."""
        return None if self.delta_squares == 0 else self.along / self.delta_squares

    def add(self, delta: Tensor, old: Tensor, new: Tensor) -> None:
        """Count a piece: fp32 tensors of one shape."""
        applied = new - old
        self.delta_squares += float(delta.square().sum(dtype=torch.float64))
        self.applied_squares += float(applied.square().sum(dtype=torch.float64))
        self.along += float((applied * delta).sum(dtype=torch.float64))

    def add_packed(self, before: PackedWeight, after: PackedWeight, delta: Tensor) -> None:
        """Count packed weights `[E, N, C]` before and after, and their delta."""
        old = dequantize(*before, torch.float32)
        self.add(delta, old, dequantize(*after, torch.float32))
        if self.format == "nvfp4":
            halves = before.global_scale.shape[-1]
            most = before.global_scale.unsqueeze(-1).unsqueeze(-1) * _FULL_SCALE
            self.clipped += int(((old + delta).unflatten(-2, (halves, -1)).abs() > most * (1 + 2**-20)).sum())

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "format": self.format, "delta_norm": self.delta_norm,
            "applied_norm": self.applied_norm, "survived": self.survived, "direction": self.direction,
            "clipped": self.clipped,
        }  # fmt: skip


@dataclass
class MergeReport:
    """What `merge_folder` wrote.

    Attributes:
        tensors: a report for each adapted weight.
        merge_aware: whether the adapter was trained with these numbers.
        dense: whether the new model is dense.
        inexact: global scales that another layout keeps in another last bit.
    """

    merge_aware: bool
    dense: bool
    tensors: list[TensorReport] = field(default_factory=list)
    inexact: int = 0

    @property
    def total(self) -> TensorReport:
        parts = [asdict(tensor) for tensor in self.tensors]
        keys = ("delta_squares", "applied_squares", "along", "clipped")
        return TensorReport("all", "", **{key: sum(part[key] for part in parts) for key in keys})

    def to_json(self) -> dict[str, Any]:
        """As JSON values: NaN and infinity cannot occur, a ratio without a delta is null."""
        total = self.total.to_json()
        return {
            "merge_aware": self.merge_aware, "dense": self.dense, "inexact": self.inexact,
            "total": {key: value for key, value in total.items() if key not in ("name", "format")},
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """A table, a line for each weight and one for all."""
        heading = ("weight", "format", "|delta|", "|applied|", "survived", "direction", "clipped")
        rows = [_cells(tensor) for tensor in (*self.tensors, self.total)]
        return aligned([heading, *rows], left=2)

    def warnings(self) -> Iterable[str]:
        """In words, what the reader should know before serving the new model."""
        with_delta = [tensor for tensor in self.tensors if tensor.direction is not None]
        lost = [tensor for tensor in with_delta if (tensor.direction or 0.0) < NEARLY_NOTHING]
        noisy = [tensor for tensor in with_delta if (tensor.survived or 0.0) > MOSTLY_NOISE]
        if self.merge_aware and (lost or noisy):
            yield (
                f"{len({t.name for t in (*lost, *noisy)})} of {len(self.tensors)} weights changed otherwise than by "
                "their delta; the adapter was trained merge-aware, so its losses were measured with just these weights"
            )
        elif lost:
            yield (
                f"{len(lost)} of {len(self.tensors)} weights keep less than {NEARLY_NOTHING:.0%} of their delta, "
                f"{lost[0].name} for one: rounding to {lost[0].format} ate it, and the merged model is nearly the base "
                "there. Train merge-aware (torch-nvfp4 finetune --merge-aware), merge into a dense model (--dense), or "
                "serve the adapter beside the base"
            )
        if noisy and not self.merge_aware:
            yield (
                f"{len(noisy)} of {len(self.tensors)} weights changed by more than {MOSTLY_NOISE:g} times their delta, "
                f"{noisy[0].name} for one: mostly rounding, because fresh block scales are not those of the base"
            )
        if clipped := self.total.clipped:
            yield f"{clipped} values lie beyond the largest that the base's global scales can hold, and were clipped"
        if self.inexact:
            yield f"{self.inexact} global scales have no exact counterpart in this layout: off by the last bit"


def _cells(tensor: TensorReport) -> tuple[str, ...]:
    ratios = (f"{r:.1%}" if r is not None else "-" for r in (tensor.survived, tensor.direction))
    norms = (f"{norm:.3g}" for norm in (tensor.delta_norm, tensor.applied_norm))
    return (tensor.name, tensor.format, *norms, *ratios, str(tensor.clipped))
