"""Adapters of split experts, whole: for saving and loading them as one process would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._lora.sharded import copy_whole, to_shards, whole
from ..nn import PROJECTIONS
from .experts import ParallelExperts, peft_wrappers


@contextmanager
def whole_adapters(model: nn.Module) -> Iterator[None]:
    """Within it, every rank holds the LoRA factors of all E experts, so that savers write what one process would:

        with whole_adapters(model):
            if torch.distributed.get_rank() == 0:
                save_adapter(model, folder)  # or PEFT's save_pretrained
        with whole_adapters(model):
            load_adapter(model, folder)  # on every rank

    Factors that FSDP2 shards are whole in it too, those of other layers included. All ranks must enter it. Afterwards
    each has its own again, the same tensors, with the values that the whole ones had at the end (as they were before,
    after an exception). Outside it, a saver sees this rank's experts alone. A forward within it fails, and so does
    `load_state_dict` where FSDP2 shards.

    ValueError for a model whose experts are not split.
    """
    layers = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    if not layers:
        raise ValueError("the model has no split experts (parallelize_experts)")
    to_shards(model)
    wrappers = list(peft_wrappers(model))
    held = list(_factors(model, layers, wrappers))
    sizes: list[tuple[Any, int]] = [(module, module.num_experts) for module in (*layers, *wrappers)]
    try:
        with torch.no_grad():
            for factor in held:
                factor.gather()
        for module, experts in sizes:
            base = module if isinstance(module, ParallelExperts) else module.get_base_layer()
            module.num_experts = experts * base.share.ranks
        yield
        with torch.no_grad():
            for factor in held:
                factor.take_over()
    finally:
        for factor in held:
            factor.put_back()
        for module, experts in sizes:
            module.num_experts = experts


def expert_factors(model: nn.Module) -> dict[str, Any]:
    """Name -> share of the own LoRA factors of split experts, whose leading dim is this rank's experts."""
    return {
        f"{name}.{leaf}" if name else leaf: module.share
        for name, module in model.named_modules()
        if isinstance(module, ParallelExperts)
        for leaf in _own_factors(module)
    }


def gathered(mine: Tensor, share: Any, dim: int = 0) -> Tensor:
    """All ranks' parts, experts in order: slowest in dim 0, or fastest in dim 1 as in PEFT's B `[N, R*E]`."""
    stacked = mine.unflatten(1, (-1, share.experts)).movedim(2, 0).contiguous() if dim else mine.contiguous()
    parts = [torch.empty_like(stacked) for _ in range(share.ranks)]
    dist.all_gather(parts, stacked, group=share.group)
    everything = torch.cat(parts)
    return everything.movedim(0, 2).flatten(1).contiguous() if dim else everything


def part_of(everything: Tensor, share: Any, dim: int = 0) -> Tensor:
    """This rank's part of what `gathered` makes."""
    if dim:
        by_expert = everything.unflatten(1, (-1, share.experts * share.ranks))
        return by_expert[..., share.first : share.first + share.experts].flatten(1)
    rows = everything.shape[0] // share.ranks
    return everything[share.rank * rows : (share.rank + 1) * rows]


@dataclass
class _Factor:
    """A parameter of a module. share: None where all ranks hold the same experts, or the layer has none."""

    module: nn.Module
    leaf: str
    share: Any = None
    dim: int = 0

    def __post_init__(self) -> None:
        self._own: Any = self.module._parameters[self.leaf]
        self._whole: Any = None

    def gather(self) -> None:
        value = whole(self._own.detach())
        if self.share is not None:
            value = gathered(value, self.share, self.dim)
        self._whole = self.module._parameters[self.leaf] = nn.Parameter(value, self._own.requires_grad)

    def take_over(self) -> None:
        value = self._whole.detach()
        copy_whole(self._own, value if self.share is None else part_of(value, self.share, self.dim))

    def put_back(self) -> None:
        self.module._parameters[self.leaf] = self._own


def _own_factors(layer: ParallelExperts) -> Iterator[str]:
    for projection in PROJECTIONS:
        for part in ("lora_a", "lora_b"):
            if getattr(layer, f"{projection}_{part}") is not None:
                yield f"{projection}_{part}"


def _factors(model: nn.Module, layers: list[ParallelExperts], wrappers: list[Any]) -> Iterator[_Factor]:
    """Those of experts, and everything else that trains and is sharded."""
    inside: set[int] = set()
    for layer in layers:
        inside.add(id(layer))
        yield from (_Factor(layer, leaf, layer.share) for leaf in _own_factors(layer))
    for wrapper in wrappers:
        share = wrapper.get_base_layer().share
        for name, a in wrapper.lora_A.items():
            b = wrapper.lora_B[name]
            inside |= {id(a), id(b)}
            yield _Factor(a, "weight", share)
            yield _Factor(b, "weight", share, 1)
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(module) not in inside and parameter.requires_grad and hasattr(parameter, "full_tensor"):
                yield _Factor(module, leaf)
