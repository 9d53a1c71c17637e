"""`fake_quantize` as reductions and pointwise IR, fused with what makes x and with what reads the result.

Block by block: the largest magnitude, its scale, then value = e2m1(x / (scale * global scale)) * (scale * global scale)
in fp32, rounded once to x's dtype: the steps and the bits of `torch_nvfp4.format.fake_quantize` without its check. A
value that is not finite makes its block NaN. As for `dequantize`, a fused reader sees the result, and this sees a fused
x, before the rounding to bf16 or fp16; and MXFP4's smallest values flush where the thread flushes subnormals.

A computed global scale is one more reduction, over the whole of x.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_nvfp4.format import E2M1_MAX, E4M3_MAX, E4M3_MIN, GLOBAL_DIVISOR, NVFP4, get_format

from .compat import (
    FloorDiv,
    Pointwise,
    TensorBox,
    device_of,
    exact_division,
    is_known_to_be,
    largest,
    lowerings,
    ops,
)
from .dequantize import _float, _global_scale_loader, _int

_F32, _I32 = torch.float32, torch.int32


def lower(x: TensorBox, global_scale: TensorBox | None = None, *, format: str = "nvfp4") -> TensorBox:
    """x `[..., C]` of any float dtype, global_scale fp32 as in eager -> `[..., C]` in x's dtype."""
    fmt, dtype, device = get_format(format), x.get_dtype(), device_of(x)
    size = fmt.block_size
    *lead, columns = x.get_size()
    blocks = FloorDiv(columns, size)
    if any(is_known_to_be(n, 0) for n in (*lead, columns)):
        return Pointwise.create(
            device=device, dtype=dtype, inner_fn=lambda _: ops.constant(0, dtype), ranges=x.get_size()
        )
    load_x, divide = x.make_loader(), exact_division(device)

    def load(block: Sequence[Any], place: Any) -> Any:
        *row, b = block
        return ops.to_dtype(load_x([*row, b * size + place]), _F32, src_dtype=dtype)

    amax = largest(lambda block, inner: ops.abs(load(block, inner[0])), device, [*lead, blocks], [size])
    load_amax = amax.make_loader()
    load_global = None
    if fmt is NVFP4:
        load_global = _global_scale_loader(_computed(x) if global_scale is None else global_scale, lead)

    def element(index: Sequence[Any]) -> Any:
        *block, place = index
        block_amax, value = load_amax(block), load(block, place)
        if load_global is None:
            divisor, factor = _mxfp4(block_amax)
            negative = ops.lt(ops.to_dtype_bitcast(value, _I32, _F32), _int(0))
        else:
            divisor, factor = _nvfp4(block_amax, load_global(block[:-1]), divide)
            negative = ops.lt(value, _float(0.0))  # -0.0 becomes +0.0
        factor = ops.where(_is_finite(block_amax), factor, _float(math.nan))
        magnitude = _e2m1(divide(ops.abs(value), divisor))
        sign = ops.where(negative, _float(-1.0), _float(1.0))  # by a product, which makes -0.0 of a zero
        return ops.to_dtype(ops.mul(ops.mul(magnitude, sign), factor), dtype, src_dtype=_F32)

    result = Pointwise.create(device=device, dtype=dtype, inner_fn=element, ranges=[*lead, blocks, size])
    return lowerings[torch.ops.aten.view.default](result, [*lead, columns])


def _computed(x: TensorBox) -> TensorBox:
    """amax / 2688 as `[1]`, over the finite values; 1 where that is 0."""
    load, dtype = x.make_loader(), x.get_dtype()

    def magnitude(_: Sequence[Any], index: Sequence[Any]) -> Any:
        value = ops.abs(ops.to_dtype(load(index), _F32, src_dtype=dtype))
        return ops.where(_is_finite(value), value, _float(0.0))

    load_amax = largest(magnitude, device_of(x), [], x.get_size()).make_loader()

    def scale(_: Sequence[Any]) -> Any:
        quotient = exact_division(device_of(x))(load_amax([]), _float(GLOBAL_DIVISOR))
        return ops.where(ops.gt(quotient, _float(0.0)), quotient, _float(1.0))

    result = Pointwise.create(device=device_of(x), dtype=_F32, inner_fn=scale, ranges=[1])
    result.realize()  # else every element would divide
    return result


def _is_finite(magnitude: Any) -> Any:
    return ops.lt(magnitude, _float(math.inf))


def _nvfp4(amax: Any, global_scale: Any, divide: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """(divisor, factor) of the elements; the divisor is infinite where the factor underflowed."""
    quotient = divide(amax, ops.mul(_float(E2M1_MAX), global_scale))
    clamped = ops.where(ops.gt(quotient, _float(E4M3_MIN)), quotient, _float(E4M3_MIN))
    clamped = ops.where(ops.gt(clamped, _float(E4M3_MAX)), _float(E4M3_MAX), clamped)
    scale = ops.where(ops.gt(quotient, _float(0.0)), _to_e4m3(clamped), _float(1.0))
    factor = ops.mul(scale, global_scale)
    return ops.where(ops.gt(factor, _float(0.0)), factor, _float(math.inf)), factor


def _to_e4m3(value: Any) -> Any:
    """The e4m3 value nearest to one in 2^-9 … 448, ties to even."""
    bits = ops.to_dtype_bitcast(value, _I32, _F32)
    odd = ops.bitwise_and(ops.bitwise_right_shift(bits, _int(20)), _int(1))
    rounded = ops.bitwise_and(ops.add(ops.add(bits, _int(0x7FFFF)), odd), _int(-(1 << 20)))
    normal = ops.to_dtype_bitcast(rounded, _F32, _I32)
    subnormal = ops.mul(ops.round(ops.mul(value, _float(2.0**9))), _float(2.0**-9))
    return ops.where(ops.lt(value, _float(2.0**-6)), subnormal, normal)


def _mxfp4(amax: Any) -> tuple[Any, Any]:
    """(divisor, factor): 2^(floor(log2(amax)) - 2), the divisor never subnormal."""
    exponent = ops.sub(ops.bitwise_right_shift(ops.to_dtype_bitcast(amax, _I32, _F32), _int(23)), _int(2))
    exponent = ops.maximum(exponent, _int(0))
    normal = ops.bitwise_left_shift(ops.maximum(exponent, _int(1)), _int(23))
    divisor = ops.to_dtype_bitcast(normal, _F32, _I32)
    tiny = ops.to_dtype_bitcast(_int(0x0040_0000), _F32, _I32)  # 2^-127
    return divisor, ops.where(ops.eq(exponent, _int(0)), tiny, divisor)


def _e2m1(magnitude: Any) -> Any:
    """The E2M1 value nearest to a magnitude, ties to the even code, saturating."""
    fine = ops.mul(ops.round(ops.mul(magnitude, _float(2.0))), _float(0.5))
    coarse = ops.mul(ops.round(ops.mul(magnitude, _float(0.5))), _float(2.0))
    coarse = ops.where(ops.gt(coarse, _float(E2M1_MAX)), _float(E2M1_MAX), coarse)
    upper = ops.where(ops.lt(magnitude, _float(4.0)), ops.round(magnitude), coarse)
    return ops.where(ops.lt(magnitude, _float(2.0)), fine, upper)
