"""A toy model for adapter tests: two layers of a linear and packed (or dense) experts; no transformers."""

import torch
from torch import Tensor, nn

from torch_nvfp4.lora import (
    add_lora,
)
from torch_nvfp4.nn import NVFP4Experts, NVFP4Linear

HIDDEN, INTER = 32, 16  # 2I = H


class DenseExperts(nn.Module):
    """Weights alone, in transformers' layout: what PEFT's target_parameters need."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * INTER, HIDDEN) / HIDDEN**0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, HIDDEN, INTER) / INTER**0.5)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, q_proj: nn.Module) -> None:
        super().__init__()
        self.q_proj = q_proj
        self.mlp = nn.Module()
        self.mlp.experts = experts


class Toy(nn.Module):
    """`layers.{i}.q_proj` and `layers.{i}.mlp.experts`; every token goes to experts t and t + 1 (mod E)."""

    def __init__(self, num_experts: int = 3, *, dense: bool = False, packed_linear: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.layers = nn.ModuleList()
        for _ in range(2):
            experts: nn.Module = DenseExperts(num_experts)
            if not dense:
                experts = NVFP4Experts.from_dense(experts.gate_up_proj, experts.down_proj)
            linear = nn.Linear(HIDDEN, HIDDEN)
            self.layers.append(Layer(experts, NVFP4Linear.from_dense(linear) if packed_linear else linear))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0])
        ids = torch.stack([tokens, tokens + 1], 1) % self.num_experts
        weights = torch.full(ids.shape, 0.5, dtype=x.dtype)
        for layer in self.layers:
            x = x + layer.mlp.experts(torch.tanh(layer.q_proj(x)), ids, weights)
        return x


def trained(model: nn.Module, **options: object) -> nn.Module:
    """The model with adapters as after training: no factor is zero."""
    add_lora(model, **({"r": 4, "alpha": 8, "targets": ("experts", "q_proj")} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


def delta(experts: nn.Module, projection: str) -> Tensor:
    a, b = getattr(experts, f"{projection}_lora_a"), getattr(experts, f"{projection}_lora_b")
    return (getattr(experts, f"{projection}_scaling") * (b @ a)).detach()
