"""The model of a run of several processes: packed, with its adapters, sharded by FSDP2, each rank holding its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_nvfp4 import hf
from torch_nvfp4.distributed import shard_layers
from torch_nvfp4.train import memory
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, one_line
from torch_nvfp4.train.model import load_model, weights_digest
from torch_nvfp4.train.ranks import Ranks


class Loaded(NamedTuple):
    """digest: `weights_digest` of the model as its files have it. dense_bytes: of the whole model before packing."""

    model: nn.Module
    digest: str
    dense_bytes: int
    was_packed: bool
    layers: list[str]


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
            hf.quantize_experts(model)
        except ValueError as e:
            raise FinetuneError(f"{config.model}: the experts cannot be quantised: {one_line(e)}") from e
    if not memory.expert_bytes(model):
        raise FinetuneError(f"{config.model} has no mixture-of-experts layers: give a model that has")
    torch.manual_seed(config.seed)
    adapt(model)
    layers = shard_layers(model, ranks.mesh)
    for buffer in model.buffers():  # FSDP2 moves those of its own parameters' modules, tied ones it has met
        buffer.data = buffer.data.to(device)
    return Loaded(model, digest, dense_bytes, was_packed, layers)


def _in_parts(config: FinetuneConfig, ranks: Ranks, device: str, adapt: Callable[[nn.Module], None]) -> Loaded:
    from torch_nvfp4.distributed.load import empty_model, load_shards

    try:
        model = empty_model(config.model, dtype=getattr(torch, config.dtype))
        dense_bytes = memory.dense_bytes(model)
        adapt(model)
        layers = shard_layers(model, ranks.mesh)
        load_shards(model, device=device, seed=config.seed)
    except (OSError, ValueError, KeyError) as e:
        raise FinetuneError(f"{config.model}: cannot load the weights in parts ({one_line(e)})") from e
    return Loaded(model, weights_digest(model), dense_bytes, True, layers)
