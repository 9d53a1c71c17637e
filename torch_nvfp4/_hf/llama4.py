"""Llama 4's Mixture-of-Experts block on packed experts.

Stock code runs every expert on every token, with the inputs of those that are not routed multiplied by zero. Here only
the routed ones run: the weight multiplies the input, as there, and the weights that the op applies to outputs are 1.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe


class PackedLlama4TextMoe(Llama4TextMoe):
    """The stock block with another forward: same modules, same parameters, same results."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """`[..., H]` -> `[T, H]`, and the router's logits `[T, E]`."""
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, router_logits = self.router(x)  # [T, E]: a sigmoid where routed, else 0
        weights, topk_ids = scores.topk(self.top_k, dim=1)
        # A slot each, so that K weights may scale one token's input differently.
        weighted = (x.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)
        slots = topk_ids.reshape(-1, 1)
        ones = torch.ones(slots.shape, dtype=x.dtype, device=x.device)
        routed = self.experts(weighted, slots, ones).unflatten(0, (-1, self.top_k)).sum(dim=1)
        return self.shared_expert(x) + routed, router_logits


def switch(moe: nn.Module) -> None:
    """Have a stock block run packed experts; the object stays the same, so that whatever refers to it does too."""
    moe.__class__ = PackedLlama4TextMoe


def switch_back(moe: nn.Module) -> None:
    moe.__class__ = Llama4TextMoe
