"""The eager CUDA implementation of the ops: allocate, choose tiles, launch. Imported at the first CUDA call.

Nothing here asks the device for a value: grids come from M and E, and programs without rows leave at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import configs, scratch
from .kernels import glu, grouped_gemm, shrink, wgrad
from .kernels.decode import NVFP4_UNIT
from .launch import (
    TRITON_DTYPE,
    as_bytes,
    check_dtype,
    launch,
    padded_rank,
    padded_width,
    power_of_two,
    precision,
    tma_descriptor,
    with_unit_stride,
)
from .tokens import combine, moe_route


class Weight(NamedTuple):
    """A packed weight as the kernels take it."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    block: int

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, global_scale: Tensor) -> "Weight":
        block = codes.shape[2] * 2 // scales.shape[2]
        return cls(codes.contiguous(), as_bytes(scales), global_scale.contiguous(), block)

    @property
    def sizes(self) -> tuple[int, int, int]:
        e, n, half_c = self.codes.shape
        return e, n, half_c * 2

    @property
    def constants(self) -> dict[str, Any]:
        e, _, c = self.sizes
        unit = NVFP4_UNIT if self.block == 16 else 1.0
        return dict(E=e, E_POW2=power_of_two(e, 16), C=c, B=self.block, S=self.global_scale.shape[1], UNIT=unit)


def grouped_lora_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. Two launches: rows gathered and shrunk to u, then the product with everything else in it."""
    check_dtype("grouped_lora_linear", x.dtype)
    rows, offsets = _contiguous(rows), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    m = x.shape[0] if rows is None else rows.shape[0]
    u = x.new_empty(m, 0 if lora_a is None else lora_a.shape[1])
    dense = _decodes_slices(x, m, weight)
    gathered = x.new_empty(m, _x_width(weight, dense))
    _shrink(x, rows, offsets, lora_a, u, gathered, scaling, top_k, by_rank=True, split=not dense)
    return _linear(gathered, offsets, weight, lora_b, u, bias, None, None, dense), u


def glu_grouped_lora_linear(
    pre: Tensor, topk_weights: Tensor, rows: Tensor, offsets: Tensor,
    codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. Three launches: activation × router weight, shrink to u, the product."""
    check_dtype("glu_grouped_lora_linear", pre.dtype)
    rows, offsets = rows.contiguous(), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    e, _, width = weight.sizes
    pre, m = with_unit_stride(pre), pre.shape[0]
    slot_weights = topk_weights.reshape(-1).contiguous()
    dense = _decodes_slices(pre, m, weight)
    h = pre.new_empty(m, _x_width(weight, dense))
    u = pre.new_empty(m, 0 if lora_a is None else lora_a.shape[1])
    column_tiles = triton.cdiv(h.shape[1], configs.GLU_COLUMNS)
    launch(
        glu.glu_forward, (triton.cdiv(m, configs.GLU_ROWS) * column_tiles,), pre.device,
        pre, pre.stride(0), slot_weights, rows, offsets, h, e, WIDTH=width, H_WIDTH=h.shape[1],
        ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS, SPLIT=not dense, ACTIVATION=activation, LIMIT=limit,
        DTYPE=TRITON_DTYPE[pre.dtype], num_warps=4,
    )  # fmt: skip
    _shrink(h, None, offsets, lora_a, u, None, scaling, 1, by_rank=True, x_split=not dense)
    return _linear(h, offsets, weight, lora_b, u, bias, rows, slot_weights, dense), u


def grouped_lora_dgrad(
    gy: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, need_gx: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.cpu`. Two launches, or one where the rows need neither a gather nor a shrink."""
    check_dtype("grouped_lora_dgrad", gy.dtype)
    rows, offsets = _contiguous(rows), offsets.contiguous()
    weight = Weight.of(codes, scales, global_scale)
    n = weight.sizes[1]
    m = gy.shape[0] if rows is None else rows.shape[0]
    v = gy.new_empty(m, 0 if lora_b is None else lora_b.shape[2])
    gathered = None
    if need_gx and (rows is not None or not gy.is_contiguous() or gy.data_ptr() % 16):
        gathered = gy.new_empty(m, n)
    _shrink(gy, rows, offsets, lora_b, v, gathered, scaling, top_k, by_rank=False)
    if not need_gx:
        return gy.new_empty(0, weight.sizes[2]), v
    return _dgrad(gy if gathered is None else gathered, offsets, weight, lora_a, v), v


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
    tiles = triton.cdiv(narrow.shape[1], side) * triton.cdiv(wide.shape[1], configs.WGRAD_WIDE)
    splits = configs.wgrad_splits(m, e * tiles)
    out = p.new_empty((splits, *out_shape), dtype=dtype if splits == 1 else torch.float32)
    narrow_stride, wide_stride = (out.stride(2), 1) if p_is_narrow else (1, out.stride(2))
    launch(
        wgrad.wgrad, (tiles, e, splits), p.device,
        narrow, narrow.stride(0), narrow_rows, wide, wide.stride(0), wide_rows, offsets, out,
        narrow.shape[1], wide.shape[1], out.stride(0), out.stride(1), narrow_stride, wide_stride, top_k,
        SPLITS=splits, NARROW=side, WIDE=configs.WGRAD_WIDE, ROWS=configs.WGRAD_ROWS,
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
    gw = topk_weights.new_zeros(topk_weights.shape if need_gw else (0, topk_weights.shape[1]))
    use_bias = bias is not None and gy is not None and need_gw
    if gy is not None:
        gy = with_unit_stride(gy)
    launch(
        glu.glu_backward, (_row_tiles(m, e, configs.GLU_ROWS),), pre.device,
        pre, pre.stride(0), topk_weights.reshape(-1).contiguous(), _contiguous(gh), rows, offsets,
        gy if use_bias else None, gy.stride(0) if use_bias and gy is not None else 0, gy_rows if use_bias else None,
        _contiguous(bias) if use_bias else None,
        gpre if need_gpre else None, h if need_h else None, gw if need_gw else None, topk_weights.shape[1],
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
    x: Tensor, rows: Tensor | None, offsets: Tensor, factor: Tensor | None, u: Tensor, out: Tensor | None,
    scaling: float, top_k: int, *, by_rank: bool, split: bool = False, x_split: bool = False,
) -> None:  # fmt: skip
    """u = scaling · x[rows // top_k] f and, where `out` is given, the rows themselves."""
    if out is None and factor is None:
        return
    x = with_unit_stride(x)
    e, r = offsets.shape[0], u.shape[1]
    factor_width = 0 if factor is None else factor.shape[2 if by_rank else 1]
    ranks = min(padded_rank(r), configs.SHRINK_RANKS)
    launch(
        shrink.shrink,
        (_row_tiles(u.shape[0], e, configs.SHRINK_ROWS), triton.cdiv(r, ranks) if r else 1), x.device,
        x, x.stride(0), rows, offsets, _contiguous(factor), u, out, scaling, r, top_k,
        E=e, E_POW2=power_of_two(e, 16), WIDTH=x.shape[1], FACTOR_WIDTH=factor_width,
        OUT_WIDTH=0 if out is None else out.shape[1], R=ranks, ROWS=configs.SHRINK_ROWS,
        COLUMNS=configs.SHRINK_COLUMNS, BY_RANK=by_rank, X_SPLIT=x_split, SPLIT=split,
        PRECISION=precision(x.dtype), DTYPE=TRITON_DTYPE[x.dtype], num_warps=4,
    )  # fmt: skip


def _packed_asm(weight: Weight, dtype: torch.dtype, hopper: bool) -> bool:
    return hopper and dtype == torch.bfloat16 and weight.block == 16


def _decodes_slices(x: Tensor, m: int, weight: Weight) -> bool:
    e, n, _ = weight.sizes
    return configs.use_scratch(m, e, n, weight.global_scale.shape[1], x.dtype, x.device.index)


def _x_width(weight: Weight, dense: bool) -> int:
    return weight.sizes[2] if dense else padded_width(weight.sizes[2])


def _scratch_product(
    x: Tensor, offsets: Tensor, weight: Weight, epilogue: scratch.Epilogue, *, transposed: bool
) -> Tensor:
    return scratch.product(
        x, offsets, weight.codes, weight.scales, weight.global_scale, epilogue, transposed=transposed,
        constants=weight.constants, packed_asm=_packed_asm(weight, x.dtype, True),
    )  # fmt: skip


def _linear(
    split: Tensor, offsets: Tensor, weight: Weight, lora_b: Tensor | None, u: Tensor, bias: Tensor | None,
    slots: Tensor | None, slot_weights: Tensor | None, dense: bool,
) -> Tensor:  # fmt: skip
    """y `[M, N]` from routed rows, in split layout unless `dense`; `slot_weights` weight the bias."""
    e, n, _ = weight.sizes
    m, dtype = split.shape[0], split.dtype
    if bias is None:
        slots = slot_weights = None
    if dense:
        epilogue = scratch.Epilogue(_contiguous(lora_b), u, _contiguous(bias), slots, slot_weights)
        return _scratch_product(split, offsets, weight, epilogue, transposed=False)
    limit, hopper = configs.device_limits(split.device.index)
    config = configs.linear_config(configs.rows_per_expert(m, e), dtype, limit)
    y = split.new_empty(m, n)
    x = tma_descriptor(split, [config.tokens, config.bytes], hopper)
    launch(
        grouped_gemm.grouped_linear,
        (_row_tiles(m, e, config.tokens) * triton.cdiv(n, config.outputs),), split.device,
        split if x is None else x, weight.codes, weight.scales, weight.global_scale, _contiguous(lora_b), u,
        _contiguous(bias), slots, slot_weights, offsets, y, n, u.shape[1],
        R=padded_rank(u.shape[1]), X_WIDTH=split.shape[1], TOKENS=config.tokens, OUTPUTS=config.outputs,
        BYTES=config.bytes, STAGES=config.stages, TMA=x is not None, PACKED_ASM=_packed_asm(weight, dtype, hopper),
        WGMMA=hopper and dtype != torch.float32, PRECISION=precision(dtype), WEIGHTED_BIAS=slots is not None, DTYPE=TRITON_DTYPE[dtype], **weight.constants,
        num_warps=config.warps,
    )  # fmt: skip
    return y


def _dgrad(gy: Tensor, offsets: Tensor, weight: Weight, lora_a: Tensor | None, v: Tensor) -> Tensor:
    """gx `[M, C]` from gathered, contiguous rows."""
    e, n, c = weight.sizes
    m, dtype = gy.shape[0], gy.dtype
    if _decodes_slices(gy, m, weight):
        return _scratch_product(gy, offsets, weight, scratch.Epilogue(_contiguous(lora_a), v), transposed=True)
    limit, hopper = configs.device_limits(gy.device.index)
    config = configs.dgrad_config(configs.rows_per_expert(m, e), dtype, limit)
    gx = gy.new_empty(m, c)
    rows = tma_descriptor(gy, [config.tokens, config.depth], hopper)
    launch(
        grouped_gemm.grouped_dgrad,
        (_row_tiles(m, e, config.tokens) * triton.cdiv(c // 2, config.bytes),), gy.device,
        gy if rows is None else rows, weight.codes, weight.scales, weight.global_scale, _contiguous(lora_a), v,
        offsets, gx, n, v.shape[1],
        R=padded_rank(v.shape[1]), TOKENS=config.tokens, BYTES=config.bytes, DEPTH=config.depth,
        STAGES=config.stages, TMA=rows is not None, PACKED_ASM=_packed_asm(weight, dtype, hopper),
        PRECISION=precision(dtype), DTYPE=TRITON_DTYPE[dtype], **weight.constants, num_warps=config.warps,
    )  # fmt: skip
    return gx


CUDA_KERNELS: dict[str, Callable[..., Any]] = {
    "moe_route": moe_route,
    "combine": combine,
    "grouped_lora_linear": grouped_lora_linear,
    "grouped_lora_dgrad": grouped_lora_dgrad,
    "grouped_lora_wgrad": grouped_lora_wgrad,
    "glu_grouped_lora_linear": glu_grouped_lora_linear,
    "glu_backward": glu_backward,
}
