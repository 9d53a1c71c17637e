"""What kernels are measured against: the float64 specification, and a plain low-precision layer for its error.

A tolerance is never written by hand: the plain layer does the same work in the same dtype with torch.mm on dense
weights, and its distance to the float64 result is the yardstick.
"""

import torch
from strategies import Layer
from torch import Tensor

from torch_nvfp4.ops import reference
from torch_nvfp4.ops.cpu import activate

YARDSTICKS = 2.0  # the kernel may be this many times as far from float64 as the plain layer is ...
ROUNDINGS = 1.0  # ... plus this many roundings of the activation dtype, for results the plain layer gets right by luck
SUMS = 4.0  # ... plus this many of float32, since the order in which both sum is not the same


def dense(layer: Layer, name: str) -> Tensor:
    return reference.dense_weight(*(layer.tensors[f"{name}_{p}"] for p in ("codes", "scales", "global_scale")))


def exact(layer: Layer) -> tuple[Tensor, dict[str, Tensor]]:
    """(output, leaves) in float64, the output connected to the leaves."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in layer.differentiable.items()}
    rest = {name: leaves.get(name) for name in layer.tensors if "lora" in name or "bias" in name}
    out = reference.moe_lora(
        leaves["x"], layer.topk_ids, leaves["topk_weights"], dense(layer, "gate_up"), dense(layer, "down"),
        **rest, **layer.options,
    )  # fmt: skip
    return out, leaves


def plain(layer: Layer) -> tuple[Tensor, dict[str, Tensor]]:
    """The same layer on dense weights in x's dtype, one torch.mm per expert and projection; (output, leaves)."""
    dtype = layer.x.dtype
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in layer.differentiable.items()}
    out = torch.zeros(layer.x.shape[0], layer.down_codes.shape[1], dtype=dtype)
    weights = {name: dense(layer, name).to(dtype) for name in ("gate_up", "down")}

    def project(x: Tensor, name: str, e: int) -> Tensor:
        y = x @ weights[name][e].t()
        if f"{name}_lora_a" in leaves:
            scaling = layer.options[f"{name}_scaling"]
            y = y + scaling * (x @ leaves[f"{name}_lora_a"][e].t()) @ leaves[f"{name}_lora_b"][e].t()
        return y + leaves[f"{name}_bias"][e] if f"{name}_bias" in leaves else y

    for e in range(weights["gate_up"].shape[0]):
        tokens, slots = (layer.topk_ids == e).nonzero(as_tuple=True)
        h = activate(project(leaves["x"][tokens], "gate_up", e), layer.options["activation"], layer.options["limit"])
        y = project(h, "down", e) * leaves["topk_weights"][tokens, slots].unsqueeze(-1)
        out = out.index_add(0, tokens, y)
    return out, leaves


def assert_as_close_as_plain(
    name: str, got: Tensor, plain_result: Tensor, exact_result: Tensor, dtype: torch.dtype
) -> None:
    """Compare by Frobenius norm of the difference to the float64 result; `dtype` is the activation's."""
    assert torch.isfinite(got).all(), f"{name} is not finite"
    error = (got.double() - exact_result).norm()
    allowed = YARDSTICKS * (plain_result.double() - exact_result).norm()
    lucky = ROUNDINGS * torch.finfo(dtype).eps + SUMS * torch.finfo(torch.float32).eps
    # The norm of n roundings is itself uncertain, by about 1/sqrt(n): a router gradient may be one value, or a few.
    allowed = (allowed + lucky * exact_result.norm()) * (1 + 4 / max(exact_result.numel(), 1) ** 0.5)
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} (norm {exact_result.norm():.3e})"
