"""`dequantize` as pointwise IR: Inductor fuses it into what reads it, and then writes no decoded weight.

value = e2m1(code) * (block scale * global scale) in fp32, in this order, rounded once to the output dtype, as
`torch_nvfp4.format.dequantize` does. Where the result is a tensor of its own, its bits are the same. Fused,
Inductor drops the rounding to bf16 or fp16 before the next operation: about one unit in the last place from
eager, and more precise. Two more differences: eager restores MXFP4's smallest values where a thread flushes
subnormals (`torch.set_flush_denormal`), this does not; and an MXFP4 global scale other than one, which is an
error in eager on a CPU, is multiplied.

Block scales are decoded from bytes by integer operations on every device: float8 loads need sm_89 or later,
and on a CPU they are no faster.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torch_nvfp4.format import E2M1_VALUES, MXFP4, Format, format_of

from .compat import FloorDiv, Loader, ModularIndexing, Pointwise, TensorBox, byte_loader, is_known_to_be, ops

_F32, _I32 = torch.float32, torch.int32


def _as_int32(bits: int) -> int:
    return bits - (bits >> 31 << 32)


# Nibble i is twice the magnitude of code i, a whole number; shifting by 4 * i looks it up without memory.
_DOUBLED_MAGNITUDES = _as_int32(sum(int(2 * value) << 4 * i for i, value in enumerate(E2M1_VALUES[:8])))


def lower(
    codes: TensorBox, scales: TensorBox, global_scale: TensorBox, *, dtype: torch.dtype = torch.bfloat16
) -> TensorBox:
    """codes u8 `[..., C/2]`, scales float8 `[..., C/B]`, global_scale fp32 as in eager -> `[..., C]`."""
    fmt = format_of(scales.get_dtype())
    *lead, half_columns = codes.get_size()
    load_code, load_scale = codes.make_loader(), byte_loader(scales)
    load_global = _global_scale_loader(global_scale, lead)

    def element(index: Sequence[Any]) -> Any:
        *row, column = index
        byte = ops.to_dtype(load_code([*row, FloorDiv(column, 2)]), _I32, src_dtype=torch.uint8)
        code = ops.bitwise_right_shift(byte, ops.index_expr(ModularIndexing(column, 1, 2) * 4, _I32))
        scale = _block_scale(load_scale([*row, FloorDiv(column, fmt.block_size)]), fmt)
        value = ops.mul(_e2m1(code), ops.mul(scale, load_global(row)))
        return ops.to_dtype(value, dtype, src_dtype=_F32)

    return Pointwise.create(device=codes.get_device(), dtype=dtype, inner_fn=element, ranges=[*lead, half_columns * 2])


def _global_scale_loader(global_scale: TensorBox, lead: Sequence[Any]) -> Loader:
    """A loader of the global scale that applies to the row at an index of `lead`."""
    load, sizes = global_scale.make_loader(), global_scale.get_size()

    def applies(row: Sequence[Any]) -> Any:
        if all(is_known_to_be(size, 1) for size in sizes):
            return load([0] * len(sizes))
        (expert, n), rows = row, lead[-1]
        if is_known_to_be(sizes[1], 1) or is_known_to_be(rows, 0):
            return load([expert, 0])
        return load([expert, FloorDiv(n * sizes[1], rows)])

    return applies


def _int(value: int) -> Any:
    return ops.constant(value, _I32)


def _float(value: float) -> Any:
    return ops.constant(value, _F32)


def _e2m1(code: Any) -> Any:
    """The fp32 value of a 4-bit code, given as int32 whose higher bits do not matter."""
    shift = ops.bitwise_and(ops.bitwise_left_shift(code, _int(2)), _int(28))
    doubled = ops.bitwise_and(ops.bitwise_right_shift(_int(_DOUBLED_MAGNITUDES), shift), _int(15))
    negative = ops.ne(ops.bitwise_and(code, _int(8)), _int(0))
    half = ops.where(negative, _float(-0.5), _float(0.5))  # by a product, so that code 8 becomes -0.0
    return ops.mul(ops.to_dtype(doubled, _F32, src_dtype=_I32), half)


def _block_scale(byte: Any, fmt: Format) -> Any:
    bits = ops.to_dtype(byte, _I32, src_dtype=torch.uint8)
    return _e8m0(bits) if fmt is MXFP4 else _e4m3(bits)


def _e8m0(byte: Any) -> Any:
    """2^(byte - 127): the exponent of an fp32, whose own 0 and 255 mean something else."""
    bits = ops.bitwise_left_shift(byte, _int(23))
    bits = ops.where(ops.eq(byte, _int(0)), _int(0x0040_0000), bits)  # 2^-127 is subnormal
    bits = ops.where(ops.eq(byte, _int(255)), _int(0x7FC0_0000), bits)
    return ops.to_dtype_bitcast(bits, _F32, _I32)


def _e4m3(byte: Any) -> Any:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F and 0xFF are NaN."""
    magnitude = ops.bitwise_and(byte, _int(0x7F))
    bits = ops.bitwise_left_shift(ops.add(magnitude, _int((127 - 7) << 3)), _int(20))
    value = ops.to_dtype_bitcast(bits, _F32, _I32)
    subnormal = ops.mul(ops.to_dtype(magnitude, _F32, src_dtype=_I32), _float(2.0**-9))
    value = ops.where(ops.lt(magnitude, _int(8)), subnormal, value)
    value = ops.where(ops.eq(magnitude, _int(0x7F)), _float(float("nan")), value)
    return ops.where(ops.ge(byte, _int(0x80)), ops.neg(value), value)
