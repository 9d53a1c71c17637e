"""Layers of real models' sizes, made on the GPU, and what their results must be: fp32, an expert at a time."""

from typing import Any

import torch
from strategies import TENSORS, Layer
from torch import Tensor

from torch_nvfp4 import format as formats
from torch_nvfp4.format import get_format
from torch_nvfp4.ops.cpu import activate

QWEN3 = dict(h=2048, i=768, e=128, k=8, r=16)
GPT_OSS = dict(h=2880, i=2880, e=32, k=4, r=16, activation="swiglu_oai", limit=7.0, fmt="mxfp4", bias=True)


def real_layer(
    *, t: int, h: int, i: int, e: int, k: int, r: int, skew: float = 0.0, activation: str = "silu",
    limit: float | None = None, fmt: str = "nvfp4", bias: bool = False,
) -> Layer:  # fmt: skip
    """bf16 activations of order one, fp32 factors. A skewed router draws few experts often and the last ones never."""
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = dict(device="cuda", generator=generator)
    block, scale_dtype = get_format(fmt).block_size, get_format(fmt).scale_dtype
    tensors: dict[str, Tensor | None] = dict.fromkeys(TENSORS)
    tensors["x"] = torch.randn(t, h, **options).bfloat16()
    scores = torch.rand(t, e, **options) - skew * torch.arange(e, device="cuda") / e
    weights, tensors["topk_ids"] = scores.topk(k, 1)
    tensors["topk_weights"] = torch.softmax(weights, 1)
    for name, n, c, halves in (("gate_up", 2 * i, h, 2), ("down", h, i, 1)):
        low, high = (48, 72) if fmt == "nvfp4" else (119, 122)  # values of about one, times a global scale
        scales = torch.randint(low, high, (e, n, c // block), dtype=torch.uint8, **options)
        tensors[f"{name}_codes"] = torch.randint(0, 256, (e, n, c // 2), dtype=torch.uint8, **options)
        tensors[f"{name}_scales"] = scales.view(scale_dtype)
        size = (1 + torch.rand(e, halves, **options)) * 0.2 * c**-0.5
        tensors[f"{name}_global_scale"] = size if fmt == "nvfp4" else torch.ones(e, halves, device="cuda")
        tensors[f"{name}_lora_a"] = torch.randn(e, r, c, **options) * c**-0.5
        tensors[f"{name}_lora_b"] = torch.randn(e, n, r, **options) * 0.1
        if bias:
            tensors[f"{name}_bias"] = torch.randn(e, n, **options) * 0.1
    return Layer(tensors, dict(activation=activation, limit=limit, gate_up_scaling=2.0, down_scaling=0.5))


def reference(layer: Layer, grad: Tensor | None) -> dict[str, Tensor]:
    """The output and, where `grad` is given, every gradient, by name."""
    wanted = {"output": torch.zeros(layer.x.shape[0], layer.down_codes.shape[1], device="cuda")}
    if grad is not None:
        wanted |= {name: torch.zeros(t.shape, device="cuda") for name, t in layer.differentiable.items()}
    per_expert = [name for name in layer.differentiable if name not in ("x", "topk_weights")]
    for e in range(layer.gate_up_codes.shape[0]):
        tokens, slots = (layer.topk_ids == e).nonzero(as_tuple=True)
        leaves = {"x": layer.x[tokens].float(), "topk_weights": layer.topk_weights[tokens, slots]}
        leaves |= {name: layer.tensors[name][e].float() for name in per_expert}
        for leaf in leaves.values():
            leaf.requires_grad_(grad is not None)
        pre = _project(layer, "gate_up", e, leaves["x"], leaves)
        h = activate(pre, layer.options["activation"], layer.options["limit"])
        y = _project(layer, "down", e, h, leaves) * leaves["topk_weights"].unsqueeze(1)
        wanted["output"].index_add_(0, tokens, y.detach())
        if grad is not None and tokens.numel():
            found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad[tokens].float()), strict=True))
            wanted["x"].index_add_(0, tokens, found["x"])
            wanted["topk_weights"][tokens, slots] = found["topk_weights"]
            for name in per_expert:
                wanted[name][e] = found[name]
    return wanted


def _project(layer: Layer, name: str, e: int, x: Tensor, leaves: dict[str, Tensor]) -> Tensor:
    parts = (layer.tensors[f"{name}_{part}"][e : e + 1] for part in ("codes", "scales", "global_scale"))
    y = x @ formats.dequantize(*parts, torch.float32)[0].t()
    delta = x @ leaves[f"{name}_lora_a"].t() @ leaves[f"{name}_lora_b"].t()
    y = y + layer.options[f"{name}_scaling"] * delta
    return y + leaves[f"{name}_bias"] if f"{name}_bias" in leaves else y
