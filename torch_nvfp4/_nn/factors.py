"""LoRA factors: those that a module is given at a call, and those that it begins with."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ProjectionName = Literal["gate_up", "down"]
PROJECTIONS: tuple[ProjectionName, ...] = ("gate_up", "down")


def check_projections(names: Iterable[str]) -> None:
    """Raise ValueError for a name that is none: an adapter under it would go unused without a word."""
    unknown = [name for name in names if name not in PROJECTIONS]
    if unknown:
        raise ValueError(f"projections are {', '.join(PROJECTIONS)}, got {unknown[0]!r}")


class LoRAFactors(NamedTuple):
    """An adapter kept outside the module: a `[E, R, C]`, b `[E, N, R]` (of one matrix `[R, C]`, `[N, R]`)."""

    a: Tensor
    b: Tensor
    scaling: float


class MixedLoRA(NamedTuple):
    """Several adapters and each token's choice: ids `[T]`, any int dtype, index `adapters`; outside it, none."""

    adapters: Sequence[Mapping[ProjectionName, LoRAFactors]]
    ids: Tensor


def new_factors(
    experts: int, r: int, n: int, c: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """PEFT's start: A kaiming-uniform for each expert, B zero, so that the adapter begins as a no-op."""
    bound = 1 / math.sqrt(c)  # kaiming_uniform_(a=sqrt(5)) of an [R, C] matrix
    a = torch.empty(experts, r, c, dtype=dtype, device=device).uniform_(-bound, bound)
    return a, torch.zeros(experts, n, r, dtype=dtype, device=device)
