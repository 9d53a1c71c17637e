"""Which variants of the kernels a layer uses over all token counts: few, as tiles follow from rows per expert alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..nn import NVFP4Experts
from ..ops import cuda, observe
from .watch import Launch, Watch

MOST_TOKENS = 32768


@dataclass(frozen=True)
class LayerSizes:
    """What decides a layer's kernels, but for T; `r` 0 is a layer without adapters."""

    h: int
    i: int
    e: int
    k: int
    r: int = 16
    activation: str = "silu"
    limit: float | None = None
    bias: bool = False
    format: str = "nvfp4"
    dtype: torch.dtype = torch.bfloat16

    def experts(self, device: str) -> NVFP4Experts:
        """A layer of these sizes, all zeros."""
        experts = NVFP4Experts(
            self.e, self.h, self.i, activation=self.activation, limit=self.limit, bias=self.bias, format=self.format,
            device=device,
        )  # fmt: skip
        if self.r:
            experts.add_lora(self.r, scaling=1.0)
        return experts

    def inputs(self, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, ids that use the experts evenly, and router weights."""
        x = torch.zeros(tokens, self.h, dtype=self.dtype, device=device, requires_grad=True)
        ids = (torch.arange(tokens * self.k, device=device) % self.e).view(tokens, self.k)
        weights = torch.full((tokens, self.k), 1 / self.k, device=device, requires_grad=True)
        return x, ids, weights


Key = tuple[str, tuple[tuple[str, str], ...]]
"""(kernel, the constants that it is compiled for)."""


def key(launch: Launch) -> Key:
    return launch.kernel, launch.constants


def representative_tokens(sizes: LayerSizes, most: int = MOST_TOKENS) -> list[int]:
    """Token counts from 1 to `most` that meet every class of rows per expert.

    Classes begin where T·K // E reaches a power of two or half as much again (`lowering/configs.py`). Each is met with
    and without a multiple of 16, which Triton compiles for separately.
    """
    found = {1, 2, 3, 16, 17, most - 1, most}
    rows = 1
    while rows * sizes.e <= most * sizes.k:
        for begin in (rows, rows + rows // 2):
            first = -(-begin * sizes.e // sizes.k)
            found |= {first, first + 1, -(-first // 16) * 16}
        rows *= 2
    return sorted(tokens for tokens in found if 1 <= tokens <= most)


def dry_launches(sizes: LayerSizes, tokens: Iterable[int]) -> set[Launch]:
    """What forward and backward launch in eager mode on the current card, found on meta tensors: nothing runs."""
    experts = sizes.experts("meta")
    watch = Watch()
    for t in tokens:
        with _Launchers(), observe.observing(watch):
            x, ids, weights = sizes.inputs(t, "meta")
            out = experts(x, ids, weights)
            leaves = [x, weights, *(p for p in experts.parameters() if p.requires_grad)]
            torch.autograd.grad(out, leaves, torch.empty_like(out))
            # Not an op: on a GPU a kernel, plain torch here.
            slots = torch.empty(t * sizes.k, dtype=torch.int32, device="meta")
            cuda.cuda_kernel("combine")(out.new_empty(t * sizes.k, sizes.h), slots, sizes.k, out.dtype)
    return set(watch.loose)


class _Launchers(TorchDispatchMode):
    """Ops on meta tensors go to the launchers of CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "nvfp4":
            return func(*args, **(kwargs or {}))
        return cuda.cuda_kernel(func._schema.name.partition("::")[2])(*args, **(kwargs or {}))
