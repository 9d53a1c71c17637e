"""y = x W_eᵀ·g + u b_eᵀ (+ bias) of few rows an expert, where reading the weight is all: no ring, no wait of warps.

A program has OUTPUTS rows of an expert's weight and at most 8 of its tokens; its WARPS split the sum among them. Each
thread loads its own codes, 64 columns of a row in a step, straight into registers as the left operand of `mma.sync`
wants them (`hopper_decode.py`: no nibble moves), all of a step's loads at once and the next step's beside it. x lies in
FRAGMENT order (`shrink.py`), so that its operand too is loaded in place. Written in Gluon for these two layouts.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .dependent import release_next, wait_for_previous
from .hopper_decode import decode, decode_scales
from .hopper_feed import expert_tiles

TOKENS = gl.constexpr(8)
CHUNK = gl.constexpr(256)
"""Columns that the four threads of a row take in a step; CHUNKS of them are in flight at once."""


@gluon.constexpr_function
def _powers(least, size):
    """The powers of two from `least` up to below `size`."""
    return [least << i for i in range((size // least).bit_length() - 1)]


@gluon.constexpr_function
def _bases(outputs, chunks, warps, thread, chunk):
    """(registers, lanes, warps) of `[WARPS, OUTPUTS, …]`, but for a thread's own columns.

    thread, chunk: what the four threads of a row and the chunks differ in, beyond the first two dims.
    """
    rest = [0] * len(chunk)
    registers = [[0, m, *rest] for m in _powers(8, outputs)]
    registers += [[0, 0, *(c * d for d in chunk)] for c in _powers(1, chunks)]
    lanes = [[0, 0, *(t * d for d in thread)] for t in (1, 2)] + [[0, m, *rest] for m in (1, 2, 4)]
    return registers, lanes, [[w, 0, *rest] for w in _powers(1, warps)]


@gluon.constexpr_function
def _words_layout(outputs, chunks, warps):
    """Of a step's codes as 16-bit words `[WARPS, OUTPUTS, words]`: 16 bytes a load."""
    registers, lanes, groups = _bases(outputs, chunks, warps, [16], [64])
    own = [[0, 0, w] for w in (1, 2, 4, 8)]
    return gl.DistributedLinearLayout(own + registers, lanes, groups, [], [warps, outputs, 64 * chunks])


@gluon.constexpr_function
def _blocks_layout(outputs, chunks, warps, b):
    """The same words by blocks `[WARPS, OUTPUTS, blocks, words]`."""
    registers, lanes, groups = _bases(outputs, chunks, warps, [64 // b, 0], [256 // b, 0])
    own = [[0, 0, 0, w] for w in _powers(1, b // 4)] + [[0, 0, k, 0] for k in _powers(1, 64 // b)]
    shape = [warps, outputs, 256 // b * chunks, b // 4]
    return gl.DistributedLinearLayout(own + registers, lanes, groups, [], shape)


@gluon.constexpr_function
def _scales_layout(outputs, chunks, warps):
    """Of the words that hold the block scales of a thread's 64 columns, `[WARPS, OUTPUTS, words]`."""
    registers, lanes, groups = _bases(outputs, chunks, warps, [1], [4])
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [warps, outputs, 4 * chunks])


@gluon.constexpr_function
def _x_layout(chunks, warps):
    """Of a step's x `[WARPS, TOKENS, columns]`."""
    registers, lanes, groups = _bases(8, chunks, warps, [64], [256])
    own = [[0, 0, c] for c in (1, 2, 4, 8, 16, 32)]
    return gl.DistributedLinearLayout(own + registers, lanes, groups, [], [warps, 8, 256 * chunks])


@gluon.jit
def _warp(WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]


@gluon.jit
def _second(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]


@gluon.jit
def _third(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def _locate(tile, offsets, E, E_POW2: gl.constexpr, AFTER: gl.constexpr):
    """(expert, first row, end row of the expert) of a tile of TOKENS rows; the end is 0 beyond the last.

    A program has one tile and would wait for loads by the expert's number, so it takes sums where `locate_tile` loads.
    """
    experts, begin, end, counts, until = expert_tiles(offsets, E, E_POW2, TOKENS, AFTER)
    mine = (until > tile) & (until - counts <= tile)
    expert = gl.sum(gl.where(mine, experts, 0), 0)
    row = gl.sum(gl.where(mine, begin + (tile - until + counts) * TOKENS, 0), 0)
    return expert, row, gl.sum(gl.where(mine, end, 0), 0)


@gluon.jit
def _left(
    words, scale, B: gl.constexpr, OUTPUTS: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr,
    OPERAND: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A step's weights `[WARPS, OUTPUTS, columns]` from its words and the words of its scales."""
    MX: gl.constexpr = B == 32
    BLOCKS: gl.constexpr = _blocks_layout(OUTPUTS, CHUNKS, WARPS, B)
    COLUMNS: gl.constexpr = CHUNK * CHUNKS
    scale = decode_scales(scale.reshape([WARPS * OUTPUTS, COLUMNS // 64]), DTYPE, MX)
    scale = scale.reshape([WARPS, OUTPUTS, COLUMNS // B])
    scale = gl.convert_layout(scale, gl.SliceLayout(3, BLOCKS), assert_trivial=True).expand_dims(3)
    words = gl.convert_layout(words.reshape([WARPS, OUTPUTS, COLUMNS // B, B // 4]), BLOCKS, assert_trivial=True)
    a, b, c, d = decode(words, scale, DTYPE, MX)
    # A column's number is: chunk, thread, bits 3 to 0 of the word, bits 0 and 1 of the nibble. A register pairs words.
    quads = gl.join(gl.join(a, b), gl.join(c, d)).reshape([WARPS, OUTPUTS, CHUNKS, 4, 2, 4, 2, 2, 2])
    left = quads.permute((0, 1, 2, 4, 8, 7, 5, 3, 6)).reshape([WARPS, OUTPUTS, COLUMNS])
    return gl.convert_layout(left, OPERAND, assert_trivial=True)


@gluon.jit
def _right(x, CHUNKS: gl.constexpr, WARPS: gl.constexpr, OPERAND: gl.constexpr):
    """A step's x, with its columns in the order of `_left`."""
    x = x.reshape([WARPS, TOKENS, CHUNKS, 4, 2, 4, 4, 2]).permute((0, 2, 4, 5, 6, 3, 7, 1))
    return gl.convert_layout(x.reshape([WARPS, CHUNK * CHUNKS, TOKENS]), OPERAND, assert_trivial=True)


@gluon.jit
def _add_step(
    acc, x, codes, scales, tokens, outputs, k, C: gl.constexpr, B: gl.constexpr, X_WIDTH: gl.constexpr,
    OUTPUTS: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """acc + the products of the columns from k on, CHUNKS · CHUNK for each warp."""
    WORDS: gl.constexpr = _words_layout(OUTPUTS, CHUNKS, WARPS)
    SCALES: gl.constexpr = _scales_layout(OUTPUTS, CHUNKS, WARPS)
    X: gl.constexpr = _x_layout(CHUNKS, WARPS)
    COLUMNS: gl.constexpr = CHUNK * CHUNKS
    row, word = _second(OUTPUTS, WORDS), _warp(WARPS, WORDS) * (COLUMNS // 4) + _third(COLUMNS // 4, WORDS)
    inside = (row < outputs) & (word < (C - k) // 4)
    words = gl.load(codes + row * (C // 4) + word + k // 4, mask=inside, other=0)
    row, word = _second(OUTPUTS, SCALES), _warp(WARPS, SCALES) * (COLUMNS // 64) + _third(COLUMNS // 64, SCALES)
    inside = (row < outputs) & (word < (C - k) // 64)
    scale = gl.load(scales + row * (C // 64) + word + k // 64, mask=inside, other=0)
    token, column = _second(TOKENS, X), _warp(WARPS, X) * COLUMNS + _third(COLUMNS, X)
    inside = (token < tokens) & (column < X_WIDTH - k)
    right = gl.load(x + token * X_WIDTH + column + k, mask=inside, other=0.0)
    left = _left(words, scale, B, OUTPUTS, CHUNKS, WARPS, gl.DotOperandLayout(0, MMA, 2), DTYPE)
    return mma_v2(left, _right(right, CHUNKS, WARPS, gl.DotOperandLayout(1, MMA, 2)), acc)


@gluon.jit
def _sum(
    x, codes, scales, tokens, outputs, C: gl.constexpr, B: gl.constexpr, X_WIDTH: gl.constexpr, OUTPUTS: gl.constexpr,
    CHUNKS: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Each warp's part of x Wᵀ, transposed: `[WARPS, OUTPUTS, TOKENS]`. The pointers are the tile's first row's."""
    acc = gl.zeros([WARPS, OUTPUTS, TOKENS], gl.float32, MMA)
    STEP: gl.constexpr = CHUNK * CHUNKS * WARPS
    if C <= 8 * STEP:  # unrolled, so that the loads of all steps run ahead; longer code would not stay in its cache
        for k in gl.static_range(0, C, STEP):
            acc = _add_step(
                acc, x, codes, scales, tokens, outputs, k, C, B, X_WIDTH, OUTPUTS, CHUNKS, WARPS, MMA, DTYPE
            )  # fmt: skip
    else:
        for k in range(0, C, STEP):
            acc = _add_step(
                acc, x, codes, scales, tokens, outputs, k, C, B, X_WIDTH, OUTPUTS, CHUNKS, WARPS, MMA, DTYPE
            )  # fmt: skip
    return acc


@gluon.jit
def _add_lora(
    acc, factor, u, tokens, outputs, lora_r, R: gl.constexpr, OUTPUTS: gl.constexpr, WARPS: gl.constexpr,
    MMA: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """acc + b uᵀ: the warps, which hold parts of a sum, take 16 ranks each."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    m, token = _second(OUTPUTS, LEFT), _third(TOKENS, RIGHT)
    for first in gl.static_range(0, R, 16 * WARPS):
        r = first + _warp(WARPS, LEFT) * 16 + _third(16, LEFT)
        f = gl.load(factor + m * lora_r + r, mask=(m < outputs) & (r < lora_r), other=0.0).to(DTYPE)
        r = first + _warp(WARPS, RIGHT) * 16 + _second(16, RIGHT)
        acc = mma_v2(f, gl.load(u + token * lora_r + r, mask=(token < tokens) & (r < lora_r), other=0.0), acc)
    return acc


@gluon.jit
def few_rows_product(
    x, row_scale, codes, scales, global_scale, factor, u, bias, slots, slot_weights, offsets, out, N, lora_r, tiles_m,
    E, E_POW2: gl.constexpr, C: gl.constexpr, B: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
    X_WIDTH: gl.constexpr, OUTPUTS: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr,
    WEIGHTED_BIAS: gl.constexpr, UNIT: gl.constexpr, DTYPE: gl.constexpr, AFTER: gl.constexpr,
    PDL: gl.constexpr = False,
):  # fmt: skip
    """y `[M, N]` from rows x `[M, X_WIDTH]`; a program for each tile of TOKENS rows and OUTPUTS columns."""
    wait_for_previous(PDL)
    release_next(PDL)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    expert, row, end = _locate(gl.program_id(0) // tiles_m, offsets, E, E_POW2, AFTER)
    if row < end:
        m0 = gl.program_id(0) % tiles_m * OUTPUTS
        first = expert.to(gl.int64) * N + m0  # row of the weight
        tokens, outputs = end - row, N - m0
        acc = _sum(
            x + row.to(gl.int64) * X_WIDTH,
            codes.to(gl.pointer_type(gl.int16), bitcast=True) + first * (C // 4),
            scales.to(gl.pointer_type(gl.int16 if B == 32 else gl.int32), bitcast=True) + first * (C // 64),
            tokens, outputs, C, B, X_WIDTH, OUTPUTS, CHUNKS, WARPS, MMA, DTYPE,
        )  # fmt: skip
        if S == 2:
            g0 = gl.load(global_scale + expert * 2) * UNIT
            g1 = gl.load(global_scale + expert * 2 + 1) * UNIT
            acc = acc * gl.where(m0 + _second(OUTPUTS, MMA) < N // 2, g0, g1)
        else:
            acc = acc * (gl.load(global_scale + expert) * UNIT)
        if row_scale is not None:
            token = _third(TOKENS, MMA)
            acc = acc * gl.load(row_scale + row + token, mask=token < tokens, other=0.0)
        if R > 0:
            acc = _add_lora(
                acc, factor + first * lora_r, u + row.to(gl.int64) * lora_r, tokens, outputs, lora_r, R, OUTPUTS,
                WARPS, MMA, DTYPE,
            )  # fmt: skip
        y = gl.sum(acc, 0)
        m = gl.arange(0, OUTPUTS, gl.SliceLayout(1, y.type.layout))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, y.type.layout))[None, :]
        if bias is not None:
            added = gl.load(bias + first + m, mask=m < outputs, other=0.0).to(gl.float32)
            if WEIGHTED_BIAS:
                slot = gl.load(slots + row + token, mask=token < tokens, other=0)
                added = added * gl.load(slot_weights + slot, mask=token < tokens, other=0.0).to(gl.float32)
            y = y + added
        place = out + row.to(gl.int64) * N + m0 + token * N + m
        gl.store(place, y.to(DTYPE), mask=(token < tokens) & (m < outputs))
