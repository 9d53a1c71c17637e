"""Comparing packed tensors bit by bit."""

from pathlib import Path

import torch
from torch import Tensor

from torch_nvfp4.format import quantize

DOCS = Path(__file__).parent.parent / "docs" / "format.md"


def bits(x: Tensor) -> Tensor:
    """x as integers, so that NaN and the sign of zero count."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(*pairs: tuple[Tensor, Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in pairs)


def same_packed(x: Tensor, y: Tensor, format: str = "nvfp4") -> bool:
    return same_bits(*zip(quantize(x, format=format), quantize(y, format=format), strict=True))
