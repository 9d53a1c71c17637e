"""Merges LoRA factors into packed weights: all experts for the op, slices of them for a merge-aware product."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import merge as kernels
from .launch import TRITON_DTYPE, cdiv, launch
from .weight import Weight

SLICE_BYTES = 128 * 2**20
"""Of merged weights that are in memory at a time; one expert's always are."""
ROWS, TILES, RANKS = 16, 2, 4
"""Of a program: rows of a tile, tiles, ranks at a time."""
ELEMENTS = 1024
"""Of a tile: eight a thread, what one load of a brings."""


def merge_lora(
    codes: Tensor, scales: Tensor, global_scale: Tensor, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `ops.merge`. Three launches: both factors rounded, then the weight."""
    weight = Weight.of(codes, scales, global_scale)
    out_codes, out_scales = torch.empty_like(weight.codes), torch.empty_like(weight.scales)
    _merge(weight, *_factors(a, b), scaling, out_codes, out_scales)
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
    a, b = _factors(a, b)
    for first in range(0, e, step):
        part = slice(first, min(first + step, e))
        base = Weight(weight.codes[part], weight.scales[part], weight.global_scale[part], weight.block)
        count = base.sizes[0]
        merged = Weight(out_codes[:count], out_scales[:count], base.global_scale, weight.block)
        _merge(base, a[part], b[part], scaling, merged.codes, merged.scales)
        yield Slice(first, merged)


def _factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernel reads them, padded with ranks of 0: pairs of a's columns in bf16, which is exact, `[E, R, C/2]`."""
    e, r, c = a.shape
    ranks = cdiv(r, RANKS) * RANKS
    rounded_a = a.new_empty(e, ranks, c, dtype=torch.bfloat16)
    rounded_b = b.new_empty(*b.shape[:2], ranks, dtype=torch.float32)
    for factor, out, inner in ((a, rounded_a, c), (b, rounded_b, 1)):
        if factor.dtype not in TRITON_DTYPE:  # float64, which torch takes to bf16 by way of float32
            factor = factor.to(torch.float32)
        launch(
            kernels.round_factor, (cdiv(out.numel(), ELEMENTS),), out.device,
            factor.detach().contiguous(), out, out.numel(), inner, R=r, OUT_R=ranks, SIZE=ELEMENTS, num_warps=4,
        )  # fmt: skip
    return rounded_a.view(torch.int32), rounded_b


def _merge(weight: Weight, a: Tensor, b: Tensor, scaling: float, out_codes: Tensor, out_scales: Tensor) -> None:
    e, n, c = weight.sizes
    sizes = tile_sizes(weight.block)
    launch(
        kernels.merge, (cdiv(c // weight.block, sizes["BLOCKS"]), cdiv(n, ROWS * TILES), e), weight.codes.device,
        weight.codes, weight.scales, weight.global_scale, a, b, float(scaling), out_codes, out_scales, n, a.shape[1],
        C=c, B=weight.block, S=weight.global_scale.shape[1], **sizes, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def tile_sizes(block: int) -> dict[str, int]:
    return dict(ROWS=ROWS, BLOCKS=ELEMENTS // ROWS // block, TILES=TILES, RANKS=RANKS)


CUDA_KERNELS = {"merge_lora": merge_lora}
