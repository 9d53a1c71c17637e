"""What the tests of expert parallelism run on every rank: a layer with a router of its own, and how results compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_models import close, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_nvfp4 import lora
from torch_nvfp4.distributed import experts_modules, parallelize_experts
from torch_nvfp4.nn import NVFP4Experts

HIDDEN = 32


class RoutedBlock(nn.Module):
    """Router, experts, a shared expert and the residual, as a model has them; the router trains."""

    def __init__(self, num_experts: int, top_k: int, generator: torch.Generator, idle: int) -> None:
        super().__init__()
        self.top_k, self.idle = top_k, idle
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.shared = nn.Linear(HIDDEN, HIDDEN, bias=False)
        for linear in (self.router, self.shared):
            nn.init.normal_(linear.weight, std=0.3, generator=generator)
        gate_up = torch.randn(num_experts, 32, HIDDEN, generator=generator)
        down = torch.randn(num_experts, HIDDEN, 16, generator=generator)
        biases = torch.randn(2, num_experts, HIDDEN, generator=generator) * 0.1
        self.experts = NVFP4Experts.from_dense(gate_up * 0.2, down * 0.2, gate_up_bias=biases[0], down_bias=biases[1])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.idle:  # experts that no token chooses
            scores = torch.cat([scores[:, : -self.idle], scores[:, -self.idle :] - 1e4], 1)
        weights, ids = scores.softmax(-1).topk(self.top_k, -1)
        ids = torch.where(weights < 0.12, -1, ids)
        return x + F.silu(self.shared(x)) + self.experts(x, ids, weights)


class RoutedStack(nn.Module):
    """Two blocks with trained-looking adapters on their experts; router and shared experts train themselves."""

    def __init__(self, num_experts: int = 8, top_k: int = 3, idle: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        blocks = [RoutedBlock(num_experts, top_k, generator, idle) for _ in range(2)]
        self.layers = nn.ModuleList(blocks)
        lora.add_lora(self, r=3, targets=("experts",))
        for name, parameter in self.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1, generator=generator)
            elif parameter.is_floating_point() and "bias" not in name:
                parameter.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batches(counts: Sequence[int]) -> list[Tensor]:
    """x `[T, H]` of each rank."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(count, HIDDEN, generator=generator).requires_grad_() for count in counts]


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum() + y.sin().sum()


def mesh_of(*sizes: int, names: tuple[str, ...] = ("ep",)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def one_process(counts: Sequence[int], micro_batches: int = 1, **stack: Any) -> tuple[RoutedStack, list[Tensor]]:
    """The whole model after the mean of all ranks' losses, and each rank's batch with its gradient."""
    model, xs = RoutedStack(**stack), batches(counts)
    for _ in range(micro_batches):
        (sum((loss_of(model(x)) for x in xs), torch.zeros(())) / len(counts)).backward()
    return model, xs


def assert_same(model: nn.Module, one: RoutedStack, ep: DeviceMesh, tolerance: float = 1e-6) -> None:
    """Parameters' gradients, whole, are those of one process: experts their share, all others all of it."""
    truths = dict(one.named_parameters())
    inside = tuple(experts_modules(model))
    for name, parameter in model.named_parameters():
        truth = truths[name.replace("_orig_mod.", "")]
        assert parameter.requires_grad == truth.requires_grad, name
        if truth.grad is None:
            assert parameter.grad is None, name
            continue
        expected = truth.grad
        if name.startswith(inside):
            expected = expected.chunk(ep.size())[ep.get_local_rank()]
        found = whole(parameter.grad)
        close_to(found, expected, truth.grad, tolerance, name)


def close_to(found: Tensor, expected: Tensor, scale: Tensor, tolerance: float, name: str) -> None:
    """Within a share of the largest value of all experts, as a rank's own may have no token."""
    assert found.shape == expected.shape, name
    worst = (found - expected).abs().max().item()
    assert worst <= tolerance * scale.abs().max().item(), f"{name}: off by {worst}, largest {scale.abs().max().item()}"


def my_rank() -> int:
    return dist.get_rank()


__all__ = [
    "RoutedStack", "assert_same", "batches", "close", "close_to", "loss_of", "mesh_of", "my_rank", "one_process",
    "parallelize_experts",
]  # fmt: skip
