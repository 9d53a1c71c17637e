"""Derivatives: which ops have one, what each saves, and a refusal in words for all the others.

The layer's backward is one formula over the same small ops that its forward uses, so a compiled graph shows them all.
Routing is never differentiated; the gradient of the combine is a gather that the down projection's dgrad does itself;
and on the M-row side only the pre-activation, the routing and the `[M, R]` results of the LoRA shrinks are kept.
Nothing is saved or computed for a gradient that nobody asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..format import saturation_mask
from .first_order import FirstOrderFunction, Refusal, SingleLevelFunction, next_level, wants_grad
from .routing import combine, invert_rows

_OPS = torch.ops.nvfp4


@dataclass(frozen=True)
class Projection:
    """One packed weight of all experts, its LoRA factors and bias."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    lora_a: Tensor | None
    lora_b: Tensor | None
    bias: Tensor | None
    scaling: float
    merge_aware: bool

    @property
    def weight(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.codes, self.scales, self.global_scale, self.lora_a, self.lora_b


class Needs(NamedTuple):
    """Which gradients of a projection are asked for; `input` is x of the linear, pre of the GLU linear."""

    input: bool
    lora_a: bool
    lora_b: bool
    bias: bool
    topk_weights: bool = False


class Grads(NamedTuple):
    input: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    bias: Tensor | None = None
    topk_weights: Tensor | None = None


def linear_backward(
    gy: Tensor, x: Tensor | None, rows: Tensor | None, offsets: Tensor, u: Tensor | None, top_k: int,
    p: Projection, needs: Needs, ops: Any = _OPS, v: Tensor | None = None,
) -> Grads:  # fmt: skip
    """Gradients of `grouped_lora_linear` for gy `[M, N]`; `input` is still on the M-row side: `[M, C]`.

    v is that of gy, where it is known already.
    """
    gx = ga = gb = gbias = None
    if needs.input or needs.lora_a:
        if needs.input or v is None:
            gx_M, new_v = ops.grouped_lora_dgrad(
                gy, None, offsets, *p.weight, v, scaling=p.scaling, need_gx=needs.input, merge_aware=p.merge_aware
            )
            gx = gx_M if needs.input else None
            v = new_v if v is None else v
        if needs.lora_a and p.lora_a is not None:
            ga = ops.grouped_lora_wgrad(v, None, x, rows, offsets, dtype=p.lora_a.dtype, top_k=top_k)
    if needs.lora_b and p.lora_b is not None:
        gb = ops.grouped_lora_wgrad(gy, None, u, None, offsets, dtype=p.lora_b.dtype)
    if needs.bias and p.bias is not None:
        ones = gy.new_ones(gy.shape[0], 1)
        gbias = ops.grouped_lora_wgrad(gy, None, ones, None, offsets, dtype=p.bias.dtype).squeeze(-1)
    return Grads(gx, ga, gb, gbias)


def glu_linear_backward(
    gy: Tensor, gy_rows: Tensor | None, pre: Tensor | None, topk_weights: Tensor, rows: Tensor, offsets: Tensor,
    u: Tensor | None, p: Projection, needs: Needs, activation: dict[str, Any], ops: Any = _OPS,
    before: Projection | None = None,
) -> tuple[Grads, Tensor | None]:  # fmt: skip
    """Gradients of `glu_grouped_lora_linear`; gy is `[M, N]`, or `[T, N]` gathered by gy_rows.

    `before` is the projection that made pre, where the v of its backward is wanted too: gpre is at hand here.
    h is recomputed from pre under another op's name: the forward never keeps it, and a compiler cannot merge the two.
    """
    gpre = gw = ga = gb = gbias = v_before = None
    top_k = topk_weights.shape[1]
    gather = {"top_k": top_k} if gy_rows is not None else {}
    need_gh = needs.input or needs.topk_weights
    if need_gh or needs.lora_a:
        gh, v = ops.grouped_lora_dgrad(
            gy, gy_rows, offsets, *p.weight, scaling=p.scaling, need_gx=need_gh, merge_aware=p.merge_aware, **gather
        )
        shrinks = {} if before is None else {"scaling": before.scaling}
        gpre, h, gw, v_before = ops.glu_backward(
            pre, topk_weights, gh if need_gh else None, rows, offsets, gy, gy_rows, p.bias,
            None if before is None else before.lora_b, **shrinks, **activation,
            need_gpre=needs.input, need_h=needs.lora_a, need_gw=needs.topk_weights,
        )  # fmt: skip
        if needs.lora_a and p.lora_a is not None:
            ga = ops.grouped_lora_wgrad(v, None, h, None, offsets, dtype=p.lora_a.dtype)
    if needs.lora_b and p.lora_b is not None:
        gb = ops.grouped_lora_wgrad(gy, gy_rows, u, None, offsets, dtype=p.lora_b.dtype, **gather)
    if needs.bias and p.bias is not None:
        router = topk_weights.reshape(-1, 1).index_select(0, rows)
        gbias = ops.grouped_lora_wgrad(gy, gy_rows, router, None, offsets, dtype=p.bias.dtype, **gather).squeeze(-1)
    grads = Grads(gpre if needs.input else None, ga, gb, gbias, gw if needs.topk_weights else None)
    return grads, None if before is None else v_before


def _below_autograd(op: str) -> Callable[..., Any]:
    overload = getattr(_OPS, op).default

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return call


class _GroupedLoraLinear(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, scaling: float, options: dict[str, Any], x: Tensor, rows: Tensor | None, offsets: Tensor,
                codes: Tensor, scales: Tensor, global_scale: Tensor, lora_a: Tensor | None, lora_b: Tensor | None,
                bias: Tensor | None, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        with next_level():
            y, u = _OPS.grouped_lora_linear(
                x, rows, offsets, codes, scales, global_scale, lora_a, lora_b, bias,
                scaling=scaling, **options, input_scale=input_scale,
            )  # fmt: skip
        _, _, need_x, *_, need_a, need_b, need_bias, _ = ctx.needs_input_grad
        ctx.needs = Needs(need_x, need_a, need_b, need_bias)
        ctx.options = scaling, options
        through = ctx.needs.input or ctx.needs.lora_a
        ctx.save_for_backward(
            x if need_a else None, rows, offsets, *((codes, scales, global_scale) if through else (None,) * 3),
            lora_a, lora_b, bias, u if need_b else None,
        )  # fmt: skip
        if need_b and not need_a:
            FirstOrderFunction.hide(ctx, "grouped_lora_linear", x)  # behind u
        ctx.mark_non_differentiable(u)
        ctx.set_materialize_grads(False)
        return y, u

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return (None,) * 12
        (scaling, options), needs = ctx.options, ctx.needs
        top_k = options["top_k"]
        x, rows, offsets, codes, scales, global_scale, lora_a, lora_b, bias, u = saved = ctx.saved_tensors

        def compute() -> tuple[Tensor | None, ...]:
            p = Projection(codes, scales, global_scale, lora_a, lora_b, bias, scaling, options["merge_aware"])
            g = linear_backward(gy, x, rows, offsets, u, top_k, p, needs)
            gx = None if g.input is None else _to_tokens(g.input, rows, offsets, top_k)
            return gx, g.lora_a, g.lora_b, g.bias

        gx, ga, gb, gbias = FirstOrderFunction.grads(ctx, "grouped_lora_linear", compute, gy, saved)
        return None, None, gx, None, None, None, None, None, ga, gb, gbias, None


def _to_tokens(gx_M: Tensor, rows: Tensor | None, offsets: Tensor, top_k: int) -> Tensor:
    """The M-row gradient summed onto the rows of x; rows that are not routed give exact 0."""
    if rows is not None:
        return combine(gx_M, invert_rows(rows, offsets), top_k, gx_M.dtype)
    position = torch.arange(gx_M.shape[0], dtype=torch.int32, device=gx_M.device)
    return torch.where((position < offsets[-1]).unsqueeze(-1), gx_M, 0)


class _GluGroupedLoraLinear(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, scaling: float, activation: dict[str, Any], numbers: dict[str, Any], pre: Tensor,
                topk_weights: Tensor, rows: Tensor, offsets: Tensor, codes: Tensor, scales: Tensor,
                global_scale: Tensor, lora_a: Tensor | None, lora_b: Tensor | None,
                bias: Tensor | None, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        with next_level():
            y, u = _OPS.glu_grouped_lora_linear(
                pre, topk_weights, rows, offsets, codes, scales, global_scale, lora_a, lora_b, bias,
                scaling=scaling, **activation, **numbers, input_scale=input_scale,
            )  # fmt: skip
        _, _, _, need_pre, need_w, *_, need_a, need_b, need_bias, _ = ctx.needs_input_grad
        ctx.needs = Needs(need_pre, need_a, need_b, need_bias, need_w)
        ctx.options = scaling, activation, numbers["merge_aware"]
        through = need_pre or need_w or need_a
        ctx.save_for_backward(
            pre if through else None, topk_weights, rows, offsets,
            *((codes, scales, global_scale) if through else (None,) * 3), lora_a, lora_b, bias, u if need_b else None,
        )  # fmt: skip
        if need_b and not through:
            FirstOrderFunction.hide(ctx, "glu_grouped_lora_linear", pre)  # behind u
        ctx.mark_non_differentiable(u)
        ctx.set_materialize_grads(False)
        return y, u

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return (None,) * 14
        (scaling, activation, merge_aware), needs = ctx.options, ctx.needs
        pre, topk_weights, rows, offsets, codes, scales, global_scale, lora_a, lora_b, bias, u = saved = (
            ctx.saved_tensors
        )

        def compute() -> tuple[Tensor | None, ...]:
            p = Projection(codes, scales, global_scale, lora_a, lora_b, bias, scaling, merge_aware)
            g, _ = glu_linear_backward(gy, None, pre, topk_weights, rows, offsets, u, p, needs, activation)
            gpre = g.input
            if gpre is not None:
                gpre = _to_tokens(gpre, None, offsets, 1)
            return gpre, g.topk_weights, g.lora_a, g.lora_b, g.bias

        gpre, gw, ga, gb, gbias = FirstOrderFunction.grads(ctx, "glu_grouped_lora_linear", compute, gy, saved)
        return None, None, None, gpre, gw, None, None, None, None, None, ga, gb, gbias, None


def grouped_lora_linear(
    x: Tensor, rows: Tensor | None, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, top_k: int = 1, compute: str = "w4a16", merge_aware: bool = False,
    input_scale: Tensor | None = None,
) -> Any:  # fmt: skip
    tensors = (x, rows, offsets, codes, scales, global_scale, lora_a, lora_b, bias)
    options = {"top_k": top_k, "compute": compute, "merge_aware": merge_aware}
    if wants_grad("grouped_lora_linear", (x, lora_a, lora_b, bias)):
        return _GroupedLoraLinear.apply(scaling, options, *tensors, input_scale)
    return _below_autograd("grouped_lora_linear")(*tensors, scaling=scaling, **options, input_scale=input_scale)


def glu_grouped_lora_linear(
    pre: Tensor, topk_weights: Tensor, rows: Tensor, offsets: Tensor,
    codes: Tensor, scales: Tensor, global_scale: Tensor,
    lora_a: Tensor | None = None, lora_b: Tensor | None = None, bias: Tensor | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None, compute: str = "w4a16",
    merge_aware: bool = False, input_scale: Tensor | None = None,
) -> Any:  # fmt: skip
    tensors = (pre, topk_weights, rows, offsets, codes, scales, global_scale, lora_a, lora_b, bias)
    options, numbers = {"activation": activation, "limit": limit}, {"compute": compute, "merge_aware": merge_aware}
    if wants_grad("glu_grouped_lora_linear", (pre, topk_weights, lora_a, lora_b, bias)):
        return _GluGroupedLoraLinear.apply(scaling, options, numbers, *tensors, input_scale)
    return _below_autograd("glu_grouped_lora_linear")(
        *tensors, scaling=scaling, **options, **numbers, input_scale=input_scale
    )


class _FakeQuantize(SingleLevelFunction):
    """Straight-through: gradient 1, and 0 where |x| exceeds the format's largest value (see docs/format.md).

    That is constant in x but for the jumps of the mask, so its own derivative towards x is a true 0; and it is plain
    torch in the incoming gradient. So unlike the layer's it can be differentiated again, as often as one likes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, global_scale: Tensor | None, format: str) -> Tensor:
        ctx.format = format
        # Only a given global scale can make a value exceed the largest one, so otherwise there is nothing to mask.
        ctx.save_for_backward(*(() if global_scale is None else (x, global_scale)))
        with next_level():
            return _OPS.fake_quantize(x, global_scale, format=format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        saved = ctx.saved_tensors  # read once, which is all that activation checkpointing allows
        if not saved:
            return grad.clone(), None, None
        x, global_scale = saved
        return torch.where(saturation_mask(x, global_scale, ctx.format), 0, grad), None, None


def fake_quantize(x: Tensor, global_scale: Tensor | None = None, *, format: str = "nvfp4") -> Tensor:
    if wants_grad("fake_quantize", (x, global_scale)):
        return _FakeQuantize.apply(x, global_scale, format)
    return _below_autograd("fake_quantize")(x, global_scale, format=format)


def without_derivative(op: str) -> Callable[..., Any]:
    """An Autograd kernel for an op that has none: its floating results raise in words where a gradient is asked for."""
    run = _below_autograd(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = run(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not wants_grad(op, tensors):
            return results

        def refuse(result: Tensor) -> Tensor:
            return Refusal.apply(f"nvfp4::{op} has no derivative", result, *tensors)

        return refuse(results) if isinstance(results, Tensor) else tuple(map(refuse, results))

    return kernel


def detached(op: str) -> Callable[..., Any]:
    """An Autograd kernel for an op into integers or bytes: its results never require a gradient."""
    return _below_autograd(op)
