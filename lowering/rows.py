"""Rows for a linear product that takes 4-bit activations (`compute="w4a4"`): launches `kernels/rows.py`."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import configs
from .kernels import rows as kernels
from .launch import TRITON_DTYPE, cdiv, launch, with_unit_stride


class Rows(NamedTuple):
    """What a product multiplies with: rows in the column order of its path, and of 4-bit rows the fp32 scale of each.

    A 4-bit row holds code · block scale in the activation dtype, which is exact; or, with `block_scales` (bytes
    `[M, C/16]`), packed codes `[M, C/2]`. With slots, routed row m is row slots[m] // top_k of all these.
    """

    values: Tensor
    scale: Tensor | None = None
    block_scales: Tensor | None = None
    slots: Tensor | None = None
    top_k: int = 1


def quantize_rows(x: Tensor, width: int, order: int | None, input_scale: Tensor | None = None) -> Rows:
    """The rows of x `[M, C]` in 4 bits: values padded to `width` or, without an order, packed. See `ops.rows`."""
    x = with_unit_stride(x)
    out = _empty(x, x.shape[1], width, order)
    _launch(x, None, None, None, out, None, x.shape[1], order, None, None, input_scale)
    return out


def quantize_activation(
    pre: Tensor, slot_weights: Tensor, slots: Tensor, offsets: Tensor, c: int, width: int, order: int | None,
    activation: str, limit: float | None, input_scale: Tensor | None = None, *, need_h: bool,
) -> tuple[Rows, Tensor | None]:  # fmt: skip
    """(act(pre) in 4 bits, its row scales times the router weight; h `[M, C]` = act(pre) · router weight, if needed).

    Rows of no expert are left alone.
    """
    out = _empty(pre, c, width, order)
    h = pre.new_empty(pre.shape[0], c) if need_h else None
    _launch(pre, slot_weights, slots, offsets, out, h, c, order, activation, limit, input_scale)
    return out, h


def _empty(x: Tensor, c: int, width: int, order: int | None) -> Rows:
    m = x.shape[0]
    scale = x.new_empty(m, dtype=torch.float32)
    if order is None:
        codes, scales = (x.new_empty(m, c // elements, dtype=torch.uint8) for elements in (2, 16))
        return Rows(codes, scale, scales)
    return Rows(x.new_empty(m, width), scale)


def _launch(
    x: Tensor, slot_weights: Tensor | None, slots: Tensor | None, offsets: Tensor | None, out: Rows, h: Tensor | None,
    c: int, order: int | None, activation: str | None, limit: float | None,
    input_scale: Tensor | None,
) -> None:  # fmt: skip
    values, codes = (out.values, None) if order is not None else (None, out.values)
    launch(
        kernels.quantize_rows, (cdiv(x.shape[0], configs.GLU_ROWS),), x.device,
        x, x.stride(0), slot_weights, slots, offsets, input_scale, out.scale, values, codes, out.block_scales, h,
        x.shape[0],
        0 if offsets is None else offsets.shape[0], WIDTH=c, OUT_WIDTH=0 if values is None else values.shape[1],
        ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS, ORDER=order, ACTIVATION=activation, LIMIT=limit,
        DTYPE=TRITON_DTYPE[x.dtype], num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
