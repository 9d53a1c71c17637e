"""The one decoder of packed weights: e2m1(code) · block scale, exact, from bytes to a tile of the activation dtype.

A code's bits, moved to the top of a pattern, read as e2m1 · 2^-126 (bf16, fp32) or e2m1 · 2^-14 (fp16), zero
and subnormals included, so that one multiplication by a lifted scale finishes the job. An e4m3 scale lifted by the
whole 2^126 would overflow, so the tile is left smaller by `unit` = 2^7, which the launcher folds into the fp32 global
scale. No float8 type appears: sm_80 has none.

fp16 holds neither MXFP4's large scales nor its small ones (2^-127 … 2^127): such tiles are fp32, and exact.
"""

import triton
import triton.language as tl

NVFP4_UNIT = 128.0
"""Tiles of NVFP4 weights hold value / 128; tiles of MXFP4 weights the value itself."""


@triton.jit
def block_scale(byte, MX: tl.constexpr):
    """Block scales (a tile of bytes) as exact fp32, subnormals and NaN included."""
    bits = byte.to(tl.int32)
    if MX:  # 2^(byte - 127)
        fp32_bits = tl.where(bits == 0, 0x00400000, bits << 23)
        scale = tl.where(bits == 255, 0x7FC00000, fp32_bits).to(tl.float32, bitcast=True)
    else:
        # Sign and magnitude moved into an fp32 pattern: scale · 2^-120, subnormals included.
        pattern = ((bits << 24) >> 4) & -0x78100000
        pattern = tl.where((bits & 0x7F) == 0x7F, 0x7FC00000, pattern)
        scale = pattern.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return scale


@triton.jit
def lifted_scale(byte, DTYPE: tl.constexpr, MX: tl.constexpr):
    """Block scales (uint8 tile) lifted so that `decode_pair` needs one multiplication for NVFP4.

    They come as DTYPE, or as fp32 where that is fp16 and the weight is MXFP4; the tile's dtype is theirs.
    """
    scale = block_scale(byte, MX)
    if MX:
        if DTYPE != tl.float16:
            scale = scale.to(DTYPE)
    elif DTYPE == tl.float16:
        scale = (scale * 128.0).to(DTYPE)  # 2^(14 - 7)
    else:
        scale = (scale * 6.646139978924579e35).to(DTYPE)  # 2^(126 - 7)
    return scale


@triton.jit
def decode_pair(byte, scale, DTYPE: tl.constexpr, MX: tl.constexpr, PACKED_ASM: tl.constexpr):
    """(weights of the low nibbles, of the high ones) for a tile of bytes and a tile of lifted scales of its shape."""
    if PACKED_ASM:  # bf16 in pairs, four bytes at a time: 2.5 instructions an element where the plain form takes 6
        tl.static_assert(DTYPE == tl.bfloat16)
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 u, v, s, t;
            prmt.b32 u, $4, 0, 0x1404;
            prmt.b32 v, $4, 0, 0x3424;
            shl.b32 s, u, 4;
            and.b32 s, s, 0x80008000;
            shr.u32 t, u, 2;
            and.b32 t, t, 0x01C001C0;
            or.b32 s, s, t;
            mul.rn.bf16x2 $0, s, $5;
            and.b32 s, u, 0x80008000;
            shr.u32 t, u, 6;
            and.b32 t, t, 0x01C001C0;
            or.b32 s, s, t;
            mul.rn.bf16x2 $2, s, $5;
            shl.b32 s, v, 4;
            and.b32 s, s, 0x80008000;
            shr.u32 t, v, 2;
            and.b32 t, t, 0x01C001C0;
            or.b32 s, s, t;
            mul.rn.bf16x2 $1, s, $6;
            and.b32 s, v, 0x80008000;
            shr.u32 t, v, 6;
            and.b32 t, t, 0x01C001C0;
            or.b32 s, s, t;
            mul.rn.bf16x2 $3, s, $6;
            }
            """,
            "=r,=r,=r,=r,r,r,r",
            [byte, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif DTYPE == tl.float32:
        # The shift to the right repeats the sign, and the mask leaves one of it.
        bits = byte.to(tl.int32)
        low = _as_fp32(((bits << 28) >> 6) & -0x7E400000, MX) * scale
        high = _as_fp32(((bits << 24) >> 6) & -0x7E400000, MX) * scale
    else:
        wide = byte.to(tl.uint16)
        low = _as_half(((wide & 0x08) << 12), wide & 0x07, DTYPE, MX) * scale
        high = _as_half(((wide & 0x80) << 8), (wide & 0x70) >> 4, DTYPE, MX) * scale
    return low, high


@triton.jit
def _as_fp32(pattern, MX: tl.constexpr):
    value = pattern.to(tl.float32, bitcast=True)
    if MX:
        value = value * 8.507059173023462e37  # 2^126
    return value


@triton.jit
def _as_half(sign, magnitude, DTYPE: tl.constexpr, MX: tl.constexpr):
    if DTYPE == tl.bfloat16:
        value = (sign | (magnitude << 6)).to(tl.bfloat16, bitcast=True)
        if MX:
            value = value * 8.507059173023462e37  # 2^126
    else:
        tl.static_assert(not MX, "fp16 cannot hold MXFP4's scales")
        value = (sign | (magnitude << 9)).to(tl.float16, bitcast=True)
    return value


@triton.jit
def spread(scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BYTES_PER_BLOCK: tl.constexpr):
    """A tile of block scales `[ROWS, BLOCKS]` repeated for every byte of its block."""
    wide = tl.broadcast_to(scale[:, :, None], (ROWS, BLOCKS, BYTES_PER_BLOCK))
    return tl.reshape(wide, (ROWS, BLOCKS * BYTES_PER_BLOCK))
