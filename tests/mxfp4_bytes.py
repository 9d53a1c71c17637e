"""Experts whose block scales are the outermost that MXFP4 has, and what the products of them must be."""

from typing import Any

import torch
from torch import Tensor

from torch_nvfp4.format import decode
from torch_nvfp4.ops import cpu

EDGES = (0, 1, 254, 255)
"""The scale byte of each expert: 2^-127 and 2^-126, 2^127, NaN."""
ROWS, N, C = 5, 32, 64


def edge_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and global scale of one expert for each byte; none of its values overflows."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (len(EDGES), N, C), generator=generator, dtype=torch.uint8)
    codes[2] &= 0b1011  # magnitudes of 0 to 1.5, since 2 · 2^127 is infinite
    scales = torch.tensor(EDGES, dtype=torch.uint8).view(-1, 1, 1).repeat(1, N, C // 32)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed, scales.view(torch.float8_e8m0fnu), torch.ones(len(EDGES), 1)


def edge_rows(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows for each expert, of a size that brings its products near 1, and the experts' end rows."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([2.0 ** (127 - max(byte, 1)) if byte < 255 else 1.0 for byte in EDGES]).repeat_interleave(ROWS)
    sizes = sizes.clamp(2.0**-120, 2.0**120)
    x = torch.randn(ROWS * len(EDGES), width, generator=generator) * sizes.unsqueeze(-1)
    offsets = torch.arange(1, len(EDGES) + 1, dtype=torch.int32) * ROWS
    return x.to(dtype), offsets


def check_products(ops: Any, dtype: torch.dtype) -> None:
    """`grouped_lora_linear` and `grouped_lora_dgrad` of `ops` against fp64, expert by expert; NaN under a NaN scale."""
    weight = edge_weights()
    dense = decode(*weight[:2], torch.float64)
    assert bool(dense[:3].isfinite().all()) and bool(dense[3].isnan().all())
    for op, width, factor in (("grouped_lora_linear", C, dense.mT), ("grouped_lora_dgrad", N, dense)):
        x, offsets = edge_rows(width, dtype)
        got = getattr(ops, op)(x, None, offsets, *weight)[0]
        for e, byte in enumerate(EDGES):
            rows = slice(e * ROWS, (e + 1) * ROWS)
            wanted = x[rows].double() @ factor[e]
            if byte == 255:
                assert bool(got[rows].isnan().all()), (op, byte)
            else:
                error = (got[rows].double() - wanted).norm() / wanted.norm()
                assert error < 4 * torch.finfo(dtype).eps, (op, byte, float(error))


def check_every_scale(ops: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """As `check_products`, one expert for each of the 256 scale bytes, against the CPU kernels; NaN and infinite alike.

    Rows are as large as brings the products near 1, as far as `dtype` has such numbers.
    """
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (256, N, C // 2), generator=generator, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1).repeat(1, N, C // 32).view(torch.float8_e8m0fnu)
    weight = codes, scales, torch.ones(256, 1)
    offsets = torch.arange(1, 257, dtype=torch.int32) * ROWS
    number = torch.finfo(dtype)
    sizes = (2.0 ** (127 - torch.arange(256.0, dtype=torch.float64))).clamp(number.smallest_normal, number.max / 8)
    for op, width in (("grouped_lora_linear", C), ("grouped_lora_dgrad", N)):
        x = torch.randn(256, ROWS, width, generator=generator, dtype=torch.float64) * sizes.view(-1, 1, 1)
        x = x.flatten(0, 1).to(dtype)
        arguments = x, None, offsets, *weight
        wanted = getattr(cpu, op)(*arguments)[0].view(256, ROWS, -1)
        on_device = (None if a is None else a.to(device) for a in arguments)
        got = getattr(ops, op)(*on_device)[0].cpu().view(256, ROWS, -1)
        for byte in range(256):
            finite = wanted[byte].isfinite()
            assert torch.equal(got[byte].isfinite(), finite), (op, byte)
            assert torch.equal(got[byte].isnan(), wanted[byte].isnan()), (op, byte)
            right = wanted[byte].double()[finite]
            room = 2 * number.eps * right.norm() + number.smallest_normal * number.eps * right.numel() ** 0.5
            assert (got[byte].double()[finite] - right).norm() <= room, (op, byte)
        near_one = wanted[103:142]
        assert bool(near_one.isfinite().all()) and bool((near_one != 0).any(-1).all())
        assert bool(wanted[255].isnan().all())
