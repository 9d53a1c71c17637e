"""The model of a run of several processes: packed, with its adapters, each rank holding its part.

Experts are split over ranks (`--ep`), FSDP2 shards what is not or the rest of it (`--fsdp`), or both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_nvfp4 import hf, lora
from torch_nvfp4._lora.sharded import copy_whole
from torch_nvfp4._lora.sites import LoRALinear, Site
from torch_nvfp4.distributed import ParallelExperts, experts_modules, parallelize_experts, shard_layers
from torch_nvfp4.distributed.adapters import part_of
from torch_nvfp4.distributed.shard import _layers
from torch_nvfp4.train import memory
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, one_line
from torch_nvfp4.train.model import check_format, load_model, weights_digest
from torch_nvfp4.train.ranks import Ranks

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


class Loaded(NamedTuple):
    """digest: `weights_digest` of the model as its files have it. dense_bytes: of this rank's part before packing.

    layers: the names of the model's layers, which FSDP2 shards one by one.
    """

    model: nn.Module
    digest: str
    dense_bytes: int
    was_packed: bool
    layers: list[str]


def check_experts(config: FinetuneConfig, description: Any) -> None:
    """Refuse, by what the model's config says, experts that --ep cannot split evenly."""
    text = description.get_text_config()
    experts = next((n for name in _EXPERTS if isinstance(n := getattr(text, name, None), int)), 0)
    if config.ep and experts % config.ep:
        raise FinetuneError(
            f"--ep {config.ep} does not divide the {experts} experts of {config.model}: each process has as many"
        )


def layout(config: FinetuneConfig, count: int) -> str:
    """A line for the user about who holds what."""
    if not config.ep:
        return f"sharded over {config.fsdp} of {count} processes; of each of them:"
    rest = f"sharded over {config.fsdp}, the rest over all {count}" if config.fsdp else "the rest whole in each"
    return f"experts split over {config.ep} of {count} processes, {rest}; of each of them:"


def load_sharded(
    config: FinetuneConfig, description: Any, ranks: Ranks, device: str, adapt: Callable[[nn.Module], None]
) -> Loaded:
    """The packed model in parts.

    A folder that is packed already is read in parts, too. A dense model is packed by each rank on its CPU first.
    adapt: puts on the adapters, before sharding.
    """
    if getattr(description, "quantization_config", None) is not None and Path(config.model).is_dir():
        return _in_parts(config, ranks, device, adapt)
    model = load_model(config, "cpu")
    digest, dense_bytes, was_packed = weights_digest(model), memory.dense_bytes(model), bool(memory.expert_bytes(model))
    if not was_packed:
        try:
            hf.quantize_experts(model, config.format)
        except ValueError as e:
            raise FinetuneError(f"{config.model}: the experts cannot be quantised: {one_line(e)}") from e
    if not memory.expert_bytes(model):
        raise FinetuneError(f"{config.model} has no mixture-of-experts layers: give a model that has")
    expansion = memory.expansion(model, dense_bytes)
    torch.manual_seed(config.seed)
    adapt(model)
    layers = _share_out(config, model, ranks)
    if not config.fsdp:
        model.to(device)
    for buffer in model.buffers():  # FSDP2 moves those of its own parameters' modules, tied ones it has met
        buffer.data = buffer.data.to(device)
    return Loaded(model, digest, memory.unpacked_bytes(model, expansion), was_packed, layers)


def _in_parts(config: FinetuneConfig, ranks: Ranks, device: str, adapt: Callable[[nn.Module], None]) -> Loaded:
    from torch_nvfp4.distributed.load import empty_model, load_shards

    try:
        model = empty_model(config.model, dtype=getattr(torch, config.dtype))
        check_format(config, model)
        expansion = memory.expansion(model, memory.dense_bytes(model))
        adapt(model)
        layers = _share_out(config, model, ranks)
        load_shards(model, device=device)
    except (OSError, ValueError, KeyError) as e:
        raise FinetuneError(f"{config.model}: cannot load the weights in parts ({one_line(e)})") from e
    _start_adapters(config, model)
    return Loaded(model, weights_digest(model), memory.unpacked_bytes(model, expansion), True, layers)


def _share_out(config: FinetuneConfig, model: nn.Module, ranks: Ranks) -> list[str]:
    """Split experts and apply FSDP2, as the flags say; the names of the model's layers."""
    if not ranks.splits_experts:
        return shard_layers(model, ranks.mesh)
    try:
        parallelize_experts(model, ranks.mesh)
    except ValueError as e:
        raise FinetuneError(f"--ep {config.ep}: {one_line(e)}") from e
    if not config.fsdp:
        return [name for name, _ in _layers(model)]
    for module in experts_modules(model).values():
        fully_shard(module, mesh=ranks.mesh["dp"])
    return shard_layers(model, ranks.mesh._flatten("everyone"))


def _start_adapters(config: FinetuneConfig, model: nn.Module) -> None:
    """Adapters begin as those that one process draws on a CPU: wholes, in `add_lora`'s order."""
    torch.manual_seed(config.seed)
    with torch.no_grad():
        for site in lora.chosen_sites(model, config.targets):
            _draw(site)


def _draw(site: Site) -> None:
    assert site.factors is not None
    a = site.factors[0]
    share = site.module.share if isinstance(site.module, ParallelExperts) else None
    start = torch.empty((a.shape[0] * (share.ranks if share else 1), *a.shape[1:]), dtype=a.dtype)
    if isinstance(site.module, LoRALinear):
        nn.init.kaiming_uniform_(start, a=math.sqrt(5))
    else:
        bound = 1 / math.sqrt(a.shape[-1])
        start.uniform_(-bound, bound)
    copy_whole(a, part_of(start, share) if share else start)
