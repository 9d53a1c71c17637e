"""A grouped product with a packed weight: by which path, with the weight as it is or merged, and the launches."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_nvfp4.ops import observe

from . import block_scaled, configs, hopper, merge, scratch
from .kernels import grouped_gemm, shrink
from .launch import (
    TRITON_DTYPE,
    cdiv,
    contiguous,
    launch,
    padded_rank,
    padded_width,
    precision,
    product_dtype,
    row_tiles,
    tma_descriptor,
)
from .rows import Rows
from .weight import Weight


def packed_asm(weight: Weight, dtype: torch.dtype, has_tma: bool) -> bool:
    return has_tma and dtype == torch.bfloat16 and weight.block == 16


class Path(Enum):
    """How a grouped product gets at its packed weight."""

    LOOP = "decoded in the loop of a Triton kernel, on every card"
    HOPPER = "decoded in registers by a warp-specialised kernel"
    SCRATCH = "decoded in slices to a bounded scratch"
    BLOCK_SCALED = "multiplied packed with packed rows"


ORDER = {Path.LOOP: shrink.SPLIT.value, Path.HOPPER: shrink.FRAGMENT.value, Path.SCRATCH: shrink.PLAIN.value}
"""The column order in which y = x Wᵀ wants x, where that is not packed; gx = gy W takes gy as it is."""


def choose_path(
    x: Tensor, m: int, weight: Weight, *, transposed: bool = False, packed: bool = False, four_bits: bool = False
) -> Path:
    """The way of a product. The scratch can neither merge (`packed`) nor scale rows."""
    e, n, _ = weight.sizes
    if four_bits and block_scaled.supports(weight, x.device.index):
        return Path.BLOCK_SCALED
    obstacle = hopper.obstacle(weight, x, transposed=transposed)
    if obstacle is None:
        return Path.HOPPER
    multiplied, halves = product_dtype(x.dtype, weight.block), weight.global_scale.shape[1]
    plain = not packed and not four_bits
    if plain and configs.use_scratch(m, e, n, halves, multiplied, x.device.index):
        return Path.SCRATCH
    if observe.current is not None:
        observe.current.reason(obstacle)
    return Path.LOOP


class Merging(NamedTuple):
    """The factors that a merge-aware product puts into its weight."""

    a: Tensor
    b: Tensor
    scaling: float

    @classmethod
    def of(cls, merge_aware: bool, a: Tensor | None, b: Tensor | None, scaling: float) -> "Merging | None":
        return cls(a, b, scaling) if merge_aware and a is not None and b is not None else None


class Part(NamedTuple):
    """Experts of a weight that one product takes, and the end rows of these alone."""

    weight: Weight
    offsets: Tensor
    experts: slice
    after: bool

    @classmethod
    def all(cls, weight: Weight, offsets: Tensor, merging: Merging | None) -> "Iterator[Part]":
        """The weight as it is, or, merged, slice after slice."""
        if merging is None:
            yield cls(weight, offsets, slice(None), False)
            return
        for piece in merge.slices(weight, *merging):
            yield cls(piece.weight, offsets[piece.experts], piece.experts, piece.first > 0)


def row_width(c: int, path: Path) -> int:
    """How wide the rows of x are that a linear product with C = c reads."""
    return c if path is Path.SCRATCH else padded_width(c)


def _scratch_product(
    x: Tensor, offsets: Tensor, weight: Weight, epilogue: scratch.Epilogue, *, transposed: bool
) -> Tensor:
    return scratch.product(
        x, offsets, weight.codes, weight.scales, weight.global_scale, epilogue, transposed=transposed,
        constants=weight.constants, packed_asm=packed_asm(weight, x.dtype, True),
    )  # fmt: skip


def linear(
    x: Rows, offsets: Tensor, weight: Weight, lora_b: Tensor | None, u: Tensor, bias: Tensor | None,
    slots: Tensor | None, slot_weights: Tensor | None, path: Path, merging: Merging | None = None,
) -> Tensor:  # fmt: skip
    """y `[M, N]` from routed rows in the column order of `path`; `slot_weights` weight the bias."""
    if bias is None:
        slots = slot_weights = None
    lora_b, bias = contiguous(lora_b), contiguous(bias)
    if path is Path.SCRATCH:
        return _scratch_product(
            x.values, offsets, weight, scratch.Epilogue(lora_b, u, bias, slots, slot_weights), transposed=False
        )
    y = u.new_empty(u.shape[0], weight.sizes[1])
    if merging is not None:
        lora_b, u = None, u[:, :0]
    run = hopper.product if path is Path.HOPPER else _loop_linear
    rows_each = configs.rows_per_expert(y.shape[0], weight.sizes[0])
    for part in Part.all(weight, offsets, merging):
        added = lora_b, u, None if bias is None else bias[part.experts], slots, slot_weights
        if path is Path.BLOCK_SCALED:
            block_scaled.linear(
                x, part.offsets, part.weight, *added, out=y, rows_each=rows_each, after=part.after
            )  # fmt: skip
        else:
            run(
                x.values, part.offsets, part.weight, *added, x.scale, out=y, rows_each=rows_each, after=part.after
            )  # fmt: skip
    return y


def _loop_linear(
    x: Tensor, offsets: Tensor, weight: Weight, lora_b: Tensor | None, u: Tensor, bias: Tensor | None,
    slots: Tensor | None, slot_weights: Tensor | None, row_scale: Tensor | None, *, out: Tensor,
    rows_each: int, after: bool,
) -> None:  # fmt: skip
    """As `hopper.product`, in a kernel for every card; x is in SPLIT order."""
    e, n, _ = weight.sizes
    m, dtype = x.shape[0], x.dtype
    limit, has_tma = configs.device_limits(x.device.index)
    config = configs.linear_config(rows_each, product_dtype(dtype, weight.block), limit)
    tiles = tma_descriptor(x, [config.tokens, config.bytes], has_tma)
    launch(
        grouped_gemm.grouped_linear,
        (row_tiles(m, e, config.tokens) * cdiv(n, config.outputs),), x.device,
        x if tiles is None else tiles, row_scale, weight.codes, weight.scales, weight.global_scale, lora_b, u, bias,
        slots, slot_weights, offsets, out, n, u.shape[1],
        R=padded_rank(u.shape[1]), X_WIDTH=x.shape[1], TOKENS=config.tokens, OUTPUTS=config.outputs,
        BYTES=config.bytes, STAGES=config.stages, TMA=tiles is not None, PACKED_ASM=packed_asm(weight, dtype, has_tma),
        WGMMA=configs.uses_wgmma(x.device.index, dtype), PRECISION=precision(dtype, weight.block),
        WEIGHTED_BIAS=slots is not None, DTYPE=TRITON_DTYPE[dtype], AFTER=after, **weight.constants,
        num_warps=config.warps,
    )  # fmt: skip


def dgrad(
    gy: Tensor, offsets: Tensor, weight: Weight, lora_a: Tensor | None, v: Tensor, merging: Merging | None = None
) -> Tensor:
    """gx `[M, C]` from gathered, contiguous rows."""
    lora_a = contiguous(lora_a)
    path = choose_path(gy, gy.shape[0], weight, transposed=True, packed=merging is not None)
    if path is Path.SCRATCH:
        return _scratch_product(gy, offsets, weight, scratch.Epilogue(lora_a, v), transposed=True)
    gx = gy.new_empty(gy.shape[0], weight.sizes[2])
    if merging is not None:
        lora_a, v = None, v[:, :0]
    rows_each = configs.rows_per_expert(gy.shape[0], weight.sizes[0])
    for part in Part.all(weight, offsets, merging):
        options: dict[str, Any] = dict(out=gx, rows_each=rows_each, after=part.after)
        if path is Path.HOPPER:
            hopper.product(gy, part.offsets, part.weight, lora_a, v, transposed=True, **options)
        else:
            _loop_dgrad(gy, part.offsets, part.weight, lora_a, v, **options)
    return gx


def _loop_dgrad(
    gy: Tensor, offsets: Tensor, weight: Weight, lora_a: Tensor | None, v: Tensor, *, out: Tensor,
    rows_each: int, after: bool,
) -> None:  # fmt: skip
    e, n, c = weight.sizes
    m, dtype = gy.shape[0], gy.dtype
    limit, has_tma = configs.device_limits(gy.device.index)
    config = configs.dgrad_config(rows_each, product_dtype(dtype, weight.block), limit)
    rows = tma_descriptor(gy, [config.tokens, config.depth], has_tma)
    launch(
        grouped_gemm.grouped_dgrad,
        (row_tiles(m, e, config.tokens) * cdiv(c // 2, config.bytes),), gy.device,
        gy if rows is None else rows, weight.codes, weight.scales, weight.global_scale, lora_a, v,
        offsets, out, n, v.shape[1],
        R=padded_rank(v.shape[1]), TOKENS=config.tokens, BYTES=config.bytes, DEPTH=config.depth,
        STAGES=config.stages, TMA=rows is not None, PACKED_ASM=packed_asm(weight, dtype, has_tma),
        PRECISION=precision(dtype, weight.block), DTYPE=TRITON_DTYPE[dtype], AFTER=after, **weight.constants,
        num_warps=config.warps,
    )  # fmt: skip
