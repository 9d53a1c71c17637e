"""The only door to Inductor's internals: what the lowerings use of them, and where torch versions differ.

A name that moves in a new torch is mended here. Importing this imports Inductor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.ir import IRNode, Pointwise, ReinterpretView, TensorBox
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

__all__ = [
    "FloorDiv",
    "ModularIndexing",
    "Pointwise",
    "TensorBox",
    "byte_loader",
    "is_known_to_be",
    "ops",
    "register_lowering",
]

Loader = Callable[[Sequence[Any]], Any]
"""From an index expression for each dim to the element there."""


def is_known_to_be(size: Any, value: int) -> bool:
    """Whether a size, symbolic or not, equals `value` without adding a guard to find out."""
    return bool(V.graph.sizevars.statically_known_equals(size, value))


def byte_loader(x: TensorBox) -> Loader:
    """A loader of the bytes (uint8) of a tensor with a one-byte dtype, of whatever layout.

    No kernel then has a float8 argument: Triton refuses e4m3 below sm_89, and the C++ backend does not know
    e8m0. A uint8 tensor viewed as float8 is read as what it is; storage that is float8 itself is viewed as
    uint8 (an alias, nothing is copied) by the code around the kernel.
    """
    as_bytes = lowerings[torch.ops.aten.view.dtype](x, torch.uint8)
    if not _stored_as(as_bytes.data, torch.uint8):
        as_bytes = fallback_handler(torch.ops.aten.view.dtype, add_to_fallback_set=False)(x, torch.uint8)
    return as_bytes.make_loader()


def _stored_as(node: IRNode, dtype: torch.dtype) -> bool:
    return isinstance(node, ReinterpretView) and node.data.get_dtype() == dtype
