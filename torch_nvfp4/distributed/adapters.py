"""Adapters of split experts, whole: for saving them as one process would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn import PROJECTIONS
from .experts import ParallelExperts, peft_wrappers


@contextmanager
def whole_adapters(model: nn.Module) -> Iterator[None]:
    """Within it, every rank holds the LoRA factors of all E experts, so that savers write what one process would:

        with whole_adapters(model):
            if torch.distributed.get_rank() == 0:
                save_adapter(model, folder)  # or PEFT's save_pretrained

    All ranks of a group must enter it. Afterwards each has its own factors again, the same tensors. Outside it, a saver
    sees this rank's experts alone. It is for saving: a forward within it fails.

    ValueError for factors that FSDP2 shards (DTensor), and for a model whose experts are not split.
    """
    layers = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    if not layers:
        raise ValueError("the model has no split experts (parallelize_experts)")
    stacked = [(layer.share, p, 0) for layer in layers for p in _own_factors(layer)]
    wrappers = list(peft_wrappers(model))
    for wrapper in wrappers:
        share = wrapper.get_base_layer().share
        for name, a in wrapper.lora_A.items():
            stacked += [(share, a.weight, 0), (share, wrapper.lora_B[name].weight, 1)]
    if any(hasattr(parameter, "full_tensor") for _, parameter, _ in stacked):
        raise ValueError("FSDP2 shards the adapters of split experts: only adapters that are not can be made whole")
    before = [parameter.data for _, parameter, _ in stacked]
    sizes: list[tuple[Any, int]] = [(module, module.num_experts) for module in (*layers, *wrappers)]
    try:
        for share, parameter, dim in stacked:
            parameter.data = _gathered(parameter.data, share, dim)
        for module, experts in sizes:
            base = module if isinstance(module, ParallelExperts) else module.get_base_layer()
            module.num_experts = experts * base.share.ranks
        yield
    finally:
        for (_, parameter, _), data in zip(stacked, before, strict=True):
            parameter.data = data
        for module, experts in sizes:
            module.num_experts = experts


def _own_factors(layer: ParallelExperts) -> Iterator[nn.Parameter]:
    for projection in PROJECTIONS:
        for part in ("lora_a", "lora_b"):
            parameter = getattr(layer, f"{projection}_{part}")
            if parameter is not None:
                yield parameter


def _gathered(mine: Tensor, share: Any, dim: int) -> Tensor:
    """All ranks' parts, experts in order: slowest in dim 0, or fastest in dim 1 as in PEFT's B `[N, R*E]`."""
    stacked = mine.unflatten(1, (-1, share.experts)).movedim(2, 0).contiguous() if dim else mine.contiguous()
    parts = [torch.empty_like(stacked) for _ in range(share.ranks)]
    dist.all_gather(parts, stacked, group=share.group)
    whole = torch.cat(parts)
    return whole.movedim(0, 2).flatten(1).contiguous() if dim else whole
