"""The merged weight Q(W + scaling · b a): what merging writes, and what a merge-aware forward multiplies with.

Every step is one fp32 rounding in a fixed order, so that every device gives the same bytes: the factors are rounded to
bf16, those below 2^-63 to 0 and those from 2^64 on to infinity, so that fp32 holds each product exactly and a fused sum
is no other; products are summed from r = 0 on; then comes the scaling, then the sum with W.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..format import NVFP4, dequantize, format_of, quantize

SMALLEST_FACTOR, FACTOR_LIMIT = 2.0**-63, 2.0**64
_CHUNK_ELEMENTS = 1 << 22


def merge_lora(
    codes: Tensor, scales: Tensor, global_scale: Tensor, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Codes `[E, N, C/2]` and scales `[E, N, C/B]` of W + scaling · b a, on W's own global scale `[E, S]`.

    a `[E, R, C]` and b `[E, N, R]` of any float dtype. Block scales are fresh, but a block whose deltas are all 0 keeps
    its bytes. A block with a value that is not finite gets a NaN scale and codes 0.
    """
    fmt = format_of(scales.dtype)
    out_codes = codes.clone(memory_format=torch.contiguous_format)
    out_scales = scales.clone(memory_format=torch.contiguous_format)
    for e, rows in _chunks(codes):
        half = global_scale[e, 0 if rows.start < codes.shape[1] // 2 else -1]
        part = codes[e, rows], scales[e, rows], half
        delta = lora_delta(a[e], b[e, rows], scaling)
        weight = dequantize(*part, torch.float32)
        fresh_codes, fresh_scales, _ = quantize(
            weight + delta, half if fmt is NVFP4 else None, fmt.name, check_finite=False
        )
        changed = (delta != 0).unflatten(-1, (-1, fmt.block_size)).any(-1)
        out_scales[e, rows].view(torch.uint8).copy_(
            torch.where(changed, fresh_scales.view(torch.uint8), out_scales[e, rows].view(torch.uint8))
        )
        by_block = out_codes[e, rows].unflatten(-1, (-1, fmt.block_size // 2))
        by_block.copy_(torch.where(changed.unsqueeze(-1), fresh_codes.view(by_block.shape), by_block))
    return out_codes, out_scales


def lora_delta(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """scaling · b a as fp32 `[N, C]` from a `[R, C]` and b `[N, R]`, to the bit what merging adds."""
    a, b = rounded_factor(a), rounded_factor(b)
    delta = a.new_zeros(b.shape[0], a.shape[1])
    product = torch.empty_like(delta)
    for r in range(a.shape[0]):
        delta += torch.mul(b[:, r : r + 1], a[r], out=product)
    return delta.mul_(torch.tensor(scaling, dtype=torch.float32, device=a.device))


def rounded_factor(factor: Tensor) -> Tensor:
    """What merging multiplies with: the nearest bf16 as fp32, 0 below 2^-63, infinite from 2^64 on; contiguous."""
    rounded = factor.detach().to(torch.bfloat16).to(torch.float32).contiguous()
    size = rounded.abs()
    rounded = torch.where(size < SMALLEST_FACTOR, 0.0, rounded)
    return torch.where(size >= FACTOR_LIMIT, rounded * torch.inf, rounded)


def _chunks(codes: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, rows) of pieces of bounded size, none of which crosses the middle of the rows."""
    e, n, half_c = codes.shape
    step = max(1, _CHUNK_ELEMENTS // max(1, 2 * half_c))
    for expert in range(e):
        for begin, end in ((0, n // 2), (n // 2, n)):
            for start in range(begin, end, step):
                yield expert, slice(start, min(start + step, end))
