"""Which op has which lowering. Importing this imports Inductor."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from . import dequantize, fake_quantize
from .compat import register_lowering

GROUPED = (
    "grouped_lora_linear",
    "glu_grouped_lora_linear",
    "grouped_lora_dgrad",
    "grouped_lora_wgrad",
    "glu_backward",
)
LOWERINGS: list[tuple[str, Callable[..., Any]]] = [
    ("dequantize", dequantize.lower),
    ("fake_quantize", fake_quantize.lower),
]


def register_all() -> None:
    """Give Inductor every lowering of the table. They get their tensors as they are, not promoted."""
    table = list(LOWERINGS)
    if importlib.util.find_spec("triton") is not None:  # else there is no kernel to make templates of
        from . import grouped

        table += [(op, grouped.lowered(op)) for op in GROUPED]
    for op, lower in table:
        register_lowering(getattr(torch.ops.nvfp4, op).default, type_promotion_kind=None)(lower)
