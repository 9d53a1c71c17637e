"""CPU kernels of the grouped ops: one matrix product per expert with tokens, each expert decoded once per call.

Half-precision activations are widened to fp32 for the products, so every product is exact and each sum is fp32 until
its one rounding on the way out; float64 stays float64. LoRA factors enter at that same precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..format import decode
from .activation import activate, activate_backward, activation_width
from .merge import merge_lora
from .rows import quantize_rows


@dataclass(frozen=True)
class _Projection:
    """One packed weight of all experts with its LoRA factors, used an expert at a time in dtype `acc`."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    lora_a: Tensor | None
    lora_b: Tensor | None
    scaling: float
    acc: torch.dtype
    merge_aware: bool

    def forward(self, e: int, x_e: Tensor, u_e: Tensor, base: Tensor | None = None) -> Tensor:
        """base_e @ W_eᵀ·g + u_e @ b_eᵀ, and u_e = scaling · x_e @ a_eᵀ written in place (rounded to its dtype).

        `base` is x unless given; W holds the adapter, and nothing is added, where the layer is merge-aware.
        """
        y_e = _scale_halves((x_e if base is None else base) @ self._weight(e).t(), self.global_scale[e])
        if self.lora_a is not None and self.lora_b is not None:
            u_e.copy_((x_e @ self.lora_a[e].to(self.acc).t()).mul_(self.scaling))
            if not self.merge_aware:
                y_e.addmm_(u_e.to(self.acc), self.lora_b[e].to(self.acc).t())
        return y_e

    def _weight(self, e: int) -> Tensor:
        codes, scales = self.codes[e], self.scales[e]
        if self.merge_aware and self.lora_a is not None and self.lora_b is not None:
            one = slice(e, e + 1)
            (codes,), (scales,) = merge_lora(
                self.codes[one], self.scales[one], self.global_scale[one], self.lora_a[one], self.lora_b[one],
                self.scaling,
            )  # fmt: skip
        return decode(codes, scales, self.acc)

    def input_grad(self, e: int, gy_e: Tensor, v_e: Tensor) -> Tensor:
        """(gy_e·g) @ W_e + v_e @ a_e."""
        # gy_e may be a view of the caller's gradient, so it is not scaled in place.
        scaled = _scale_halves(gy_e.clone(), self.global_scale[e])
        gx_e = scaled @ self._weight(e)
        return (
            gx_e
            if self.lora_a is None or self.merge_aware
            else gx_e.addmm_(v_e.to(self.acc), self.lora_a[e].to(self.acc))
        )

    def lora_grad(self, e: int, gy_e: Tensor, v_e: Tensor) -> None:
        """v_e = scaling · gy_e @ b_e, written in place."""
        if self.lora_b is not None:
            v_e.copy_((gy_e @ self.lora_b[e].to(self.acc)).mul_(self.scaling))


def grouped_lora_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, compute: str = "w4a16", merge_aware: bool = False,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y `[M, N]` = x[rows // top_k] @ W_eᵀ·g + u @ b_eᵀ + bias; u `[M, R]` = scaling · x[rows // top_k] @ a_eᵀ.

    compute "w4a4": the first x is the one that `quantize_rows` makes of it, under input_scale if given. merge_aware: W
    is `merge_lora`'s, and u @ b_eᵀ is not added.
    """
    m = x.shape[0] if rows is None else rows.shape[0]
    weight = _Projection(codes, scales, global_scale, lora_a, lora_b, scaling, _accumulate_dtype(x.dtype), merge_aware)
    y = x.new_empty(m, codes.shape[1])
    u = x.new_empty(m, 0 if lora_a is None else lora_a.shape[1])
    for e, begin, end in _segments(offsets):
        x_e = _take(x, rows, begin, end, top_k, weight.acc)
        y_e = weight.forward(e, x_e, u[begin:end], _quantized(x_e, input_scale) if compute == "w4a4" else None)
        y[begin:end] = y_e if bias is None else y_e.add_(bias[e])
    return y, u


def grouped_lora_dgrad(
    gy: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, v: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, need_gx: bool = True, merge_aware: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """gx `[M, C]` = (gy·g) @ W_e + v @ a_e (`[0, C]` if not needed); v `[M, R]` = scaling · gy[rows // top_k] @ b_e.

    A v that is given is taken as it is, and the one returned has 0 rows. merge_aware: W is `merge_lora`'s, and v @ a_e
    is not added.
    """
    m = gy.shape[0] if rows is None else rows.shape[0]
    weight = _Projection(codes, scales, global_scale, lora_a, lora_b, scaling, _accumulate_dtype(gy.dtype), merge_aware)
    gx = gy.new_empty(m if need_gx else 0, codes.shape[2] * 2)
    new_v = gy.new_empty(m if v is None else 0, 0 if lora_b is None else lora_b.shape[2])
    for e, begin, end in _segments(offsets):
        gy_e = _take(gy, rows, begin, end, top_k, weight.acc)
        if v is None:
            weight.lora_grad(e, gy_e, new_v[begin:end])
        if need_gx:
            gx[begin:end] = weight.input_grad(e, gy_e, (new_v if v is None else v)[begin:end])
    return gx, new_v


def grouped_lora_wgrad(
    p: Tensor, p_rows: Tensor | None, q: Tensor, q_rows: Tensor | None, offsets: Tensor,
    *, dtype: torch.dtype, top_k: int = 1,
) -> Tensor:  # fmt: skip
    """out `[E, P, Q]` = p_eᵀ q_e over the rows of each expert, exactly 0 for an expert without rows."""
    acc = _accumulate_dtype(p.dtype)
    out = p.new_zeros(offsets.shape[0], p.shape[1], q.shape[1], dtype=dtype)
    for e, begin, end in _segments(offsets):
        p_e = _take(p, p_rows, begin, end, top_k, acc)
        out[e] = p_e.t() @ _take(q, q_rows, begin, end, top_k, acc)
    return out


def glu_grouped_lora_linear(
    pre: Tensor, topk_weights: Tensor, rows: Tensor, offsets: Tensor,
    codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None, compute: str = "w4a16",
    merge_aware: bool = False, input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`grouped_lora_linear` of h `[M, I]` = act(pre) · router weight; the bias is weighted too.

    compute "w4a4" quantises act(pre), rounded to pre's dtype, before the router weight.
    """
    weight = _Projection(
        codes, scales, global_scale, lora_a, lora_b, scaling, _accumulate_dtype(pre.dtype), merge_aware
    )
    y = pre.new_empty(pre.shape[0], codes.shape[1])
    u = pre.new_empty(pre.shape[0], 0 if lora_a is None else lora_a.shape[1])
    for e, begin, end in _segments(offsets):
        router_e = _router_weights(topk_weights, rows[begin:end], weight.acc)
        act_e = activate(pre[begin:end].to(weight.acc), activation, limit)
        base = None
        if compute == "w4a4":
            base = _quantized(act_e.to(pre.dtype).to(weight.acc), input_scale).mul_(router_e)
        # h is rounded to the activation dtype, as it is wherever it is a tensor of its own (glu_backward returns it).
        h_e = act_e.mul_(router_e).to(pre.dtype).to(weight.acc)
        y_e = weight.forward(e, h_e, u[begin:end], base)
        y[begin:end] = y_e if bias is None else y_e.add_(router_e * bias[e].to(weight.acc))
    return y, u


def glu_backward(
    pre: Tensor, topk_weights: Tensor, gh: Tensor | None, rows: Tensor, offsets: Tensor,
    gy: Tensor | None = None, gy_rows: Tensor | None = None, bias: Tensor | None = None,
    lora_b: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None,
    need_gpre: bool = True, need_h: bool = True, need_gw: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients through h = act(pre) · router weight, given gh `[M, I]` = d loss / d h.

    gpre is shaped as pre, h `[M, I]` is recomputed for the factor gradients, gw `[T, K]` has exact 0 for slots that
    are not routed. A bias of the down projection adds gy_m · bias_e to gw. With lora_b, that of the projection which
    made pre, v `[M, R]` = scaling · gpre @ b_e of gpre as returned, which its `grouped_lora_dgrad` takes (else
    `[M, 0]`). What is not needed has 0 rows; gh may be None where only h is needed.
    """
    acc = _accumulate_dtype(pre.dtype)
    top_k = topk_weights.shape[1]
    gpre = pre.new_empty(pre.shape[0] if need_gpre else 0, pre.shape[1])
    h = pre.new_empty(pre.shape[0] if need_h else 0, activation_width(pre.shape[1], activation))
    gw = topk_weights.new_zeros(topk_weights.shape[0] if need_gw else 0, top_k)
    v = pre.new_empty(pre.shape[0], 0 if lora_b is None else lora_b.shape[2])
    for e, begin, end in _segments(offsets):
        router_e = _router_weights(topk_weights, rows[begin:end], acc)
        pre_e = pre[begin:end].to(acc)
        if gh is None:
            h[begin:end] = activate(pre_e, activation, limit).mul_(router_e)
            continue
        gh_e = gh[begin:end].to(acc)
        gpre_e, act_e = activate_backward(pre_e, gh_e * router_e, activation, limit)
        if need_gpre:
            gpre[begin:end] = gpre_e
            if lora_b is not None:
                v[begin:end] = (gpre[begin:end].to(acc) @ lora_b[e].to(acc)).mul_(scaling)
        if need_gw:
            gw_e = (gh_e * act_e).sum(1)
            if gy is not None and bias is not None:
                gw_e.addmv_(_take(gy, gy_rows, begin, end, top_k, acc), bias[e].to(acc))
            gw.view(-1).index_copy_(0, rows[begin:end].to(torch.int64), gw_e.to(gw.dtype))
        if need_h:
            h[begin:end] = act_e.mul_(router_e)
    return gpre, h, gw, v


def _quantized(x: Tensor, input_scale: Tensor | None) -> Tensor:
    """The values that 4-bit rows stand for, in x's dtype."""
    codes, scales, row_scale = quantize_rows(x, input_scale)
    return decode(codes, scales, x.dtype).mul_(row_scale.unsqueeze(-1))


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _segments(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows."""
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > begin:
            yield expert, begin, end
        begin = end


def _take(source: Tensor, rows: Tensor | None, begin: int, end: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """Routed rows begin..end of `source`, gathered where it is token-side, in `dtype`."""
    if rows is None:
        return source[begin:end].to(dtype)
    slots = rows[begin:end]
    return source.index_select(0, slots if top_k == 1 else slots // top_k).to(dtype)


def _router_weights(topk_weights: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    return topk_weights.reshape(-1).index_select(0, slots).to(dtype).unsqueeze(-1)


def _scale_halves(x: Tensor, global_scale_S: Tensor) -> Tensor:
    """Multiply the columns by the expert's global scale, or each half of them by its own. In place."""
    if global_scale_S.shape[0] == 1:
        return x.mul_(global_scale_S)
    half = x.shape[1] // 2
    x[:, :half].mul_(global_scale_S[0])
    x[:, half:].mul_(global_scale_S[1])
    return x
