"""Gradients of a model whose experts are split: averaged without a wrapper, clipped by their norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .experts import ParallelExperts, _ep_dim, expert_parameters


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average gradients over the ranks that hold the same parameter, in place; for models that no wrapper reduces.

    What all ranks hold (router, attention, their adapters) over every dim of `mesh`, experts over every dim but the ep
    one. A parameter that trains and has no gradient on this rank gets zeros first, as another rank may have one.
    """
    experts = set(map(id, expert_parameters(model).values()))
    replicated: list[Tensor] = []
    split: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            (split if id(parameter) in experts else replicated).append(parameter.grad)
    ep = _ep_dim(mesh)
    dims = [mesh] if mesh.ndim == 1 else [mesh[name] for name in mesh.mesh_dim_names or ()]
    for dim in dims:
        _average(replicated, dim)
        if dim.mesh_dim_names != ep.mesh_dim_names:
            _average(split, dim)


def _average(grads: list[Tensor], dim: DeviceMesh) -> None:
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = _flatten_dense_tensors(same)
        dist.all_reduce(flat, group=dim.get_group())
        flat /= dim.size()
        for grad, whole in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
            grad.copy_(whole)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all experts of all ranks is `max_norm` at most; returns the norm.

    Every rank finds the same norm and scales by the same factor, which `torch.nn.utils.clip_grad_norm_` would not do:
    it knows this rank's experts alone. Gradients must be reduced before. Sharded ones (DTensor) are taken whole.
    ValueError for a model whose experts are not split.
    """
    layers = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    if not layers:
        raise ValueError("the model has no split experts (parallelize_experts)")
    experts = expert_parameters(model)
    names, device = {id(parameter) for parameter in experts.values()}, layers[0].lost.device
    of_experts = _norm(experts.values(), device).square()
    dist.all_reduce(of_experts, group=layers[0].share.group)
    rest = _norm((parameter for parameter in model.parameters() if id(parameter) not in names), device)
    total = (of_experts + rest.square()).sqrt()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.mul_(factor.to(local.dtype))
    return total


def _norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=device)
    norm = torch.nn.utils.get_total_norm(grads)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(device, torch.float32)
