"""The same layer in public torch: the baselines, and the float64 reference that every row's results are held to."""

from typing import Any

import torch
import torch.nn.functional as F
from moe_cases import BF16, Inputs, Kind
from torch import Tensor


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """e2m1 by moving its bits to the top of an fp16."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int16)
    values = (((nibbles & 7) << 9) | ((nibbles & 8) << 12)).view(torch.float16).float() * 16384.0
    rows = global_scale.repeat_interleave(codes.shape[1] // global_scale.shape[1], 1)
    e, n, blocks = scales.shape
    scale = (scales.float() * rows[..., None]).unsqueeze(-1)
    return (values.view(e, n, blocks, -1) * scale).view(e, n, -1).to(BF16)


def activate(pre: Tensor, kind: Kind) -> Tensor:
    """SwiGLU, or gpt-oss's, clamped where there is a limit."""
    gate, up = pre.chunk(2, -1)
    if kind.limit is not None:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    if kind.activation == "swiglu_oai":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return F.silu(gate) * up


def resident_layer(
    x: Tensor, ids: Tensor, weights: Tensor, factors: list[Tensor], gate_up: Tensor, down: Tensor, kind: Kind
) -> Tensor:
    """Route by argsort, grouped matrix products for the base and both LoRA factors, SwiGLU, gather-sum."""
    k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    offsets = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    offsets = offsets.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)

    def project(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = torch._grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
        u = torch._grouped_mm(rows, a.to(BF16).transpose(1, 2), offs=offsets)
        return y + torch._grouped_mm(u, b.to(BF16).transpose(1, 2), offs=offsets)

    pre = project(x[order // k], gate_up, *factors[:2])
    if kind.gate_up_bias is not None:
        pre = (pre + kind.gate_up_bias[flat[order]]).to(BF16)
    router = weights.flatten()[order, None]
    y = project((activate(pre, kind) * router).to(BF16), down, *factors[2:])
    if kind.down_bias is not None:
        y = (y + router * kind.down_bias[flat[order]]).to(BF16)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    return y[inverse].view(*ids.shape, -1).sum(1)


def packed_layer(
    x: Tensor, ids: Tensor, weights: Tensor, factors: list[Tensor], gate_up: Any, down: Any, kind: Kind
) -> Tensor:
    return resident_layer(x, ids, weights, factors, dequantize(*gate_up), dequantize(*down), kind)


def reference(inputs: Inputs, held: str) -> list[Tensor]:
    """Output and gradients (in the order of `RESULTS`) in float64, an expert at a time, each with its backward.

    held: the weights are the exact values of the "packed" ones, those rounded to "bf16" (what a resident layer holds),
    or the "merged" ones, which hold the adapter: then only gradients see it beside them.
    """
    x, grad, router = (t.detach().double() for t in (inputs.x, inputs.grad, inputs.weights))
    out, gx, grouter = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(router)
    gfactors = [torch.zeros_like(factor) for factor in inputs.factors]

    def project(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, e: int) -> Tensor:
        y = rows @ weight.t()
        if held == "merged":
            delta = (rows.detach() @ a.t()) @ b.t()
            y = y + delta - delta.detach()
        else:
            y = y + (rows @ a.t()) @ b.t()
        return y if bias is None else y + bias[e].double()

    for e in range(inputs.case.e):
        tokens, slots = (inputs.ids == e).nonzero(as_tuple=True)
        w1 = _dense(inputs.gate_up, inputs.factors[:2], e, held)
        w2 = _dense(inputs.down, inputs.factors[2:], e, held)
        leaves = [x[tokens], router[tokens, slots], *(f[e].detach().double() for f in inputs.factors)]
        rows, weight, a1, b1, a2, b2 = (leaf.requires_grad_() for leaf in leaves)
        act = activate(project(rows, w1, a1, b1, inputs.kind.gate_up_bias, e), inputs.kind)
        # The weight on the result: it scales product, LoRA and bias alike.
        y = project(act, w2, a2, b2, inputs.kind.down_bias, e) * weight[:, None]
        grads = torch.autograd.grad(y, leaves, grad[tokens])
        out.index_add_(0, tokens, y.detach())
        gx.index_add_(0, tokens, grads[0])
        grouter[tokens, slots] = grads[1]
        for total, part in zip(gfactors, grads[2:], strict=True):
            total[e] = part
    return [t.float() for t in (out, gx, grouter, *gfactors)]


def _dense(packed: tuple[Tensor, Tensor, Tensor], factors: list[Tensor], e: int, held: str) -> Tensor:
    codes, scales, global_scale = (part[e : e + 1] for part in packed)
    if held == "merged":
        a, b = (factor[e : e + 1].detach() for factor in factors)
        codes, scales = torch.ops.nvfp4.merge_lora(codes, scales, global_scale, a, b, 1.0)
    dtype = BF16 if held == "bf16" else torch.float32
    return torch.ops.nvfp4.dequantize(codes, scales, global_scale, dtype=dtype)[0].double()
