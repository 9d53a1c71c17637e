"""One MoE layer as a model has it: router, experts, residual, norm. A function of plain tensors, for compiling."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from strategies import make_layer
from torch import Tensor


def moe_block(top_k: int, options: dict[str, Any]) -> Callable[..., Tensor]:
    def block(residual: Tensor, x: Tensor, router: Tensor, *weights: Tensor | None) -> Tensor:
        probabilities = torch.softmax((x @ router.t()).float(), -1)
        topk_weights, topk_ids = probabilities.topk(top_k, -1)
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        out = torch.ops.nvfp4.moe_lora(x, topk_ids, topk_weights, *weights, **options)
        return F.rms_norm(residual + out, (x.shape[1],), eps=1e-6)

    return block


def block_and_inputs(**sizes: Any) -> tuple[Callable[..., Tensor], list[Tensor | None]]:
    """The block and its inputs, those of `make_layer`; residual, x, router, router weights and LoRA take gradients."""
    layer = make_layer(**sizes).requires_grad()
    (t, h), (_, k), e = layer.x.shape, layer.topk_ids.shape, layer.gate_up_codes.shape[0]
    generator = torch.Generator().manual_seed(1)
    router = (torch.randn(e, h, generator=generator) / h**0.5).to(layer.x.dtype).requires_grad_()
    residual = torch.randn(t, h, generator=generator).to(layer.x.dtype).requires_grad_()
    return moe_block(k, layer.options), [residual, layer.x, router, *layer.args[3:]]
