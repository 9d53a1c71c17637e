"""Packed models on several devices, with PyTorch's own engines."""

from . import tensor as _tensor  # noqa: F401  (registers the sharding rules)
from .adapters import whole_adapters
from .experts import ParallelExperts, expert_parameters, experts_modules, parallelize_experts
from .gradients import average_gradients, clip_gradients
from .shard import shard_layers

__all__ = [
    "ParallelExperts",
    "average_gradients",
    "clip_gradients",
    "expert_parameters",
    "experts_modules",
    "parallelize_experts",
    "shard_layers",
    "whole_adapters",
]
