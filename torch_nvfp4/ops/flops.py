"""FLOP formulas for `torch.utils.flop_counter`: two per multiply-add of the products, as if every slot were routed."""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_OPS = torch.ops.nvfp4


def _projection_flops(m: int, codes: Any, lora_a: Any) -> int:
    _, n, c_half = codes
    c = 2 * c_half
    r = 0 if lora_a is None else lora_a[1]
    return 2 * m * (n * c + r * (n + c))


@register_flop_formula(_OPS.grouped_lora_linear)
def _linear(x: Any, rows: Any, offsets: Any, codes: Any, scales: Any, global_scale: Any,
            lora_a: Any = None, *args: Any, **kwargs: Any) -> int:  # fmt: skip
    return _projection_flops(x[0] if rows is None else rows[0], codes, lora_a)


@register_flop_formula(_OPS.grouped_lora_dgrad)
def _dgrad(gy: Any, rows: Any, offsets: Any, codes: Any, scales: Any, global_scale: Any, lora_a: Any = None,
           lora_b: Any = None, *, need_gx: bool = True, **kwargs: Any) -> int:  # fmt: skip
    m = gy[0] if rows is None else rows[0]
    if need_gx:
        return _projection_flops(m, codes, lora_a)
    return 0 if lora_b is None else 2 * m * lora_b[1] * lora_b[2]


@register_flop_formula(_OPS.grouped_lora_wgrad)
def _wgrad(p: Any, p_rows: Any, q: Any, q_rows: Any, offsets: Any, **kwargs: Any) -> int:
    m = p[0] if p_rows is None else p_rows[0]
    return 2 * m * p[1] * q[1]


@register_flop_formula(_OPS.glu_grouped_lora_linear)
def _glu_linear(pre: Any, topk_weights: Any, rows: Any, offsets: Any, codes: Any, scales: Any, global_scale: Any,
                lora_a: Any = None, *args: Any, **kwargs: Any) -> int:  # fmt: skip
    return _projection_flops(pre[0], codes, lora_a)
