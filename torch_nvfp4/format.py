"""The numbers of NVFP4 and MXFP4: code tables, quantise, dequantise, scale swizzle.

Plain torch, the same bits on every device. docs/format.md states each rule, with an id, and its reason.

Letters: E experts, N rows, C columns (the packed, contraction dim), B block size, S global scales per expert.
A packed tensor is three tensors: codes u8 `[..., C/2]`, scales float8 `[..., C/B]` and global_scale fp32.
Its value is e2m1(code) * scale * global_scale: both scales are multipliers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES: tuple[float, ...] = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)
"""Value of each 4-bit code; code = sign << 3 | index of the magnitude. Code 8 is -0.0."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # smallest above zero
GLOBAL_DIVISOR = E2M1_MAX * E4M3_MAX
"""2688: with global_scale = amax / 2688 the largest element has block scale 448 and magnitude 6."""


@dataclass(frozen=True)
class Format:
    """A 4-bit block format: E2M1 elements, and one scale for each `block_size` of them along the last dim."""

    name: str
    block_size: int
    scale_dtype: torch.dtype
    nan_byte: int
    """The scale byte that marks a block with a non-finite value."""


NVFP4 = Format("nvfp4", 16, torch.float8_e4m3fn, 0x7F)
MXFP4 = Format("mxfp4", 32, torch.float8_e8m0fnu, 0xFF)
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (NVFP4, MXFP4)}

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Values that a CPU treats in one step: the temporaries then stay in the cache and need no fresh pages.
_CHUNK = 2**18

# The device is named because this module may be imported while a model is built under torch.device("meta").
_VALUES_OF_BYTE = [(E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]) for byte in range(256)]
# The two fp32 values of a byte as one 8-byte element. index_select with int32 is the fastest look-up on a CPU
# (1.0 G values/s a core; take 0.5, indexing 0.4; AMD EPYC, torch 2.13).
_PAIR_OF_BYTE = torch.tensor(_VALUES_OF_BYTE, dtype=torch.float32, device="cpu").view(torch.int64).flatten()


def get_format(name: str) -> Format:
    """The format called `name`; ValueError naming the known ones."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}; given {name!r}")
    return FORMATS[name]


def format_of(scale_dtype: torch.dtype) -> Format:
    """The format whose block scales have this dtype; TypeError naming the known ones."""
    for fmt in FORMATS.values():
        if fmt.scale_dtype == scale_dtype:
            return fmt
    known = " or ".join(f"{fmt.scale_dtype} ({fmt.name})" for fmt in FORMATS.values())
    raise TypeError(f"scales must be {known}; given {scale_dtype}")


def pack(codes: Tensor) -> Tensor:
    """Two codes (uint8 0..15) `[..., C]` per byte `[..., C/2]`; the even column goes into the low nibble."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes must be torch.uint8; given {codes.dtype}")
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes [..., C] must have an even C; given shape {list(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The codes (uint8 0..15) `[..., C]` of bytes `[..., C/2]`; the inverse of `pack`."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"codes must be torch.uint8; given {packed.dtype}")
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def scales_per_expert(global_scale: Tensor, shape: tuple[int, ...]) -> int:
    """S of a `global_scale` `[E, S]` that fits a tensor `[E, N, C]`; 0 where it is one value, which fits any `shape`.

    ValueError for anything else.
    """
    if global_scale.numel() == 1:
        return 0
    if len(shape) == 3 and global_scale.dim() == 2 and global_scale.shape[0] == shape[0]:
        per_expert = global_scale.shape[1]
        if per_expert == 1 or (per_expert == 2 and shape[1] % 2 == 0):
            return per_expert
    raise ValueError(
        "global_scale must be a scalar, [1], or [E, S] with S = 1 (or 2, for an even N) beside [E, N, C]; "
        f"given {list(global_scale.shape)} for {list(shape)}"
    )


def expand_global_scale(global_scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`global_scale` in a shape that broadcasts over a tensor of `shape` and over its block scales.

    One value (a scalar, `[1]`) fits any shape and comes back as a scalar. `[E, S]` fits `[E, N, C]` only and
    comes back as `[E, 1, 1]` (S = 1) or `[E, N, 1]` (S = 2: the first and the second half of the N rows).
    ValueError for anything else.
    """
    per_expert = scales_per_expert(global_scale, shape)
    if per_expert == 0:
        return global_scale.reshape(())
    if per_expert == 1:
        return global_scale.unsqueeze(-1)
    return global_scale.repeat_interleave(shape[1] // 2, dim=1).unsqueeze(-1)


def check_packed(codes: Tensor, scales: Tensor) -> Format:
    """The format of packed tensors whose dtypes and shapes agree; TypeError or ValueError where they do not."""
    fmt = format_of(scales.dtype)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes must be torch.uint8; given {codes.dtype}")
    same_rows = codes.dim() > 0 and codes.shape[:-1] == scales.shape[:-1]
    if not same_rows or codes.shape[-1] * 2 != scales.shape[-1] * fmt.block_size:
        raise ValueError(
            f"{fmt.name}: codes [..., C/2] and scales [..., C/{fmt.block_size}] must agree; "
            f"given codes {list(codes.shape)} and scales {list(scales.shape)}"
        )
    return fmt


def check_dense(x: Tensor, global_scale: Tensor | float | None, format: str) -> Format:
    """The format called `format`, if x and global_scale can be quantised to it; TypeError or ValueError if not."""
    fmt = get_format(format)
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(map(str, _INPUT_DTYPES))}; given {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % fmt.block_size:
        raise ValueError(
            f"{fmt.name}: C of x [..., C] must be a multiple of B = {fmt.block_size}; given {list(x.shape)}"
        )
    if fmt is MXFP4 and global_scale is not None:
        raise ValueError("mxfp4 has no global scale: global_scale must be None")
    return fmt


@functools.cache
def _pairs_on(device: torch.device) -> Tensor:
    return _PAIR_OF_BYTE.to(device)


def _chunks(blocks: int, block_size: int, device: torch.device) -> Iterator[slice]:
    step = _CHUNK // block_size if device.type == "cpu" else max(blocks, 1)
    return (slice(start, start + step) for start in range(0, blocks, step))


def _scaled(codes: Tensor, scales: Tensor, factors: Tensor, dtype: torch.dtype, fmt: Format) -> Tensor:
    """e2m1(code) * factor of its block in fp32, rounded once to `dtype`."""
    packed, factors = codes.reshape(-1, fmt.block_size // 2), factors.detach().reshape(-1, 1)
    pairs = _PAIR_OF_BYTE if codes.device.type == "cpu" else _pairs_on(codes.device)
    values = torch.empty(len(packed), fmt.block_size, dtype=dtype, device=codes.device)
    for chunk in _chunks(len(packed), fmt.block_size, codes.device):
        looked_up = pairs.index_select(0, packed[chunk].flatten().int()).view(torch.float32)
        torch.mul(looked_up.view(-1, fmt.block_size), factors[chunk], out=values[chunk])
    if fmt is MXFP4:
        _restore_subnormals(values, packed, scales.reshape(-1))
    return values.view(*codes.shape[:-1], codes.shape[-1] * 2)


@functools.cache
def _tiny_bits(dtype: torch.dtype) -> Tensor:
    """Bit patterns `[2, 16]` of e2m1(code) * 2^-127 and of e2m1(code) * 2^-126, made from integers alone."""
    patterns = []
    for byte in range(2):
        for value in _MAGNITUDES:
            units = int(value * 2 ** (byte + 1))  # of 2^-128; under 4 of them are a subnormal number
            exponent = max(units.bit_length() - 3, 0)
            patterns.append((exponent << 23) + (units << (21 - exponent)))
    magnitudes = torch.tensor(patterns, dtype=torch.int32, device="cpu").view(2, 8)
    bits = torch.cat([magnitudes, magnitudes | -(2**31)], dim=1)
    return bits if dtype == torch.float32 else (bits >> 16).to(torch.int16)


def _restore_subnormals(values: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Rewrite the blocks scaled by 2^-127 or 2^-126, which a CPU that flushes subnormals has made zero."""
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.bfloat16):
        return
    exponents = scales.view(torch.uint8)
    tiny = exponents < 2
    if bool(tiny.any()):
        bits = _tiny_bits(values.dtype)
        row, column = exponents[tiny].long().unsqueeze(-1), unpack(packed[tiny]).long()
        values.view(bits.dtype)[tiny] = bits[row, column]


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """e2m1(code) * block scale, without the global scale.

    codes u8 `[..., C/2]`, scales float8 `[..., C/B]` -> `[..., C]` in `dtype`. NVFP4 is exact in fp16, bf16,
    fp32 and fp64. MXFP4 is exact in bf16, fp32 and fp64 (infinite from 2^128 on); in fp16, whose range is
    smaller, it is rounded once. A NaN scale makes its block NaN. No gradient passes. ValueError or TypeError
    where shapes or dtypes do not agree.
    """
    fmt = check_packed(codes, scales)
    return _scaled(codes, scales, scales.to(torch.float32), dtype, fmt)


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """e2m1(code) * (block scale * global scale) in fp32, in this order, then rounded once to `dtype`.

    codes u8 `[..., C/2]`, scales float8 `[..., C/B]`, global_scale fp32 as in `expand_global_scale` ->
    `[..., C]`. The order is ModelOpt's. For MXFP4 the global scale is all ones (ValueError on a CPU if not).
    No gradient passes. ValueError or TypeError where shapes or dtypes do not agree.
    """
    fmt = check_packed(codes, scales)
    expanded = expand_global_scale(global_scale.to(torch.float32), (*codes.shape[:-1], codes.shape[-1] * 2))
    if fmt is MXFP4 and expanded.device.type == "cpu" and not bool((expanded == 1).all()):
        raise ValueError("mxfp4 has no global scale: global_scale must be all ones")
    return _scaled(codes, scales, scales.to(torch.float32) * expanded, dtype, fmt)


def _blocks(x: Tensor, fmt: Format) -> Tensor:
    """x in fp32, contiguous, as `[..., C/B, B]`."""
    blocks = x.shape[-1] // fmt.block_size
    return x.detach().to(torch.float32).contiguous().unflatten(-1, (blocks, fmt.block_size))


def global_scales(amax: Tensor) -> Tensor:
    """The fp32 global scales of these largest magnitudes: amax / 2688, 1 where that is 0."""
    # In fp64, whose quotient rounds to fp32's: a GPU divides fp32 by a Python number as a product with its rounded
    # reciprocal, and compiled code divides fp32 by an approximate instruction.
    scales = (amax.to(torch.float64) / GLOBAL_DIVISOR).to(torch.float32)
    return torch.where(scales > 0, scales, 1.0)


def _computed_global_scale(blocks: Tensor, amax: Tensor, all_finite: bool) -> Tensor:
    """amax / 2688 as `[1]`, over the finite values; 1 where that is 0."""
    if amax.numel() == 0:
        return amax.new_ones(1)
    largest = amax.amax() if all_finite else torch.where(blocks.isfinite(), blocks, 0.0).abs().amax()
    return global_scales(largest.reshape(1))


def given_global_scale(global_scale: Tensor | float, x: Tensor, check_finite: bool) -> Tensor:
    """A copy of the caller's global scale, contiguous fp32 on x's device."""
    given = torch.as_tensor(global_scale, device=x.device).detach().to(torch.float32)
    given = given.clone(memory_format=torch.contiguous_format)  # never the caller's own storage or strides
    if check_finite and not bool((given.isfinite() & (given >= 0)).all()):
        raise ValueError("global_scale must be finite and not negative")
    return given


def _nvfp4_scales(amax: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 block scales and the fp32 divisors of the elements, from each block's largest magnitude."""
    quotient = amax / (E2M1_MAX * global_scale)
    scales = torch.where(quotient > 0, quotient.clamp(E4M3_MIN, E4M3_MAX), 1.0).to(torch.float8_e4m3fn)
    return scales, scales.to(torch.float32) * global_scale


def _mxfp4_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The e8m0 block scales 2^(floor(log2(amax)) - 2) and the fp32 divisors, which are never subnormal."""
    exponent = ((amax.view(torch.int32) >> 23) - 2).clamp(min=0)
    divisors = (exponent.clamp(min=1) << 23).view(torch.float32)
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu), divisors


def _round_to_e2m1(magnitude: Tensor) -> Tensor:
    """Codes 0..7 (uint8) of magnitudes >= 0, to the nearest, ties to the even code, saturating.

    The values are evenly spaced on [0, 2], [2, 4] and [4, 6]; 2y, y + 2 and y/2 + 4 map these to code
    numbers, and the smallest of the three is the one that applies. Rounding before adding keeps it exact.
    """
    code = torch.minimum((magnitude * 2).round_(), magnitude.round().add_(2))
    return torch.minimum(code, (magnitude * 0.5).round_().add_(4)).clamp_(max=7).to(torch.uint8)


def _encode(blocks: Tensor, divisors: Tensor, fmt: Format) -> Tensor:
    """Packed codes `[..., C/2]` of blocks `[..., C/B, B]`."""
    elements = blocks.reshape(-1, fmt.block_size)
    # A divisor that underflowed to 0 would make 0/0; dividing by infinity gives code 0 instead.
    divisors = torch.where(divisors > 0, divisors, math.inf).reshape(-1, 1)
    packed = torch.empty(len(elements), fmt.block_size // 2, dtype=torch.uint8, device=blocks.device)
    for chunk in _chunks(len(elements), fmt.block_size, blocks.device):
        x = elements[chunk]
        negative = x < 0 if fmt is NVFP4 else x.signbit()
        packed[chunk] = pack(_round_to_e2m1(x.abs().div_(divisors[chunk])) | (negative.to(torch.uint8) << 3))
    return packed.view(*blocks.shape[:-2], blocks.shape[-2] * (fmt.block_size // 2))


def quantize(
    x: Tensor, global_scale: Tensor | float | None = None, format: str = "nvfp4", *, check_finite: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x `[..., C]` -> codes u8 `[..., C/2]`, scales float8 `[..., C/B]`, the global scale (fp32).

    x is fp32, bf16, fp16 or fp64, and is converted to fp32 first. Its strides do not matter, and the results
    are contiguous. No gradient passes.
    global_scale: None computes one multiplier for the whole of x, `[1]`; a given one (a scalar, `[1]`, or
    `[E, S]` for x `[E, N, C]`) is used as it is, and a copy returned. MXFP4 takes None, returns ones `[1]`.
    check_finite: ValueError for a NaN or infinity in x or global_scale, and for a negative global_scale (on a
    GPU this waits for the device). Without it a block with such a value gets a NaN scale and codes 0, and no
    other block changes. ValueError also where C is not divisible by B.
    """
    fmt = check_dense(x, global_scale, format)
    blocks = _blocks(x, fmt)
    amax = blocks.abs().amax(-1)
    finite = amax.isfinite()
    if check_finite and not bool(finite.all()):
        bad = int((~finite).sum())
        raise ValueError(f"x must be finite in float32; {bad} of {finite.numel()} blocks have a NaN or infinity")
    if fmt is MXFP4:
        used = amax.new_ones(1)
        scales, divisors = _mxfp4_scales(amax)
    else:
        if global_scale is None:
            used = _computed_global_scale(blocks, amax, check_finite)
        else:
            used = given_global_scale(global_scale, x, check_finite)
        scales, divisors = _nvfp4_scales(amax, expand_global_scale(used, x.shape))
    codes = _encode(blocks, divisors, fmt)
    if not check_finite:
        codes.view(*finite.shape, fmt.block_size // 2).masked_fill_(~finite.unsqueeze(-1), 0)
        scales.view(torch.uint8).masked_fill_(~finite, fmt.nan_byte)
    return codes, scales, used


def fake_quantize(
    x: Tensor, global_scale: Tensor | float | None = None, format: str = "nvfp4", *, check_finite: bool = True
) -> Tensor:
    """`dequantize(quantize(x))` in x's shape and dtype; arguments and errors as for `quantize`.

    No gradient passes through this function. The op built on it is straight-through: its gradient is the
    incoming one where `saturation_mask` is False, and 0 where it is True.
    """
    codes, scales, used = quantize(x, global_scale, format, check_finite=check_finite)
    return dequantize(codes, scales, used, x.dtype)


def saturation_mask(x: Tensor, global_scale: Tensor | float | None = None, format: str = "nvfp4") -> Tensor:
    """True where |x| exceeds 6 * 448 * global_scale, the largest value that can be stored; bool in x's shape.

    Only a given NVFP4 global scale can be too small for x: all False for None (computed) and for MXFP4.
    """
    if global_scale is None or get_format(format) is MXFP4:
        return torch.zeros_like(x, dtype=torch.bool)
    given = torch.as_tensor(global_scale, device=x.device).to(torch.float32)
    return x.to(torch.float32).abs() > GLOBAL_DIVISOR * expand_global_scale(given, x.shape)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Row-major block scales `[..., R, K]` -> the 128x4 layout of block-scaled MMA.

    The result is `[..., 32*ceil(R/128), 16*ceil(K/4)]`. A tile of 128 rows and 4 columns becomes 512 bytes on
    end: 32 lines of 16 bytes, line i holding the 4 scales of row i, then of rows i + 32, i + 64 and i + 96.
    Tiles follow in row-major order. Padding is zero bytes. Any dtype of one byte; ValueError for others.
    """
    if scales.dim() < 2 or scales.element_size() != 1:
        raise ValueError(f"scales must be [..., R, K], one byte each; given {list(scales.shape)} {scales.dtype}")
    *lead, rows, cols = scales.shape
    tile_rows, tile_cols = -(-rows // 128), -(-cols // 4)
    padded = torch.zeros(*lead, tile_rows * 128, tile_cols * 4, dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :cols] = scales.view(torch.uint8)
    tiles = padded.view(*lead, tile_rows, 4, 32, tile_cols, 4).transpose(-4, -2)
    return tiles.reshape(*lead, tile_rows * 32, tile_cols * 16).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """The row-major scales `[..., rows, cols]` of a 128x4 layout; the inverse of `swizzle_scales`."""
    tile_rows, tile_cols = -(-rows // 128), -(-cols // 4)
    if swizzled.element_size() != 1 or swizzled.shape[-2:] != (tile_rows * 32, tile_cols * 16):
        raise ValueError(
            f"the swizzled form of {rows} x {cols} scales is [..., {tile_rows * 32}, {tile_cols * 16}], "
            f"one byte each; given {list(swizzled.shape)} {swizzled.dtype}"
        )
    lead = swizzled.shape[:-2]
    tiles = swizzled.contiguous().view(torch.uint8).view(*lead, tile_rows, tile_cols, 32, 4, 4)
    padded = tiles.transpose(-4, -2).reshape(*lead, tile_rows * 128, tile_cols * 4)
    return padded[..., :rows, :cols].contiguous().view(swizzled.dtype)
