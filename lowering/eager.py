"""The eager CUDA implementation of the ops: allocate, choose tiles, launch. Imported at the first CUDA call.

Products with a packed weight are launched by `multiply.py`.

Nothing here asks the device for a value: grids come from M and E, and programs without rows leave at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import configs, multiply
from .kernels import glu, shrink, wgrad
from .kernels import glu_backward as glu_backward_kernels
from .launch import (
    TRITON_DTYPE,
    cdiv,
    check_dtype,
    contiguous,
    launch,
    padded_rank,
    power_of_two,
    precision,
    row_tiles,
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
    rows, offsets = contiguous(rows), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    m = x.shape[0] if rows is None else rows.shape[0]
    u = x.new_empty(m, 0 if lora_a is None else lora_a.shape[1])
    merging = multiply.Merging.of(merge_aware, lora_a, lora_b, scaling)
    four_bits = compute == "w4a4"
    path = multiply.choose_path(x, m, weight, packed=merging is not None, four_bits=four_bits)
    if four_bits:
        operand = _four_bit_rows(x, rows, offsets, lora_a, u, scaling, top_k, path, input_scale)
    else:
        operand = Rows(x.new_empty(m, multiply.row_width(weight.sizes[2], path)))
        _shrink(x, rows, offsets, lora_a, u, operand, scaling, top_k, by_rank=True, order=multiply.ORDER[path])
    return multiply.linear(operand, offsets, weight, lora_b, u, bias, None, None, path, merging), u


def _four_bit_rows(
    x: Tensor, rows: Tensor | None, offsets: Tensor, lora_a: Tensor | None, u: Tensor, scaling: float, top_k: int,
    path: multiply.Path, input_scale: Tensor | None,
) -> Rows:  # fmt: skip
    """x in 4 bits as the product of `path` reads it, and u. Values are gathered by the shrink, packed rows later."""
    tokens = quantize_rows(x, multiply.row_width(x.shape[1], path), multiply.ORDER.get(path), input_scale)
    if rows is None or path is multiply.Path.BLOCK_SCALED:
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
    """See `ops.cpu`. Three launches: activation × router weight, shrink to u, the product; of few rows the first two
    are one.

    merge_aware: as for `grouped_lora_linear`. w4a4: the first launch writes the activation in 4 bits, and unquantised
    for the shrink where there is LoRA.
    """
    check_dtype("glu_grouped_lora_linear", pre.dtype)
    rows, offsets = rows.contiguous(), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    e, _, width = weight.sizes
    pre, m = with_unit_stride(pre), pre.shape[0]
    slot_weights = topk_weights.reshape(-1).contiguous()
    merging = multiply.Merging.of(merge_aware, lora_a, lora_b, scaling)
    four_bits = compute == "w4a4"
    path = multiply.choose_path(pre, m, weight, packed=merging is not None, four_bits=four_bits)
    h_width, u = multiply.row_width(width, path), pre.new_empty(m, 0 if lora_a is None else lora_a.shape[1])
    if four_bits:
        operand, h = quantize_activation(
            pre, slot_weights, rows, offsets, width, h_width, multiply.ORDER.get(path), activation, limit,
            input_scale, need_h=lora_a is not None,
        )  # fmt: skip
        if h is not None:
            _shrink(h, None, offsets, lora_a, u, None, scaling, 1, by_rank=True)
    else:
        operand = Rows(pre.new_empty(m, h_width))
        _activate(
            pre, slot_weights, rows, offsets, lora_a, u, operand.values, width, scaling, activation, limit,
            multiply.ORDER[path],
        )  # fmt: skip
    return multiply.linear(operand, offsets, weight, lora_b, u, bias, rows, slot_weights, path, merging), u


def _activate(
    pre: Tensor, slot_weights: Tensor, rows: Tensor, offsets: Tensor, factor: Tensor | None, u: Tensor, h: Tensor,
    width: int, scaling: float, activation: str, limit: float | None, order: int,
) -> None:  # fmt: skip
    """h = act(pre) · router weight in a column order, zero-padded, and u = scaling · h f."""
    m, e = u.shape[0], offsets.shape[0]
    if u.shape[1] and configs.shrinks_rows(m, e, by_rank=True):
        sizes = _shrink_sizes(e, width, pre.dtype, factor, h, by_rank=True, order=order)
        _shrink_row(pre, rows, offsets, factor, u, h, scaling, 1, sizes, slot_weights, activation, limit)
        return
    launch(
        glu.glu_forward, (cdiv(m, configs.GLU_ROWS) * cdiv(h.shape[1], configs.GLU_COLUMNS),), pre.device,
        pre, pre.stride(0), slot_weights, rows, offsets, h, e, WIDTH=width, H_WIDTH=h.shape[1],
        ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS, ORDER=order, ACTIVATION=activation, LIMIT=limit,
        DTYPE=TRITON_DTYPE[pre.dtype], num_warps=4,
    )  # fmt: skip
    _shrink(h, None, offsets, factor, u, None, scaling, 1, by_rank=True, x_order=order)


def grouped_lora_dgrad(
    gy: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, v: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, need_gx: bool = True, merge_aware: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. Two launches, or one where the rows need neither a gather nor a shrink.

    merge_aware: as for `grouped_lora_linear`.
    """
    check_dtype("grouped_lora_dgrad", gy.dtype)
    rows, offsets = contiguous(rows), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    n = weight.sizes[1]
    m = gy.shape[0] if rows is None else rows.shape[0]
    new_v = gy.new_empty(m if v is None else 0, 0 if lora_b is None else lora_b.shape[2])
    gathered = None
    if need_gx and (rows is not None or not gy.is_contiguous() or gy.data_ptr() % 16):
        gathered = gy.new_empty(m, n)
    factor, u = (lora_b, new_v) if v is None else (None, gy.new_empty(m, 0))
    _shrink(gy, rows, offsets, factor, u, None if gathered is None else Rows(gathered), scaling, top_k, by_rank=False)
    if not need_gx:
        return gy.new_empty(0, weight.sizes[2]), new_v
    merging = multiply.Merging.of(merge_aware, lora_a, lora_b, scaling)
    v = new_v if v is None else v.contiguous()
    return multiply.dgrad(gy if gathered is None else gathered, offsets, weight, lora_a, v, merging), new_v


def grouped_lora_wgrad(
    p: Tensor, p_rows: Tensor | None, q: Tensor, q_rows: Tensor | None, offsets: Tensor,
    *, dtype: torch.dtype, top_k: int = 1,
) -> Tensor:  # fmt: skip
    """See `ops.cpu`. One launch, or fp32 partial sums over row ranges and their sum where experts are few."""
    check_dtype("grouped_lora_wgrad", p.dtype)
    p_rows, q_rows, offsets = contiguous(p_rows), contiguous(q_rows), offsets.contiguous()
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
    lora_b: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None,
    need_gpre: bool = True, need_h: bool = True, need_gw: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. One launch where a program has a row's columns and there is no bias; else another sums gw and v
    over the chunks of columns. Large ranks take a shrink for v.
    """
    check_dtype("glu_backward", pre.dtype)
    rows, offsets, device = rows.contiguous(), offsets.contiguous(), pre.device
    pre, m, e, top_k = with_unit_stride(pre), pre.shape[0], offsets.shape[0], topk_weights.shape[1]
    halves = 1 if activation == "relu2" else 2
    width, r = pre.shape[1] // halves, 0 if lora_b is None else lora_b.shape[2]
    gpre = pre.new_empty(m if need_gpre else 0, pre.shape[1])
    h = pre.new_empty(m if need_h else 0, width)
    gw = topk_weights.new_empty(topk_weights.shape if need_gw else (0, top_k))
    v = pre.new_empty(m, r)
    use_bias = bias is not None and gy is not None and need_gw
    rows_each = configs.rows_per_expert(m, e)
    way = configs.glu_backward_way(rows_each, pre.dtype, width, r, need_gw=need_gw, bias=use_bias)
    config, chunks = way.config, way.chunks
    gw_chunks = pre.new_empty(chunks, m, dtype=torch.float32) if way.sums_gw else None
    v_chunks = pre.new_empty(chunks, m, r, dtype=torch.float32) if way.sums_v else v if way.makes_v else None
    sizes = dict(E=e, E_POW2=power_of_two(e, 16), R=padded_rank(r) if way.makes_v else 0)
    launch(
        glu_backward_kernels.glu_backward, (row_tiles(m, e, config.rows) * chunks,), device,
        pre, pre.stride(0), topk_weights.reshape(-1).contiguous(), contiguous(gh), rows, offsets,
        contiguous(lora_b) if way.makes_v else None, gpre if need_gpre else None, h if need_h else None,
        gw if need_gw and not way.sums_gw else None, gw_chunks, v_chunks, m, r, scaling,
        **sizes, WIDTH=width, **config.constants(width, halves), ACTIVATION=activation, LIMIT=limit,
        PRECISION=precision(pre.dtype), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if r and not way.makes_v:
        _shrink(gpre, None, offsets, lora_b, v, None, scaling, 1, by_rank=False)
    if way.sums_gw or way.sums_v:
        gy = with_unit_stride(gy) if gy is not None and use_bias else None
        launch(
            glu_backward_kernels.sum_chunks, (row_tiles(m, e, configs.SUM_ROWS),), device,
            gw_chunks, v_chunks if way.sums_v else None, rows, offsets, gy, 0 if gy is None else gy.stride(0),
            contiguous(gy_rows) if use_bias else None, contiguous(bias) if use_bias else None,
            gw if way.sums_gw else None, v if way.sums_v else None, m, top_k, r,
            **sizes, N=bias.shape[1] if bias is not None and use_bias else 0, CHUNKS=chunks,
            ROWS=configs.SUM_ROWS, COLUMNS=configs.SUM_COLUMNS, num_warps=4,
        )  # fmt: skip
    return gpre, h, gw, v


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
    values, row_scale = (None, None) if out is None else out[:2]
    sizes = _shrink_sizes(e, x.shape[1], x.dtype, factor, values, by_rank=by_rank, order=order, x_order=x_order)
    if r and moved is None and configs.shrinks_rows(u.shape[0], e, by_rank):
        _shrink_row(x, rows, offsets, factor, u, values, scaling, top_k, sizes)
        return
    ranks = min(padded_rank(r), configs.SHRINK_RANKS)
    moved_rows = (None, None) if moved is None else moved[:2]
    gathers = rows is not None and values is not None and moved is None
    config = configs.shrink_config(u.shape[0], ranks, x.dtype, x.device.index, gathers=gathers)
    launch(
        shrink.shrink,
        (row_tiles(u.shape[0], e, config.rows), cdiv(r, ranks) if r else 1), x.device,
        x, x.stride(0), rows, offsets, contiguous(factor), u, values, scaling, r, top_k, *moved_rows, row_scale,
        R=ranks, ROWS=config.rows, COLUMNS=config.columns, STREAM=config.streams, PRECISION=precision(x.dtype), **sizes,
        num_warps=4, num_stages=config.stages,
    )  # fmt: skip


def _shrink_row(
    x: Tensor, rows: Tensor | None, offsets: Tensor, factor: Tensor | None, u: Tensor, values: Tensor | None,
    scaling: float, top_k: int, sizes: dict[str, Any], slot_weights: Tensor | None = None,
    activation: str | None = None, limit: float | None = None,
) -> None:  # fmt: skip
    """`_shrink` of few rows; with an activation, of those that it makes of x."""
    ranks, r = configs.SHRINK_ROW_RANKS, u.shape[1]
    launch(
        shrink.shrink_row, (u.shape[0], cdiv(r, ranks)), x.device,
        x, x.stride(0), rows, slot_weights, offsets, contiguous(factor), u, values, scaling, r, top_k, R=ranks,
        COLUMNS=min(configs.SHRINK_ROW_COLUMNS, power_of_two(sizes["WIDTH"], 32)), ACTIVATION=activation, LIMIT=limit,
        **sizes, num_warps=4,
    )  # fmt: skip


def _shrink_sizes(
    e: int, width: int, dtype: torch.dtype, factor: Tensor | None, values: Tensor | None, *, by_rank: bool, order: int,
    x_order: int = shrink.PLAIN.value,
) -> dict[str, Any]:  # fmt: skip
    """What both shrinks are compiled for."""
    factor_width = 0 if factor is None else factor.shape[2 if by_rank else 1]
    return dict(
        E=e, E_POW2=power_of_two(e, 16), WIDTH=width, FACTOR_WIDTH=factor_width,
        OUT_WIDTH=0 if values is None else values.shape[1], BY_RANK=by_rank, X_ORDER=x_order, ORDER=order,
        DTYPE=TRITON_DTYPE[dtype],
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
