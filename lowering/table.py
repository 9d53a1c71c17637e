"""Which op has which lowering. Importing this imports Inductor."""

from collections.abc import Callable
from typing import Any

import torch

from . import dequantize
from .compat import register_lowering

LOWERINGS: list[tuple[str, Callable[..., Any]]] = [
    ("dequantize", dequantize.lower),
]


def register_all() -> None:
    """Give Inductor every lowering of the table. They get their tensors as they are, not promoted."""
    for op, lower in LOWERINGS:
        register_lowering(getattr(torch.ops.nvfp4, op).default, type_promotion_kind=None)(lower)
