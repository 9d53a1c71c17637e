"""The decoder of Hopper's own product (`hopper.py`), in PTX: codes and block scales to pairs of half-precision numbers.

No nibble moves from where it lies: a register's pair is two nibbles of the same place, and the product's operands are
ordered after that. Why scales are lifted: `decode.lifted_scale`.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


def _nibbles(dtype: str, count: int, lift: int | None = None) -> str:
    """PTX from two 16-bit groups of four codes and a pair of scales to `count` (4, or 2 of them) pairs of weights.

    Operands: the results, the codes, the scales and, for 2, how far the codes are shifted to the right beforehand.
    """
    product, magnitude, up = ("mul.rn.bf16x2", 0x01C001C0, 6) if dtype == "bf16" else ("mul.rn.f16x2", 0x0E000E00, 9)
    lines = [
        "{",
        ".reg .b32 u, s, m;",
        f"mov.b32 u, ${count};" if count == 4 else f"shr.u32 u, ${count}, ${count + 2};",
    ]
    for i in range(count):
        shift = up - 4 * i
        move = f"shl.b32 m, u, {shift};" if shift >= 0 else f"shr.u32 m, u, {-shift};"
        lines += [f"shl.b32 s, u, {12 - 4 * i};", "and.b32 s, s, 0x80008000;", move, f"and.b32 m, m, {magnitude:#x};"]
        lines += ["or.b32 s, s, m;"]
        if lift is not None:
            lines += [f"mov.b32 m, {lift:#x};", f"{product} s, s, m;"]
        lines += [f"{product} ${i}, s, ${count + 1};"]
    return "\n".join([*lines, "}"])


_MX_LIFT = 0x7E807E80  # 2^126, which makes numbers of the patterns
_DECODE_BF16, _DECODE_BF16_2 = gl.constexpr(_nibbles("bf16", 4)), gl.constexpr(_nibbles("bf16", 2))
_DECODE_FP16, _DECODE_FP16_2 = gl.constexpr(_nibbles("fp16", 4)), gl.constexpr(_nibbles("fp16", 2))
_DECODE_BF16_MX, _DECODE_BF16_MX_2 = (gl.constexpr(_nibbles("bf16", n, _MX_LIFT)) for n in (4, 2))


def _block_scales(count: int, lines: list[str]) -> str:
    """PTX from two words of `count` scale bytes to `count` pairs of half-precision scales, byte by byte.

    `lines` turn m, which holds the magnitudes of a pair, into the results $0 … (written $R); b holds the bytes' copies.
    """
    text = ["{", ".reg .b32 b, m, n, q, s;"]
    for i in range(count):
        text += [f"prmt.b32 b, ${count}, ${count + 1}, 0x{i + 4:x}{i + 4:x}{i:x}{i:x};"]
        text += [line.replace("$R", f"${i}") for line in lines]
    return "\n".join([*text, "}"])


def _e4m3(nan: list[str], shift: int, product: str, *lifts: int) -> list[str]:
    """e4m3 bits as a half-precision pattern, NaN kept, times powers of two (why: `decode.lifted_scale`)."""
    pattern = ["and.b32 m, b, 0x007F007F;", "add.u32 n, m, 0x00010001;", "and.b32 n, n, 0x00800080;", *nan]
    pattern += [f"shl.b32 m, m, {shift};", "or.b32 m, m, q;", "and.b32 s, b, 0x80008000;", "or.b32 m, m, s;"]
    for lift in lifts:
        pattern += [f"mov.b32 s, {lift:#x};", f"{product} m, m, s;"]
    return [*pattern, "mov.b32 $R, m;"]


# Lifted by 2^120 · 2^119 and by 2^15; fp16's NaN is all ones over its exponent, 0x7C00 from 0x80.
_E4M3_BF16 = _e4m3(["shl.b32 q, n, 8;", "sub.u32 q, q, n;"], 4, "mul.rn.bf16x2", 0x7B807B80, 0x7B007B00)
_E4M3_FP16 = _e4m3(["shl.b32 q, n, 8;", "shl.b32 s, n, 3;", "sub.u32 q, q, s;"], 7, "mul.rn.f16x2", 0x78007800)
# e8m0 bits are bf16's exponent, but that 0 means 2^-127 and 255 NaN.
_E8M0_BF16 = [
    "and.b32 b, b, 0x00FF00FF;",
    "shl.b32 m, b, 7;",
    "add.u32 n, b, 0x00010001;",
    "and.b32 n, n, 0x01000100;",
    "add.u32 s, b, 0x00FF00FF;",
    "and.b32 s, s, 0x01000100;",
    "xor.b32 s, s, 0x01000100;",
    "or.b32 n, n, s;",
    "shr.u32 n, n, 2;",
    "or.b32 $R, m, n;",
]
_SCALE_BF16 = gl.constexpr(_block_scales(4, _E4M3_BF16))
_SCALE_FP16 = gl.constexpr(_block_scales(4, _E4M3_FP16))
_SCALE_BF16_MX = gl.constexpr(_block_scales(2, _E8M0_BF16))


@gluon.jit
def decode(words, scale, DTYPE: gl.constexpr, MX: gl.constexpr):
    """Four tensors of weights, one for each nibble of the 16-bit words."""
    if DTYPE == gl.bfloat16:
        ASM: gl.constexpr = _DECODE_BF16_MX if MX else _DECODE_BF16
        KINDS: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    else:
        gl.static_assert(not MX)
        ASM: gl.constexpr = _DECODE_FP16
        KINDS: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    return gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r", [words, scale], dtype=KINDS, is_pure=True, pack=2)


@gluon.jit
def decode_two(words, scale, shift, DTYPE: gl.constexpr, MX: gl.constexpr):
    """Of the words shifted to the right by `shift` bits, the two lowest nibbles."""
    if DTYPE == gl.bfloat16:
        ASM: gl.constexpr = _DECODE_BF16_MX_2 if MX else _DECODE_BF16_2
        KINDS: gl.constexpr = (gl.bfloat16, gl.bfloat16)
    else:
        gl.static_assert(not MX)
        ASM: gl.constexpr = _DECODE_FP16_2
        KINDS: gl.constexpr = (gl.float16, gl.float16)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r,r,r,r", [words, scale, shift], dtype=KINDS, is_pure=True, pack=2)


@gluon.jit
def decode_scales(words, DTYPE: gl.constexpr, MX: gl.constexpr):
    """A row's block scales `[rows, blocks]` from words `[rows, words]` of four of them, or of two in MXFP4."""
    if MX:
        a, b = gl.inline_asm_elementwise(
            _SCALE_BF16_MX, "=r,=r,r,r", [words.to(gl.int32)], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
        scale = gl.join(a, b)
    else:
        if DTYPE == gl.bfloat16:
            ASM: gl.constexpr = _SCALE_BF16
            KINDS: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
        else:
            ASM: gl.constexpr = _SCALE_FP16
            KINDS: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
        a, b, c, d = gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r", [words], dtype=KINDS, is_pure=True, pack=2)
        scale = gl.join(gl.join(a, c), gl.join(b, d))
    return scale.reshape([words.shape[0], words.shape[1] * (2 if MX else 4)])
