"""Fake kernels: what each op returns, in shape, dtype and (always contiguous) strides. Sizes may be symbolic."""

import torch
from torch import Tensor

from ..format import check_dense, check_packed, expand_global_scale
from .activation import activation_width


def quantize(x: Tensor, global_scale: Tensor | None = None, *, format: str = "nvfp4") -> tuple[Tensor, Tensor, Tensor]:
    fmt = check_dense(x, global_scale, format)
    *lead, c = x.shape
    if global_scale is not None:
        expand_global_scale(global_scale, x.shape)
    codes = x.new_empty([*lead, c // 2], dtype=torch.uint8)
    scales = x.new_empty([*lead, c // fmt.block_size], dtype=fmt.scale_dtype)
    return codes, scales, x.new_empty([1] if global_scale is None else global_scale.shape, dtype=torch.float32)


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    check_packed(codes, scales)
    *lead, c_half = codes.shape
    expand_global_scale(global_scale, (*lead, c_half * 2))
    return codes.new_empty([*lead, c_half * 2], dtype=dtype)


def fake_quantize(x: Tensor, global_scale: Tensor | None = None, *, format: str = "nvfp4") -> Tensor:
    quantize(x, global_scale, format=format)  # for its checks
    return x.new_empty(x.shape)


def merge_lora(
    codes: Tensor, scales: Tensor, global_scale: Tensor, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    return codes.new_empty(codes.shape), scales.new_empty(scales.shape)


def moe_route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = topk_ids.shape[0] * topk_ids.shape[1]

    def int32(size: int) -> Tensor:
        return topk_ids.new_empty([size], dtype=torch.int32)

    return int32(slots), int32(slots), int32(num_experts)


def grouped_lora_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, compute: str = "w4a16", merge_aware: bool = False,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    m = x.shape[0] if rows is None else rows.shape[0]
    return x.new_empty(m, codes.shape[1]), x.new_empty(m, 0 if lora_a is None else lora_a.shape[1])


def grouped_lora_dgrad(
    gy: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, v: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, need_gx: bool = True, merge_aware: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    m = gy.shape[0] if rows is None else rows.shape[0]
    gx = gy.new_empty(m if need_gx else 0, codes.shape[2] * 2)
    return gx, gy.new_empty(m if v is None else 0, 0 if lora_b is None else lora_b.shape[2])


def grouped_lora_wgrad(
    p: Tensor, p_rows: Tensor | None, q: Tensor, q_rows: Tensor | None, offsets: Tensor,
    *, dtype: torch.dtype, top_k: int = 1,
) -> Tensor:  # fmt: skip
    return p.new_empty(offsets.shape[0], p.shape[1], q.shape[1], dtype=dtype)


def glu_grouped_lora_linear(
    pre: Tensor, topk_weights: Tensor, rows: Tensor, offsets: Tensor,
    codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None, compute: str = "w4a16",
    merge_aware: bool = False, input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return grouped_lora_linear(pre, None, offsets, codes, scales, global_scale, lora_a, lora_b)


def glu_backward(
    pre: Tensor, topk_weights: Tensor, gh: Tensor | None, rows: Tensor, offsets: Tensor,
    gy: Tensor | None = None, gy_rows: Tensor | None = None, bias: Tensor | None = None,
    lora_b: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None,
    need_gpre: bool = True, need_h: bool = True, need_gw: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gpre = pre.new_empty(pre.shape[0] if need_gpre else 0, pre.shape[1])
    h = pre.new_empty(pre.shape[0] if need_h else 0, activation_width(pre.shape[1], activation))
    gw = topk_weights.new_empty(topk_weights.shape[0] if need_gw else 0, topk_weights.shape[1])
    return gpre, h, gw, pre.new_empty(pre.shape[0], 0 if lora_b is None else lora_b.shape[2])
