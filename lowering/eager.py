"""The eager CUDA implementation of the ops: allocate, choose tiles, launch. Imported at the first CUDA call.

Nothing here asks the device for a value: grids come from M and E, and programs without rows leave at once.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import block_scaled, configs, hopper, merge, scratch
from .kernels import glu, grouped_gemm, shrink, wgrad
from .launch import (
    TRITON_DTYPE,
    cdiv,
    check_dtype,
    launch,
    padded_rank,
    padded_width,
    power_of_two,
    precision,
    product_dtype,
    tma_descriptor,
    with_unit_stride,
)
from .rows import Rows, quantize_activation, quantize_rows
from .tokens import combine, moe_route
from .weight import Weight


def grouped_lora_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, compute: str = "w4a16", merge_aware: bool = False,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. Two launches: rows gathered and shrunk to u, then the product with everything else in it.

    merge_aware: two launches for each slice of merged weights in place of the product. w4a4: one more before all, which
    quantises tokens: rows are K times as many.
    """
    check_dtype("grouped_lora_linear", x.dtype)
    rows, offsets = _contiguous(rows), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    m = x.shape[0] if rows is None else rows.shape[0]
    u = x.new_empty(m, 0 if lora_a is None else lora_a.shape[1])
    merging = Merging.of(merge_aware, lora_a, lora_b, scaling)
    four_bits = compute == "w4a4"
    path = _path(x, m, weight, packed=merging is not None, four_bits=four_bits)
    if four_bits:
        operand = _four_bit_rows(x, rows, offsets, lora_a, u, scaling, top_k, path, input_scale)
    else:
        operand = Rows(x.new_empty(m, row_width(weight.sizes[2], path)))
        _shrink(x, rows, offsets, lora_a, u, operand, scaling, top_k, by_rank=True, order=ORDER[path])
    return _linear(operand, offsets, weight, lora_b, u, bias, None, None, path, merging), u


def _four_bit_rows(
    x: Tensor, rows: Tensor | None, offsets: Tensor, lora_a: Tensor | None, u: Tensor, scaling: float, top_k: int,
    path: "Path", input_scale: Tensor | None,
) -> Rows:  # fmt: skip
    """x in 4 bits as the product of `path` reads it, and u. Values are gathered by the shrink, packed rows later."""
    tokens = quantize_rows(x, row_width(x.shape[1], path), ORDER.get(path), input_scale)
    if rows is None or path is Path.BLOCK_SCALED:
        _shrink(x, rows, offsets, lora_a, u, None, scaling, top_k, by_rank=True)
        return tokens._replace(slots=rows, top_k=top_k)
    m = rows.shape[0]
    gathered = Rows(x.new_empty(m, tokens.values.shape[1]), x.new_empty(m, dtype=torch.float32))
    _shrink(x, rows, offsets, lora_a, u, gathered, scaling, top_k, by_rank=True, moved=tokens)
    return gathered


def glu_grouped_lora_linear(
    pre: Tensor, topk_weights: Tensor, rows: Tensor, offsets: Tensor,
    codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None, compute: str = "w4a16",
    merge_aware: bool = False, input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. Three launches: activation × router weight, shrink to u, the product.

    merge_aware: as for `grouped_lora_linear`. w4a4: the first launch writes the activation in 4 bits, and unquantised
    for the shrink where there is LoRA.
    """
    check_dtype("glu_grouped_lora_linear", pre.dtype)
    rows, offsets = rows.contiguous(), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    e, _, width = weight.sizes
    pre, m = with_unit_stride(pre), pre.shape[0]
    slot_weights = topk_weights.reshape(-1).contiguous()
    merging = Merging.of(merge_aware, lora_a, lora_b, scaling)
    four_bits = compute == "w4a4"
    path = _path(pre, m, weight, packed=merging is not None, four_bits=four_bits)
    h_width, u = row_width(width, path), pre.new_empty(m, 0 if lora_a is None else lora_a.shape[1])
    if four_bits:
        operand, h = quantize_activation(
            pre, slot_weights, rows, offsets, width, h_width, ORDER.get(path), activation, limit,
            input_scale, need_h=lora_a is not None,
        )  # fmt: skip
        h_order = shrink.PLAIN.value
    else:
        h, h_order = pre.new_empty(m, h_width), ORDER[path]
        operand = Rows(h)
        column_tiles = cdiv(h_width, configs.GLU_COLUMNS)
        launch(
            glu.glu_forward, (cdiv(m, configs.GLU_ROWS) * column_tiles,), pre.device,
            pre, pre.stride(0), slot_weights, rows, offsets, h, e, WIDTH=width, H_WIDTH=h_width,
            ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS, ORDER=h_order, ACTIVATION=activation, LIMIT=limit,
            DTYPE=TRITON_DTYPE[pre.dtype], num_warps=4,
        )  # fmt: skip
    if h is not None:
        _shrink(h, None, offsets, lora_a, u, None, scaling, 1, by_rank=True, x_order=h_order)
    return _linear(operand, offsets, weight, lora_b, u, bias, rows, slot_weights, path, merging), u


def grouped_lora_dgrad(
    gy: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, need_gx: bool = True, merge_aware: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. Two launches, or one where the rows need neither a gather nor a shrink.

    merge_aware: as for `grouped_lora_linear`.
    """
    check_dtype("grouped_lora_dgrad", gy.dtype)
    rows, offsets = _contiguous(rows), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    n = weight.sizes[1]
    m = gy.shape[0] if rows is None else rows.shape[0]
    v = gy.new_empty(m, 0 if lora_b is None else lora_b.shape[2])
    gathered = None
    if need_gx and (rows is not None or not gy.is_contiguous() or gy.data_ptr() % 16):
        gathered = gy.new_empty(m, n)
    _shrink(gy, rows, offsets, lora_b, v, None if gathered is None else Rows(gathered), scaling, top_k, by_rank=False)
    if not need_gx:
        return gy.new_empty(0, weight.sizes[2]), v
    merging = Merging.of(merge_aware, lora_a, lora_b, scaling)
    return _dgrad(gy if gathered is None else gathered, offsets, weight, lora_a, v, merging), v


def grouped_lora_wgrad(
    p: Tensor, p_rows: Tensor | None, q: Tensor, q_rows: Tensor | None, offsets: Tensor,
    *, dtype: torch.dtype, top_k: int = 1,
) -> Tensor:  # fmt: skip
    """See `ops.cpu`. One launch, or fp32 partial sums over row ranges and their sum where experts are few."""
    check_dtype("grouped_lora_wgrad", p.dtype)
    p_rows, q_rows, offsets = _contiguous(p_rows), _contiguous(q_rows), offsets.contiguous()
    e, m = offsets.shape[0], p.shape[0] if p_rows is None else p_rows.shape[0]
    out_shape = e, p.shape[1], q.shape[1]
    p_is_narrow = p.shape[1] <= q.shape[1]
    narrow, narrow_rows, wide, wide_rows = (p, p_rows, q, q_rows) if p_is_narrow else (q, q_rows, p, p_rows)
    narrow, wide = with_unit_stride(narrow), with_unit_stride(wide)
    side = min(padded_rank(narrow.shape[1]), 64)
    tiles = cdiv(narrow.shape[1], side) * cdiv(wide.shape[1], configs.WGRAD_WIDE)
    splits = configs.wgrad_splits(m, e * tiles)
    out = p.new_empty((splits, *out_shape), dtype=dtype if splits == 1 else torch.float32)
    narrow_stride, wide_stride = (out.stride(2), 1) if p_is_narrow else (1, out.stride(2))
    launch(
        wgrad.wgrad, (tiles, e, splits), p.device,
        narrow, narrow.stride(0), narrow_rows, wide, wide.stride(0), wide_rows, offsets, out,
        narrow.shape[1], wide.shape[1], out.stride(0), out.stride(1), narrow_stride, wide_stride, top_k,
        NARROW=side, WIDE=configs.WGRAD_WIDE, ROWS=configs.WGRAD_ROWS,
        PRECISION=precision(wide.dtype), DTYPE=TRITON_DTYPE[wide.dtype], num_warps=4, num_stages=3,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0).to(dtype)


def glu_backward(
    pre: Tensor, topk_weights: Tensor, gh: Tensor | None, rows: Tensor, offsets: Tensor,
    gy: Tensor | None = None, gy_rows: Tensor | None = None, bias: Tensor | None = None,
    *, activation: str = "silu", limit: float | None = None,
    need_gpre: bool = True, need_h: bool = True, need_gw: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. One launch."""
    check_dtype("glu_backward", pre.dtype)
    rows, gy_rows, offsets = rows.contiguous(), _contiguous(gy_rows), offsets.contiguous()
    pre, m, e = with_unit_stride(pre), pre.shape[0], offsets.shape[0]
    width = pre.shape[1] if activation == "relu2" else pre.shape[1] // 2
    gpre = pre.new_empty(m if need_gpre else 0, pre.shape[1])
    h = pre.new_empty(m if need_h else 0, width)
    gw = topk_weights.new_empty(topk_weights.shape if need_gw else (0, topk_weights.shape[1]))
    use_bias = bias is not None and gy is not None and need_gw
    if gy is not None:
        gy = with_unit_stride(gy)
    launch(
        glu.glu_backward, (_row_tiles(m, e, configs.GLU_ROWS),), pre.device,
        pre, pre.stride(0), topk_weights.reshape(-1).contiguous(), _contiguous(gh), rows, offsets,
        gy if use_bias else None, gy.stride(0) if use_bias and gy is not None else 0, gy_rows if use_bias else None,
        _contiguous(bias) if use_bias else None,
        gpre if need_gpre else None, h if need_h else None, gw if need_gw else None, m, topk_weights.shape[1],
        E=e, E_POW2=power_of_two(e, 16), WIDTH=width, N=bias.shape[1] if use_bias and bias is not None else 0,
        ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS, ACTIVATION=activation, LIMIT=limit, num_warps=4,
    )  # fmt: skip
    return gpre, h, gw


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _row_tiles(m: int, e: int, rows: int) -> int:
    """Enough tiles for M rows of E experts, however they are spread (see `locate_tile`)."""
    return m // rows + e if m else 0


def _shrink(
    x: Tensor, rows: Tensor | None, offsets: Tensor, factor: Tensor | None, u: Tensor, out: Rows | None,
    scaling: float, top_k: int, *, by_rank: bool, order: int = shrink.PLAIN.value, x_order: int = shrink.PLAIN.value,
    moved: Rows | None = None,
) -> None:  # fmt: skip
    """u = scaling · x[rows // top_k] f and, where `out` is given, the rows themselves, or those of `moved`."""
    if out is None and factor is None:
        return
    x = with_unit_stride(x)
    e, r = offsets.shape[0], u.shape[1]
    factor_width = 0 if factor is None else factor.shape[2 if by_rank else 1]
    ranks = min(padded_rank(r), configs.SHRINK_RANKS)
    values, row_scale = (None, None) if out is None else out[:2]
    moved_rows = (None, None) if moved is None else moved[:2]
    launch(
        shrink.shrink,
        (_row_tiles(u.shape[0], e, configs.SHRINK_ROWS), cdiv(r, ranks) if r else 1), x.device,
        x, x.stride(0), rows, offsets, _contiguous(factor), u, values, scaling, r, top_k, *moved_rows, row_scale,
        E=e, E_POW2=power_of_two(e, 16), WIDTH=x.shape[1], FACTOR_WIDTH=factor_width,
        OUT_WIDTH=0 if values is None else values.shape[1], R=ranks, ROWS=configs.SHRINK_ROWS,
        COLUMNS=configs.SHRINK_COLUMNS, BY_RANK=by_rank, X_ORDER=x_order, ORDER=order,
        PRECISION=precision(x.dtype), DTYPE=TRITON_DTYPE[x.dtype], num_warps=4,
    )  # fmt: skip


def _packed_asm(weight: Weight, dtype: torch.dtype, has_tma: bool) -> bool:
    return has_tma and dtype == torch.bfloat16 and weight.block == 16


class Path(Enum):
    """How a grouped product gets at its packed weight."""

    LOOP = "decoded in the loop of a Triton kernel, on every card"
    HOPPER = "decoded in registers by a warp-specialised kernel"
    SCRATCH = "decoded in slices to a bounded scratch"
    BLOCK_SCALED = "multiplied packed with packed rows"


ORDER = {Path.LOOP: shrink.SPLIT.value, Path.HOPPER: shrink.FRAGMENT.value, Path.SCRATCH: shrink.PLAIN.value}
"""The column order in which y = x Wᵀ wants x, where that is not packed; gx = gy W takes gy as it is."""


def _path(
    x: Tensor, m: int, weight: Weight, *, transposed: bool = False, packed: bool = False, four_bits: bool = False
) -> Path:
    """The way of a product. The scratch can neither merge (`packed`) nor scale rows."""
    e, n, _ = weight.sizes
    if four_bits and block_scaled.supports(weight, x.device.index):
        return Path.BLOCK_SCALED
    packed |= four_bits
    multiplied, halves = product_dtype(x.dtype, weight.block), weight.global_scale.shape[1]
    scratch_fits = not packed and configs.use_scratch(m, e, n, halves, multiplied, x.device.index)
    if hopper.supports(weight, x, transposed=transposed):
        return Path.HOPPER
    return Path.SCRATCH if scratch_fits else Path.LOOP


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
        constants=weight.constants, packed_asm=_packed_asm(weight, x.dtype, True),
    )  # fmt: skip


def _linear(
    x: Rows, offsets: Tensor, weight: Weight, lora_b: Tensor | None, u: Tensor, bias: Tensor | None,
    slots: Tensor | None, slot_weights: Tensor | None, path: Path, merging: Merging | None = None,
) -> Tensor:  # fmt: skip
    """y `[M, N]` from routed rows in the column order of `path`; `slot_weights` weight the bias."""
    if bias is None:
        slots = slot_weights = None
    lora_b, bias = _contiguous(lora_b), _contiguous(bias)
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
        (_row_tiles(m, e, config.tokens) * cdiv(n, config.outputs),), x.device,
        x if tiles is None else tiles, row_scale, weight.codes, weight.scales, weight.global_scale, lora_b, u, bias,
        slots, slot_weights, offsets, out, n, u.shape[1],
        R=padded_rank(u.shape[1]), X_WIDTH=x.shape[1], TOKENS=config.tokens, OUTPUTS=config.outputs,
        BYTES=config.bytes, STAGES=config.stages, TMA=tiles is not None, PACKED_ASM=_packed_asm(weight, dtype, has_tma),
        WGMMA=configs.family(x.device.index) == 9, PRECISION=precision(dtype, weight.block),
        WEIGHTED_BIAS=slots is not None, DTYPE=TRITON_DTYPE[dtype], AFTER=after, **weight.constants,
        num_warps=config.warps,
    )  # fmt: skip


def _dgrad(
    gy: Tensor, offsets: Tensor, weight: Weight, lora_a: Tensor | None, v: Tensor, merging: Merging | None = None
) -> Tensor:
    """gx `[M, C]` from gathered, contiguous rows."""
    lora_a = _contiguous(lora_a)
    path = _path(gy, gy.shape[0], weight, transposed=True, packed=merging is not None)
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
        (_row_tiles(m, e, config.tokens) * cdiv(c // 2, config.bytes),), gy.device,
        gy if rows is None else rows, weight.codes, weight.scales, weight.global_scale, lora_a, v,
        offsets, out, n, v.shape[1],
        R=padded_rank(v.shape[1]), TOKENS=config.tokens, BYTES=config.bytes, DEPTH=config.depth,
        STAGES=config.stages, TMA=rows is not None, PACKED_ASM=_packed_asm(weight, dtype, has_tma),
        PRECISION=precision(dtype, weight.block), DTYPE=TRITON_DTYPE[dtype], AFTER=after, **weight.constants,
        num_warps=config.warps,
    )  # fmt: skip


CUDA_KERNELS: dict[str, Callable[..., Any]] = {
    "moe_route": moe_route,
    "combine": combine,
    "grouped_lora_linear": grouped_lora_linear,
    "grouped_lora_dgrad": grouped_lora_dgrad,
    "grouped_lora_wgrad": grouped_lora_wgrad,
    "glu_grouped_lora_linear": glu_grouped_lora_linear,
    "glu_backward": glu_backward,
}
