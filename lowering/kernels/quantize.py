"""x -> codes, block scales and the computed global scale, to the bit what `torch_nvfp4.format.quantize` gives.

What rounds is an integer operation, an IEEE division (`tl.div_rn`: Triton's `/` is an approximate one), or a quotient
that comes out as one; launches forbid multiply-adds that nobody asked for. No float8 type appears: sm_80 has none.
"""

import triton
import triton.language as tl

from .decode import block_scale, decode_pair


@triton.jit
def magnitude_bits(x):
    """|x| as the bits of an fp32, which order as integers do; NaN and infinity are 0x7F800000 and more."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def partial_amax(x, partial, total, SIZE: tl.constexpr):
    """partial[program] = the largest finite |x| of this program's elements, as fp32 bits."""
    program = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * SIZE
    largest = tl.zeros((SIZE,), tl.int32)
    for start in range(program * SIZE, total, step):
        where = start + tl.arange(0, SIZE)
        bits = magnitude_bits(tl.load(x + where, mask=where < total, other=0.0))
        largest = tl.maximum(largest, tl.where(bits < 0x7F800000, bits, 0))
    tl.store(partial + program, tl.max(largest, 0))


@triton.jit
def amax_scale(amax):
    """amax / 2688, 1 where that is 0."""
    scale = tl.div_rn(amax, 2688.0)
    return tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def computed_scale(partial, count, global_scale, SIZE: tl.constexpr):
    """global_scale = amax / 2688, 1 where that is 0."""
    programs = tl.arange(0, SIZE)
    amax = tl.max(tl.load(partial + programs, mask=programs < count, other=0), 0).to(tl.float32, bitcast=True)
    tl.store(global_scale, amax_scale(amax))


@triton.jit
def _e4m3_byte(value):
    """The byte nearest to a value in 2^-9 … 448, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # In units of 2^-9, rounded to a whole number by fp32's own addition.
    subnormal = (value * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(value < 0.015625, subnormal, normal)


@triton.jit
def _block_scales(amax_bits, g, MX: tl.constexpr):
    """(scale byte as int32, fp32 divisor of the elements) of blocks with finite values."""
    if MX:
        byte = tl.maximum((amax_bits >> 23) - 2, 0)
        divisor = (tl.maximum(byte, 1) << 23).to(tl.float32, bitcast=True)
    else:
        quotient = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), 6.0 * g)
        clamped = tl.where(quotient > 448.0, 448.0, tl.where(quotient > 0.001953125, quotient, 0.001953125))
        byte = tl.where(quotient > 0.0, _e4m3_byte(clamped), 0x38)
        divisor = block_scale(byte, False) * g
    return byte, divisor


@triton.jit
def _e2m1_code(magnitude):
    """Codes 0 … 7 of magnitudes >= 0: to the nearest, ties to the even code, saturating."""
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    # In halves, rounded to a whole number by fp32's own addition.
    subnormal = (magnitude + 4194304.0).to(tl.int32, bitcast=True) & 3
    return tl.where(magnitude < 1.0, subnormal, tl.minimum(normal, 7))


@triton.jit
def _quotients(tile, divisor, N: tl.constexpr, B: tl.constexpr):
    """|tile| / divisor `[N]`, correctly rounded, or anything from 8 on where that is 8 or more.

    One division a block gives the reciprocal, correctly rounded; a product with it is off by less than two units in the
    last place, and two steps of Markstein's correction round it as a division would. Fused multiply-adds are part of
    that, and nothing else may be fused. Divisors near the ends of fp32's range go the slow way.
    """
    each = tl.broadcast_to(divisor[:, None], (N, B))
    if tl.max(((divisor < 1e-30) | (divisor > 1e30)).to(tl.int32), 0) != 0:
        quotient = tl.div_rn(tl.abs(tile), each)
    else:
        x = tl.minimum(tl.abs(tile), 8.0 * each)
        reciprocal = tl.broadcast_to(tl.div_rn(1.0, divisor)[:, None], (N, B))
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(-quotient, each, x), reciprocal, quotient)
        quotient = tl.fma(tl.fma(-quotient, each, x), reciprocal, quotient)
    return quotient


@triton.jit
def encode(tile, g, B: tl.constexpr, MX: tl.constexpr):
    """(codes `[N, B/2]`, scale bytes `[N]`), both uint8, of fp32 blocks `[N, B]` under global scales `[N]`."""
    NAN: tl.constexpr = 0xFF if MX else 0x7F
    amax_bits = tl.max(magnitude_bits(tile), 1)
    finite = amax_bits < 0x7F800000
    byte, divisor = _block_scales(amax_bits, g, MX)
    byte = tl.where(finite, byte, NAN)
    # A divisor that underflowed to 0 would make 0/0; dividing by infinity gives code 0 instead.
    divisor = tl.where(divisor > 0.0, divisor, float("inf"))
    code = _e2m1_code(_quotients(tile, divisor, tile.shape[0], B))
    negative = tile.to(tl.int32, bitcast=True) < 0 if MX else tile < 0.0
    code = tl.where(finite[:, None], code | (negative.to(tl.int32) << 3), 0)
    low, high = tl.split(tl.reshape(code, (tile.shape[0], B // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), byte.to(tl.uint8)


@triton.jit
def quantize(
    x, global_scale, codes, scales, out, blocks, blocks_per_scale,
    B: tl.constexpr, BLOCKS: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of x: their codes and scales or, where `out` is given, the values that these stand for."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    where = block[:, None] * B + tl.arange(0, B)[None, :]
    tile = tl.load(x + where, mask=inside[:, None], other=0.0).to(tl.float32)
    g = tl.load(global_scale + block // blocks_per_scale, mask=inside, other=1.0)
    packed, byte = encode(tile, g, B, MX)
    if out is None:
        tl.store(scales + block, byte, mask=inside)
        tl.store(codes + block[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :], packed, mask=inside[:, None])
    else:
        factor = tl.broadcast_to((block_scale(byte, MX) * g)[:, None], (BLOCKS, B // 2))
        even, odd = decode_pair(packed, factor, tl.float32, True, False)
        tl.store(out + where, tl.interleave(even, odd).to(out.dtype.element_ty), mask=inside[:, None])
