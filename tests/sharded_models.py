"""What the tests of distributed training run on every rank: tiny models, their batches, the truth of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_models import make_model, randomize_adapters
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_nvfp4 import lora
from torch_nvfp4.hf import quantize_experts
from torch_nvfp4.nn import NVFP4Experts

PACKED = ("codes", "scales", "global_scale")
SEQUENCES = 4
FP32_SUMS = 4e-6
"""Of the largest value: what sums in another order may differ by, on any CPU; 1.4e-6 was seen."""


class Block(nn.Module):
    """A layer whose routing is given, residual added."""

    def __init__(self, experts: NVFP4Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return x + self.experts(x, topk_ids, topk_weights)


class Stack(nn.Module):
    """Two blocks of E packed experts (H = 32, I = 16) with trained-looking adapters."""

    def __init__(self, num_experts: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(num_experts)
        self.layers = nn.ModuleList()
        for _ in range(2):
            gate_up = torch.randn(num_experts, 32, 32, generator=generator)
            down = torch.randn(num_experts, 32, 16, generator=generator)
            self.layers.append(Block(NVFP4Experts.from_dense(gate_up * 0.2, down * 0.2)))
        lora.add_lora(self, r=3, targets=("experts",), dtype=dtype)
        randomize_adapters(self)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, topk_ids, topk_weights)
        return x


def routed(counts: list[int], num_experts: int, *, idle: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A batch for each rank: x `[T, 32]`, ids `[T, 2]` (some -1) that leave the last `idle` experts out, weights."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for count in counts:
        ids = torch.randint(-1, num_experts - idle, (count, 2), generator=generator)
        weights = torch.rand(count, 2, generator=generator)
        batches.append((torch.randn(count, 32, generator=generator), ids, weights))
    return batches


def language_model(adapters: str = "own", architecture: str = "qwen3_moe", **changes: Any) -> nn.Module:
    """A tiny packed model of transformers, with adapters of `add_lora` ("own") or of PEFT, neither of them zero."""
    model: nn.Module = quantize_experts(make_model(architecture, **changes))
    model.train()
    if adapters == "own":
        lora.add_lora(model, r=3, targets=("experts", "q_proj", "o_proj"))
    else:
        parameters = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(r=3, target_modules=["q_proj", "o_proj"], target_parameters=parameters)
        model = get_peft_model(model, config)
    randomize_adapters(model)
    return model


def sequences() -> Tensor:
    return torch.randint(3, 48, (SEQUENCES, 12), generator=torch.Generator().manual_seed(5))


def of_rank(batch: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def language_loss(model: Callable[..., Any], ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_name(name: str) -> str:
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def assert_same_model(
    found: nn.Module, expected: nn.Module, *, tolerance: float = FP32_SUMS, grads: bool = True
) -> None:
    """Frozen parameters by their bytes; trained ones and their gradients to a share of the largest value."""
    of_expected = dict(expected.named_parameters())
    names = [plain_name(name) for name, _ in found.named_parameters()]
    assert names == list(of_expected), "the parameters have other names"
    for name, parameter in zip(names, found.parameters(), strict=True):
        truth = of_expected[name]
        value = whole(parameter.detach())
        assert value.dtype == truth.dtype and value.shape == truth.shape, name
        if not truth.requires_grad:
            assert torch.equal(value.view(torch.uint8), truth.detach().view(torch.uint8)), name
            assert parameter.grad is None, name
            continue
        close(value, truth.detach(), tolerance, name)
        if grads:
            assert (parameter.grad is None) == (truth.grad is None), name
            if truth.grad is not None:
                close(whole(parameter.grad), truth.grad, tolerance, f"gradient of {name}")


def assert_stamped_without_base(found: Path, one: Path) -> None:
    """No rank has the whole of the weights that an adapter is trained on, and a part has another digest."""
    ours, theirs = (json.loads((path / "adapter_config.json").read_text())["torch_nvfp4"] for path in (found, one))
    assert theirs.pop("base") and ours == theirs and ours["merge_aware"]


def close(found: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    assert found.shape == expected.shape, name
    worst = (found - expected).abs().max().item() if found.numel() else 0.0
    scale = expected.abs().max().item() if found.numel() else 0.0
    assert worst <= tolerance * scale, f"{name}: off by {worst}, largest {scale}"
