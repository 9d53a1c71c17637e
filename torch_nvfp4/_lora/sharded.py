"""Adapters whose factors are spread over several devices (FSDP2, DTensor). Nothing here imports torch.distributed."""

import sys
from typing import Any

import torch
from torch import Tensor, nn


def has_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a part of the model."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 or DTensor holds parameters of the model; FSDP2 puts those back that are taken off a module."""
    return has_fsdp(model) or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def refuse_new(model: nn.Module) -> None:
    """ValueError where FSDP2 would not see a new adapter."""
    if has_fsdp(model):
        raise ValueError("the model is sharded (fully_shard): put the adapters on it before that")


def to_shards(model: nn.Module) -> None:
    """Put the shards back that train, where FSDP2 left what a forward gathered: a copy, maybe in a lower precision."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, for which all its ranks must ask; any other tensor as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    sharded: Any = tensor
    device = sharded.device_mesh.device_type
    if sharded.device.type != device:  # FSDP2's CPU offload: collectives are the GPUs'
        sharded = sharded.to(device)
    everything: Tensor = sharded.full_tensor()
    return everything.to(tensor.device)


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, which every rank has, into a tensor that may be a DTensor; without communication."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = target
        value = distribute_tensor(
            value.to(sharded.to_local().device, target.dtype),
            sharded.device_mesh,
            sharded.placements,
            src_data_rank=None,
        )
    target.copy_(value)


def refuse_share(model: nn.Module) -> None:
    """ValueError where the process holds a share of the experts: their adapters would be written as if whole."""
    if any(getattr(module, "holds_a_share", False) for module in model.modules()):
        raise ValueError(
            "the experts are split over ranks, and this one has its share of their adapters: save within "
            "torch_nvfp4.distributed.whole_adapters(model)"
        )


def writes(model: nn.Module) -> bool:
    """Whether this process writes the model's files: rank 0 alone where it is sharded. ValueError as `refuse_share`."""
    refuse_share(model)
    return not is_sharded(model) or torch.distributed.get_rank() == 0
