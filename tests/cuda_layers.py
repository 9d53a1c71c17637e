"""Layers of `strategies.py` on a CUDA device, and what the GPU tests measure them with."""

from collections.abc import Callable
from typing import Any

import torch
from strategies import Layer
from torch import Tensor

DEVICE = "cuda"


def to_cuda(tensor: Tensor | None, device: str = DEVICE) -> Tensor | None:
    """The tensor on the device under the same strides, with the whole of its storage around it."""
    if tensor is None:
        return None
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return torch.as_strided(storage.to(device), tensor.shape, tensor.stride(), tensor.storage_offset())


def on_cuda(layer: Layer, device: str = DEVICE) -> Layer:
    return Layer({name: to_cuda(t, device) for name, t in layer.tensors.items()}, layer.options)


def run(layer: Layer, grad: Tensor) -> dict[str, Tensor]:
    """The output and every gradient by name."""
    fresh = layer.requires_grad()
    out = fresh.run()
    leaves = fresh.differentiable
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"output": out.detach(), **dict(zip(leaves, grads, strict=True))}


def random_grad(layer: Layer, seed: int = 0) -> Tensor:
    shape = (layer.x.shape[0], layer.down_codes.shape[1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(layer.x.dtype).to(layer.x.device)


def without_sync(function: Callable[[], Any]) -> Any:
    """Run with an error wherever the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
