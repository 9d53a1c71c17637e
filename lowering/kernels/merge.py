"""W + scaling · b a, packed again on W's own global scale: to the bit what `torch_nvfp4.ops.merge` gives."""

import triton
import triton.language as tl

from .decode import block_scale, decode_pair
from .quantize import encode, magnitude_bits


@triton.jit
def round_factor(factor, out, total, inner, R: tl.constexpr, OUT_R: tl.constexpr, SIZE: tl.constexpr):
    """A factor [outer, R, inner] as merging reads it, in out's dtype: `torch_nvfp4.ops.merge.rounded_factor`.

    out is [outer, OUT_R, inner], `total` elements, of which those of ranks from R on are 0.
    """
    where = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside, source = where < total, where
    if OUT_R != R:
        rank = where // inner % OUT_R
        source = (where // inner // OUT_R * R + rank) * inner + where % inner
        inside &= rank < R
    value = tl.load(factor + source, mask=inside, other=0.0).to(tl.float32).to(tl.bfloat16).to(tl.float32)
    size = tl.abs(value)
    value = tl.where(size < 1.0842021724855044e-19, 0.0, value)  # 2^-63
    value = tl.where(size >= 1.8446744073709552e19, value * float("inf"), value)  # 2^64
    tl.store(out + where, value.to(out.dtype.element_ty), mask=where < total)


@triton.jit
def merge(
    codes, scales, global_scale, a, b, scaling, out_codes, out_scales, N, lora_r,
    C: tl.constexpr, B: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """TILES tiles, one below the other, of ROWS rows × BLOCKS blocks of one expert; a as pairs of bf16, b as fp32;
    lora_r a multiple of RANKS.

    A tile is a list of blocks and a thread owns half a block of each: what it reads of a for one tile serves all of
    them, and no value moves between threads but for a block's maximum. Launch without fused multiply-adds.
    """
    MX: tl.constexpr = B == 32
    expert = tl.program_id(2)
    place = tl.arange(0, ROWS * BLOCKS)
    first_row = tl.program_id(1) * (ROWS * TILES) + place // BLOCKS
    # What lies outside reads the last row or block again: masks in the loop would cost a third of its instructions.
    block = tl.program_id(0) * BLOCKS + place % BLOCKS
    block_inside = block < C // B
    block = tl.minimum(block, C // B - 1)
    a_r = a + (expert.to(tl.int64) * lora_r * C + (block * B)[:, None]) // 2 + tl.arange(0, B // 2)[None, :]
    b_rows, deltas = (), ()
    for tile in tl.static_range(TILES):
        row = tl.minimum(first_row + tile * ROWS, N - 1)
        b_rows += (b + (expert.to(tl.int64) * N + row) * lora_r,)  # type: ignore[assignment]
        deltas += (tl.zeros((ROWS * BLOCKS, B), tl.float32),)  # type: ignore[assignment]
    for r in range(0, lora_r, RANKS):
        for step in tl.static_range(RANKS):
            pair = tl.load(a_r + step * (C // 2))
            even, odd = (pair << 16).to(tl.float32, bitcast=True), (pair & -0x10000).to(tl.float32, bitcast=True)
            a_values = tl.interleave(even, odd)
            sums = ()
            for tile in tl.static_range(TILES):
                b_values = tl.load(b_rows[tile] + (r + step))
                b_values = tl.broadcast_to(b_values[:, None], a_values.shape)
                sums += (tl.fma(b_values, a_values, deltas[tile]),)  # type: ignore[assignment]
            deltas = sums
        a_r += RANKS * (C // 2)

    for tile in tl.static_range(TILES):
        row = first_row + tile * ROWS
        inside = (row < N) & block_inside
        row = tl.minimum(row, N - 1)
        delta = deltas[tile] * scaling
        where = (expert.to(tl.int64) * N + row) * (C // B) + block
        byte = tl.load(scales + where)
        code_where = where[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
        packed = tl.load(codes + code_where)
        g = tl.load(global_scale + expert * S + (0 if S == 1 else (row >= N // 2).to(tl.int32)))
        factor = tl.broadcast_to((block_scale(byte, MX) * g)[:, None], (ROWS * BLOCKS, B // 2))
        even, odd = decode_pair(packed, factor, tl.float32, True, False)
        fresh, fresh_byte = encode(tl.interleave(even, odd) + delta, tl.broadcast_to(g, (ROWS * BLOCKS,)), B, MX)
        changed = tl.max(magnitude_bits(delta), 1) != 0
        tl.store(out_scales + where, tl.where(changed, fresh_byte, byte), mask=inside)
        tl.store(out_codes + code_where, tl.where(changed[:, None], fresh, packed), mask=inside[:, None])
