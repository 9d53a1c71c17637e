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
    """Codes 0 … 7 of magnitudes 0 … 6 and a bit: to the nearest, ties to the even code.

    With 2^e the power of two in a magnitude, or 1 below that, codes are whole numbers of 2^e / 2 on top of 2 e. Adding
    1.5 · 2^(e + 22), whose last bit is worth 2^e / 2, makes fp32's own addition round.
    """
    bits = magnitude.to(tl.int32, bitcast=True)
    power = tl.maximum(bits, 0x3F800000) & 0x7F800000
    rounded = tl.fma(power.to(tl.float32, bitcast=True), tl.full(power.shape, 6291456.0, tl.float32), magnitude)
    return rounded.to(tl.int32, bitcast=True) - power + (power >> 22) - 0x0B4000FE


@triton.jit
def _magnitudes(tile, divisor, N: tl.constexpr, B: tl.constexpr, MX: tl.constexpr):
    """|tile| / divisor `[N]`, correctly rounded, or about 6 where it is more; 0 if the divisor is infinite or not > 0.

    One division a block gives the reciprocal, correctly rounded; a product with it is off by less than two units in the
    last place, and two steps of Markstein's correction round it as a division would. Fused multiply-adds are part of
    that, and nothing else may be fused. A power of two lifts divisors from the ends of fp32's range. MXFP4's divisors
    are powers of two themselves, whose reciprocal is fp32's and exact.
    """
    if MX:
        quotient = tl.minimum(tl.abs(tile) * tl.div_rn(1.0, divisor)[:, None], 6.0)
    else:
        usable = (divisor > 0.0) & (divisor < float("inf"))
        lift = tl.where(divisor < 7.888609052210118e-31, 1.2676506002282294e30, 1.0)  # 2^-100, 2^100
        lift = tl.where(divisor > 1.2676506002282294e30, 7.888609052210118e-31, lift)
        divisor = tl.where(usable, divisor * lift, 1.0)
        x = tl.minimum(tl.abs(tile) * tl.where(usable, lift, 0.0)[:, None], 6.0 * divisor[:, None])
        minus = tl.broadcast_to(-divisor[:, None], (N, B))
        reciprocal = tl.broadcast_to(tl.div_rn(1.0, divisor)[:, None], (N, B))
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(quotient, minus, x), reciprocal, quotient)
        quotient = tl.fma(tl.fma(quotient, minus, x), reciprocal, quotient)
    return quotient


@triton.jit
def encode(tile, g, B: tl.constexpr, MX: tl.constexpr):
    """(codes `[N, B/2]`, scale bytes `[N]`), both uint8, of fp32 blocks `[N, B]` under global scales `[N]`."""
    NAN: tl.constexpr = 0xFF if MX else 0x7F
    amax_bits = tl.max(magnitude_bits(tile), 1)
    finite = amax_bits < 0x7F800000
    byte, divisor = _block_scales(amax_bits, g, MX)
    code = _e2m1_code(_magnitudes(tile, divisor, tile.shape[0], B, MX))
    negative = tile.to(tl.int32, bitcast=True) < 0 if MX else tile < 0.0
    code += tl.where(negative, 8, 0)
    low, high = tl.split(tl.reshape(tl.where(finite[:, None], code, 0), (tile.shape[0], B // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), tl.where(finite, byte, NAN).to(tl.uint8)


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
