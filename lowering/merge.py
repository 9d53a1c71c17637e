"""Merges LoRA factors into packed weights: all experts for the op, slices of them for a merge-aware product."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_nvfp4.ops.merge import rounded_factor

from .kernels import merge as kernels
from .launch import cdiv, launch
from .weight import Weight

SLICE_BYTES = 128 * 2**20
"""Of merged weights that are in memory at a time; one expert's always are."""
ROWS, ELEMENTS = 16, 1024
"""Of a program: half a block of NVFP4 a thread, the layout in which the loop over ranks moves nothing."""


def merge_lora(
    codes: Tensor, scales: Tensor, global_scale: Tensor, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `ops.merge`. One launch."""
    weight = Weight.of(codes, scales, global_scale)
    out_codes, out_scales = torch.empty_like(weight.codes), torch.empty_like(weight.scales)
    _merge(weight, rounded_factor(a), rounded_factor(b), scaling, out_codes, out_scales)
    return out_codes, out_scales.view(scales.dtype)


class Slice(NamedTuple):
    """Experts `first` … `first + weight.sizes[0] - 1`, merged."""

    first: int
    weight: Weight

    @property
    def experts(self) -> slice:
        return slice(self.first, self.first + self.weight.sizes[0])


def slices(weight: Weight, a: Tensor, b: Tensor, scaling: float) -> Iterator[Slice]:
    """The merged weight in even pieces of at most SLICE_BYTES. Each overwrites the one before, in stream order."""
    e = weight.sizes[0]
    each = weight.codes[0].nbytes + weight.scales[0].nbytes
    step = cdiv(e, cdiv(e, max(1, SLICE_BYTES // each)))
    out_codes, out_scales = torch.empty_like(weight.codes[:step]), torch.empty_like(weight.scales[:step])
    a, b = rounded_factor(a), rounded_factor(b)
    for first in range(0, e, step):
        part = slice(first, min(first + step, e))
        base = Weight(weight.codes[part], weight.scales[part], weight.global_scale[part], weight.block)
        count = base.sizes[0]
        merged = Weight(out_codes[:count], out_scales[:count], base.global_scale, weight.block)
        _merge(base, a[part], b[part], scaling, merged.codes, merged.scales)
        yield Slice(first, merged)


def _merge(weight: Weight, a: Tensor, b: Tensor, scaling: float, out_codes: Tensor, out_scales: Tensor) -> None:
    e, n, c = weight.sizes
    blocks = ELEMENTS // ROWS // weight.block
    launch(
        kernels.merge, (cdiv(c // weight.block, blocks), cdiv(n, ROWS), e), weight.codes.device,
        weight.codes, weight.scales, weight.global_scale, a, b, float(scaling), out_codes, out_scales, n, a.shape[1],
        C=c, B=weight.block, S=weight.global_scale.shape[1], ROWS=ROWS, BLOCKS=blocks, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


CUDA_KERNELS = {"merge_lora": merge_lora}
