"""Checkpoints and adapters to merge: a model made of a checkpoint's own weights, under its own names."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torch_nvfp4.checkpoint import Checkpoint, open_checkpoint
from torch_nvfp4.lora import add_lora
from torch_nvfp4.merge import skeleton_of
from torch_nvfp4.nn import PROJECTIONS, NVFP4Experts, NVFP4Linear


def model_of(folder: Path) -> nn.Module:
    """The checkpoint's packed modules with their weights, its other matrices as linear layers."""
    checkpoint = open_checkpoint(folder)
    model = skeleton_of(checkpoint).model
    for path, module in list(model.named_modules()):
        if isinstance(module, NVFP4Experts):
            experts = checkpoint.load_experts(path)
            for projection in PROJECTIONS:
                module._set_packed(projection, *getattr(experts, projection))
        elif isinstance(module, NVFP4Linear):
            module._set_packed(*checkpoint.load_linear(path))
        elif isinstance(module, nn.Linear):
            module.weight = nn.Parameter(checkpoint.load_plain(f"{path}.weight"))
    return model


def adapt(
    model: nn.Module, targets: Iterable[str] = ("experts", "q_proj"), *, size: float = 0.05, seed: int = 0, r: int = 3,
    alpha: float = 6.0, **options: object,
) -> nn.Module:  # fmt: skip
    """Adapters as after training, sized relative to weights of about 1: no factor is zero."""
    torch.manual_seed(seed)
    add_lora(model, r=r, alpha=alpha, targets=tuple(targets), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=1.0 if "lora_a" in name else size)
    return model


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def merged_by_hand(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales `[E, N, ...]` of every adapted packed weight, by the numeric op alone."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, NVFP4Experts):
            for p in PROJECTIONS:
                a, b, scaling = module._factors(p)
                if a is not None:
                    found[f"{path}.{p}"] = torch.ops.nvfp4.merge_lora(*module.packed(p), a, b, scaling)
        elif isinstance(module, NVFP4Linear) and module.lora_a is not None:
            codes, scales, g = module.packed()
            factors = module.lora_a[None], module.lora_b[None]
            found[path] = torch.ops.nvfp4.merge_lora(
                codes[None], scales[None], g.reshape(1, 1), *factors, module.scaling
            )
    return found


def packed_of(checkpoint: Checkpoint) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales of every packed weight, as `merged_by_hand` names them."""
    found = {}
    for path in checkpoint.experts:
        experts = checkpoint.load_experts(path)
        found |= {f"{path}.{p}": getattr(experts, p)[:2] for p in PROJECTIONS}
    for path in checkpoint.linears:
        weight = checkpoint.load_linear(path)
        found[path] = weight.codes[None], weight.scales[None]
    return found
