"""The decoder of Hopper's own product (`hopper.py`), in PTX: codes and block scales to pairs of half-precision numbers.

No nibble moves from where it lies: a register's pair is two nibbles of the same place, and the product's operands are
ordered after that. Why scales are lifted: `decode.lifted_scale`.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


def _pattern_bf16(i: int) -> list[str]:
    """PTX: s = the i-th nibbles of u's two groups (v: without the two lowest) as patterns, sign and magnitude in place.

    One product puts a copy of the nibble at either place: shifts would go through a pipe that has more to do.
    """
    source, at = ("u", 4 * i) if i < 2 else ("v", 4 * i - 8)
    copies = (1 << 6 - at) + (1 << 12 - at)
    return [
        f"and.b32 s, {source}, {0x000F000F << at:#x};", f"mul.lo.u32 s, s, {copies};", "and.b32 s, s, 0x81C081C0;"
    ]  # fmt: skip


def _pattern_fp16(i: int) -> list[str]:
    """The same in fp16, where the two copies would overlap."""
    shift = 9 - 4 * i
    move = f"shl.b32 m, u, {shift};" if shift >= 0 else f"shr.u32 m, u, {-shift};"
    sign = [f"shl.b32 s, u, {12 - 4 * i};", "and.b32 s, s, 0x80008000;"]
    return [*sign, move, "and.b32 m, m, 0x0E000E00;", "or.b32 s, s, m;"]


def _nibbles(dtype: str, count: int, lift: int | None = None) -> str:
    """PTX from two 16-bit groups of four codes and a pair of scales to `count` (4, or 2 of them) pairs of weights.

    Operands: the results, the codes, the scales and, for 2, how far the codes are shifted to the right beforehand.
    """
    product = "mul.rn.bf16x2" if dtype == "bf16" else "mul.rn.f16x2"
    lines = [
        "{",
        ".reg .b32 u, v, s, m;",
        f"mov.b32 u, ${count};" if count == 4 else f"shr.u32 u, ${count}, ${count + 2};",
        "shr.u32 v, u, 8;",
    ]
    for i in range(count):
        lines += _pattern_bf16(i) if dtype == "bf16" else _pattern_fp16(i)
        if lift is not None:
            lines += [f"mov.b32 m, {lift:#x};", f"{product} s, s, m;"]
        lines += [f"{product} ${i}, s, ${count + 1};"]
    return "\n".join([*lines, "}"])


_MX_LIFT = 0x7E807E80  # 2^126, which makes numbers of the patterns
_DECODE_BF16, _DECODE_BF16_2 = gl.constexpr(_nibbles("bf16", 4)), gl.constexpr(_nibbles("bf16", 2))
_DECODE_FP16, _DECODE_FP16_2 = gl.constexpr(_nibbles("fp16", 4)), gl.constexpr(_nibbles("fp16", 2))
_DECODE_BF16_MX, _DECODE_BF16_MX_2 = (gl.constexpr(_nibbles("bf16", n, _MX_LIFT)) for n in (4, 2))


def _e8m0_scales() -> str:
    """PTX from two words of two e8m0 bytes to two pairs of bf16 scales, byte by byte.

    The bits are bf16's exponent, but that 0 means 2^-127 and 255 NaN.
    """
    text = ["{", ".reg .b32 b, m, n, s;"]
    for i in range(2):
        text += [
            f"prmt.b32 b, $2, $3, 0x{i + 4:x}{i + 4:x}{i:x}{i:x};",
            "and.b32 b, b, 0x00FF00FF;",
            "shl.b32 m, b, 7;",
            "add.u32 n, b, 0x00010001;",
            "and.b32 n, n, 0x01000100;",
            "add.u32 s, b, 0x00FF00FF;",
            "and.b32 s, s, 0x01000100;",
            "xor.b32 s, s, 0x01000100;",
            "or.b32 n, n, s;",
            "shr.u32 n, n, 2;",
            f"or.b32 ${i}, m, n;",
        ]
    return "\n".join([*text, "}"])


def _e4m3_scales(dtype: str) -> str:
    """PTX from two words of four e4m3 bytes to four pairs of scales, byte by byte, lifted by 2^119 or, in fp16, by 2^7.

    Every e4m3 number, NaN too, is one in fp16, which the card converts to; and from there in bf16.
    """
    lift = "mov.b32 b, 0x7B007B00;" if dtype == "bf16" else "mov.b32 b, 0x58005800;"
    text = ["{", ".reg .b32 b, w, h;", ".reg .b16 l, u, x<4>;", ".reg .f32 f, g;", lift]
    for i in range(4):
        if i % 2 == 0:  # bytes i and i + 1 of both words
            text += [f"prmt.b32 w, $4, $5, 0x{i + 5:x}{i + 1:x}{i + 4:x}{i:x};", f"mov.b32 {{x{i}, x{i + 1}}}, w;"]
        text += [f"cvt.rn.f16x2.e4m3x2 h, x{i};"]
        if dtype == "bf16":
            text += ["mov.b32 {l, u}, h;", "cvt.f32.f16 f, l;", "cvt.f32.f16 g, u;", "cvt.rn.bf16x2.f32 h, g, f;"]
        text += [f"mul.rn.{dtype.replace('fp', 'f')}x2 ${i}, h, b;"]
    return "\n".join([*text, "}"])


_SCALE_BF16, _SCALE_FP16 = gl.constexpr(_e4m3_scales("bf16")), gl.constexpr(_e4m3_scales("fp16"))
_SCALE_BF16_MX = gl.constexpr(_e8m0_scales())


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
