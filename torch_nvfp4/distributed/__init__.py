"""Packed models on several devices, with PyTorch's own engines."""

from .shard import shard_layers

__all__ = ["shard_layers"]
