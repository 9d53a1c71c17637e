"""The same layer in public torch: the baselines, and the float64 reference that every row's results are held to."""

from typing import Any

import torch
import torch.nn.functional as F
from moe_cases import BF16, Inputs
from torch import Tensor


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """e2m1 by moving its bits to the top of an fp16."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int16)
    values = (((nibbles & 7) << 9) | ((nibbles & 8) << 12)).view(torch.float16).float() * 16384.0
    rows = global_scale.repeat_interleave(codes.shape[1] // global_scale.shape[1], 1)
    e, n, blocks = scales.shape
    scale = (scales.float() * rows[..., None]).unsqueeze(-1)
    return (values.view(e, n, blocks, 16) * scale).view(e, n, -1).to(BF16)


def resident_layer(
    x: Tensor, ids: Tensor, weights: Tensor, factors: list[Tensor], gate_up: Tensor, down: Tensor
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
    gate, up = pre.chunk(2, -1)
    h = (F.silu(gate) * up * weights.flatten()[order, None]).to(BF16)
    y = project(h, down, *factors[2:])
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    return y[inverse].view(*ids.shape, -1).sum(1)


def packed_layer(x: Tensor, ids: Tensor, weights: Tensor, factors: list[Tensor], gate_up: Any, down: Any) -> Tensor:
    return resident_layer(x, ids, weights, factors, dequantize(*gate_up), dequantize(*down))


def reference(inputs: Inputs, *, weights_in_bf16: bool) -> list[Tensor]:
    """Output and gradients (in the order of `RESULTS`) in float64, an expert at a time, each with its backward.

    The weights are the exact values of the packed ones, or those rounded to bf16: what a resident layer holds.
    """
    x, grad, router = (t.detach().double() for t in (inputs.x, inputs.grad, inputs.weights))
    out, gx, grouter = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(router)
    gfactors = [torch.zeros_like(factor) for factor in inputs.factors]
    for e in range(inputs.case.e):
        tokens, slots = (inputs.ids == e).nonzero(as_tuple=True)
        w1, w2 = (_dense(packed, e, weights_in_bf16) for packed in (inputs.gate_up, inputs.down))
        leaves = [x[tokens], router[tokens, slots], *(f[e].detach().double() for f in inputs.factors)]
        rows, weight, a1, b1, a2, b2 = (leaf.requires_grad_() for leaf in leaves)
        gate, up = (rows @ w1.t() + (rows @ a1.t()) @ b1.t()).chunk(2, -1)
        h = F.silu(gate) * up * weight[:, None]
        y = h @ w2.t() + (h @ a2.t()) @ b2.t()
        grads = torch.autograd.grad(y, leaves, grad[tokens])
        out.index_add_(0, tokens, y.detach())
        gx.index_add_(0, tokens, grads[0])
        grouter[tokens, slots] = grads[1]
        for total, part in zip(gfactors, grads[2:], strict=True):
            total[e] = part
    return [t.float() for t in (out, gx, grouter, *gfactors)]


def _dense(packed: tuple[Tensor, Tensor, Tensor], e: int, in_bf16: bool) -> Tensor:
    codes, scales, global_scale = (part[e : e + 1] for part in packed)
    dtype = BF16 if in_bf16 else torch.float32
    return torch.ops.nvfp4.dequantize(codes, scales, global_scale, dtype=dtype)[0].double()
