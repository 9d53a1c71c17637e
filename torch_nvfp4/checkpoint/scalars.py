"""Numbers that a file keeps for a whole weight: ModelOpt's multiplier m, or compressed-tensors' divisor d, read as 1/d.

The reciprocal is not one to one on fp32: of m between sqrt(1/2) and 1 (times a power of two) 29 % belong to no d, and
as many d between sqrt(2) and 2 share their m with another. So a number is turned with care for what it came from, and
what will be read as another multiplier is counted.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..format import GLOBAL_DIVISOR
from .errors import CheckpointError


@dataclass(frozen=True)
class Numbers:
    """fp32 numbers as stored, and the multipliers that they stand for; NaN where there is none."""

    stored: Tensor
    divisor: bool
    meant: Tensor

    @classmethod
    def read(cls, stored: Tensor, divisor: bool) -> "Numbers":
        return cls(stored, divisor, stored.reciprocal() if divisor else stored)

    def turned(self, divisor: bool) -> "Numbers":
        """In the other convention, if that is wanted."""
        if divisor == self.divisor:
            return self
        turned = _divisor_of(self.stored) if divisor else _multiplier_of(self.stored)
        return replace(self, stored=turned, divisor=divisor)

    @property
    def inexact(self) -> int:
        """How many will be read as another multiplier than is meant."""
        same = Numbers.read(self.stored, self.divisor).meant == self.meant
        return int((~same & ~self.meant.isnan()).sum())


def check_storable(name: str, value: Tensor, divisor: bool) -> None:
    """CheckpointError for a global scale that readers take for one of the other convention, or for none at all."""
    number = value.item()
    if not (1 <= number < float("inf") if divisor else 0 < number <= 1):
        raise CheckpointError(
            f"tensor {name!r} would be {number}: a {'divisor' if divisor else 'multiplier'} must be "
            f"{'at least 1 and finite' if divisor else 'above 0 and at most 1'}"
        )


def _divisor_of(multiplier: Tensor) -> Tensor:
    """The divisor that is read as the multiplier: of two the rounder one, and the nearest where there is none.

    The rounder one (more trailing zeros) is what quantisers write for bf16 and fp16 weights, where 2688 / amax has
    their precision; every such divisor comes back from its multiplier.
    """
    candidates, bits = _neighbours(multiplier.reciprocal(), 2)
    fits = candidates.reciprocal() == multiplier.unsqueeze(-1)
    return _best(candidates, torch.where(fits, bits & -bits, -1))


def _multiplier_of(divisor: Tensor) -> Tensor:
    """The multiplier that the divisor is read as, unless a neighbour is plainly where the divisor came from.

    That is amax / 2688 of a bf16 or fp16 amax, as ModelOpt writes it, of which the divisor is the nearest: 12 % of
    those have no divisor that is read as them. (No divisor with a bf16 or fp16 value has such a neighbour.)
    """
    candidates, _ = _neighbours(divisor.reciprocal(), 1)
    amax = candidates * GLOBAL_DIVISOR
    plain = (_short(amax) / GLOBAL_DIVISOR == candidates) & (_divisor_of(candidates) == divisor.unsqueeze(-1))
    return _best(candidates, plain.to(torch.int32))


def _neighbours(values: Tensor, ulps: int) -> tuple[Tensor, Tensor]:
    """`[..., 2 ulps + 1]`: the values themselves first, then what lies around them; and their bits."""
    steps = sorted(range(-ulps, ulps + 1), key=abs)
    bits = values.view(torch.int32).unsqueeze(-1) + torch.tensor(steps, dtype=torch.int32)
    return bits.view(torch.float32), bits


def _best(candidates: Tensor, rank: Tensor) -> Tensor:
    """The candidate of highest rank, the first of equals: then the value that the others are neighbours of."""
    highest = (rank == rank.amax(-1, keepdim=True)).to(torch.int32).argmax(-1, keepdim=True)
    return candidates.gather(-1, highest).squeeze(-1)


def _short(values: Tensor) -> Tensor:
    """Rounded to the 11 bits that a bf16 or fp16 number has at most."""
    mantissa, exponent = values.frexp()
    return (mantissa * 2048).round().ldexp(exponent - 11)
