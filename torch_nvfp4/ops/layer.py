"""`moe_lora`: the whole layer as a macro over the small ops, with one backward formula for all of it.

The macro is CompositeImplicitAutograd: Dynamo sees one op, AOTAutograd and Inductor see the small ops and the plain
torch of the combine, so what stands around the grouped products fuses with them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd import Needs, Projection, glu_linear_backward, linear_backward
from .direct import small_ops
from .first_order import FirstOrderFunction, next_level, wants_grad
from .routing import combine


class LayerOptions(NamedTuple):
    """The layer's arguments that are not tensors."""

    gate_up_scaling: float
    down_scaling: float
    activation: str
    limit: float | None
    compute: str
    merge_aware: bool

    @property
    def numbers(self) -> dict[str, Any]:
        """With what operands the products are computed."""
        return {"compute": self.compute, "merge_aware": self.merge_aware}

    @property
    def glu(self) -> dict[str, Any]:
        return {"activation": self.activation, "limit": self.limit}


class LayerTensors(NamedTuple):
    """The layer's tensor arguments in the schema's order."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    gate_up_codes: Tensor
    gate_up_scales: Tensor
    gate_up_global_scale: Tensor
    down_codes: Tensor
    down_scales: Tensor
    down_global_scale: Tensor
    gate_up_lora_a: Tensor | None
    gate_up_lora_b: Tensor | None
    down_lora_a: Tensor | None
    down_lora_b: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_input_scale: Tensor | None
    down_input_scale: Tensor | None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return (self.x, self.topk_weights, *self[9:15])


class LayerResult(NamedTuple):
    out: Tensor
    pre: Tensor
    rows: Tensor
    inverse: Tensor
    offsets: Tensor
    gate_up_u: Tensor
    down_u: Tensor


def forward(t: LayerTensors, options: LayerOptions) -> LayerResult:
    """Route, gate_up, activation × router weight × down, combine: the layer as a chain of small ops."""
    ops, top_k = small_ops(t), t.topk_ids.shape[1]
    rows, inverse, offsets = ops.moe_route(t.topk_ids, t.gate_up_codes.shape[0])
    pre, gate_up_u = ops.grouped_lora_linear(
        t.x, rows, offsets, t.gate_up_codes, t.gate_up_scales, t.gate_up_global_scale,
        t.gate_up_lora_a, t.gate_up_lora_b, t.gate_up_bias, scaling=options.gate_up_scaling, top_k=top_k,
        **options.numbers, input_scale=t.gate_up_input_scale,
    )  # fmt: skip
    y, down_u = ops.glu_grouped_lora_linear(
        pre, t.topk_weights, rows, offsets, t.down_codes, t.down_scales, t.down_global_scale,
        t.down_lora_a, t.down_lora_b, t.down_bias, scaling=options.down_scaling, **options.glu, **options.numbers,
        input_scale=t.down_input_scale,
    )  # fmt: skip
    out = combine(y, inverse, top_k, t.x.dtype)
    return LayerResult(out, pre, rows, inverse, offsets, gate_up_u, down_u)


class LayerNeeds(NamedTuple):
    """Which gradients are asked for, and what follows: how far back through the layer the backward has to go."""

    gate_up: Needs
    down: Needs

    @classmethod
    def of(cls, needs_input_grad: tuple[bool, ...]) -> "LayerNeeds":
        wanted = dict(zip(LayerTensors._fields, needs_input_grad, strict=True))

        def of(name: str, input: bool, topk_weights: bool = False) -> Needs:
            lora_a, lora_b, bias = (wanted[f"{name}_{part}"] for part in ("lora_a", "lora_b", "bias"))
            return Needs(input, lora_a, lora_b, bias, topk_weights)

        gate_up = of("gate_up", wanted["x"])
        return cls(gate_up, of("down", any(gate_up), wanted["topk_weights"]))

    def saved(self, t: LayerTensors, r: LayerResult) -> dict[str, Tensor | None]:
        """What the asked-for gradients read, and no more."""
        gate_up_weight = self.gate_up.input or self.gate_up.lora_a
        down_weight = self.down.input or self.down.topk_weights or self.down.lora_a
        keep: dict[str, Tensor | None] = {
            "rows": r.rows,
            "offsets": r.offsets,
            "topk_weights": t.topk_weights,
            "pre": r.pre if down_weight else None,
            "x": t.x if self.gate_up.lora_a else None,
            "inverse": r.inverse if self.gate_up.input else None,
            "gate_up_u": r.gate_up_u if self.gate_up.lora_b else None,
            "down_u": r.down_u if self.down.lora_b else None,
        }
        for prefix, wanted in (("gate_up", gate_up_weight), ("down", down_weight)):
            for part in ("codes", "scales", "global_scale"):
                keep[f"{prefix}_{part}"] = getattr(t, f"{prefix}_{part}") if wanted else None
            for part in ("lora_a", "lora_b", "bias"):
                keep[f"{prefix}_{part}"] = getattr(t, f"{prefix}_{part}")
        return keep


class _Layer(FirstOrderFunction):
    @staticmethod
    def forward(ctx: Any, options: LayerOptions, *tensors: Any) -> Tensor:
        t = LayerTensors(*tensors)
        with next_level():
            result = forward(t, options)
        ctx.options = options
        ctx.needs = LayerNeeds.of(ctx.needs_input_grad[1:])
        ctx.x_dtype = t.x.dtype
        saved = ctx.needs.saved(t, result)
        ctx.names = tuple(saved)
        ctx.save_for_backward(*saved.values())
        if saved["x"] is None:
            FirstOrderFunction.hide(ctx, "moe_lora", t.x)  # behind pre and u
        return result.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))

        def compute() -> tuple[Tensor | None, ...]:
            return _backward(grad_out.to(ctx.x_dtype), saved, ctx.options, ctx.needs)

        gx, gw, *lora_and_bias = FirstOrderFunction.grads(ctx, "moe_lora", compute, grad_out, tuple(saved.values()))
        return None, gx, None, gw, *(None,) * 6, *lora_and_bias, None, None


def _backward(
    grad_out: Tensor, saved: dict[str, Tensor], options: LayerOptions, needs: LayerNeeds
) -> tuple[Tensor | None, ...]:
    rows, offsets, topk_weights = saved["rows"], saved["offsets"], saved["topk_weights"]
    ops, top_k = small_ops((grad_out, *saved.values())), topk_weights.shape[1]
    before = _projection(saved, "gate_up", options.gate_up_scaling, options)
    shrinks = before.lora_b is not None and (needs.gate_up.input or needs.gate_up.lora_a)
    down, v = glu_linear_backward(
        grad_out, rows, saved["pre"], topk_weights, rows, offsets, saved["down_u"],
        _projection(saved, "down", options.down_scaling, options), needs.down, options.glu, ops,
        before if shrinks else None,
    )  # fmt: skip
    gx = ga = gb = gbias = None
    if down.input is not None:
        gate_up = linear_backward(
            down.input, saved["x"], rows, offsets, saved["gate_up_u"], top_k, before, needs.gate_up, ops, v,
        )  # fmt: skip
        gx, ga, gb, gbias = gate_up.input, gate_up.lora_a, gate_up.lora_b, gate_up.bias
        if gx is not None:
            gx = combine(gx, saved["inverse"], top_k, grad_out.dtype)
    return gx, down.topk_weights, ga, gb, down.lora_a, down.lora_b, gbias, down.bias


def _projection(saved: dict[str, Tensor], prefix: str, scaling: float, options: LayerOptions) -> Projection:
    parts = ("codes", "scales", "global_scale", "lora_a", "lora_b", "bias")
    of_weight = {part: saved[f"{prefix}_{part}"] for part in parts}
    return Projection(scaling=scaling, merge_aware=options.merge_aware, **of_weight)


def moe_lora(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor,
    gate_up_codes: Tensor, gate_up_scales: Tensor, gate_up_global_scale: Tensor,
    down_codes: Tensor, down_scales: Tensor, down_global_scale: Tensor,
    gate_up_lora_a: Tensor | None = None, gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None, down_lora_b: Tensor | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    *, gate_up_scaling: float = 1.0, down_scaling: float = 1.0, activation: str = "silu",
    limit: float | None = None, compute: str = "w4a16", merge_aware: bool = False,
    gate_up_input_scale: Tensor | None = None, down_input_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The op's kernel; arguments are checked by the dispatcher's wrapper (see validation.py)."""
    tensors = LayerTensors(
        x, topk_ids, topk_weights,
        gate_up_codes, gate_up_scales, gate_up_global_scale, down_codes, down_scales, down_global_scale,
        gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b, gate_up_bias, down_bias,
        gate_up_input_scale, down_input_scale,
    )  # fmt: skip
    options = LayerOptions(gate_up_scaling, down_scaling, activation, limit, compute, merge_aware)
    if wants_grad("moe_lora", tensors.differentiable):
        return _Layer.apply(options, *tensors)
    return _without_derivative(tensors, options)


def _without_derivative(tensors: LayerTensors, options: LayerOptions) -> Tensor:
    if any(t is not None and t.requires_grad for t in tensors):  # of a global scale, say: it never gets a gradient
        with torch.no_grad():
            return forward(tensors, options).out
    return forward(tensors, options).out
