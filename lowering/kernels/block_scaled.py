"""y = x W_eᵀ·g + u b_eᵀ (+ bias) of 4-bit rows with NVFP4 weights, by the matrix instructions that take both packed.

For cards with block-scaled products of e2m1 under e4m3 scales per 16 (sm_100 and sm_120 families). Nothing is decoded:
the instruction multiplies codes and block scales, and the fp32 scales (of the row, of the half of the weight) meet the
accumulator. Rows are read where the quantised tokens lie.
"""

import triton
import triton.language as tl

from .grouped_gemm import finish_tile
from .tiles import locate_tile, token_rows

E2M1 = tl.constexpr("e2m1")


@triton.jit
def _codes_tile(codes, scales, rows, mask, byte, C: tl.constexpr, BYTES: tl.constexpr):
    """(codes `[rows, BYTES]`, block scales `[rows, BYTES / 8]`) of rows of a packed matrix, zero beyond C."""
    columns = byte + tl.arange(0, BYTES)
    blocks = byte // 8 + tl.arange(0, BYTES // 8)
    codes_mask, scales_mask = mask & (columns < C // 2)[None, :], mask & (blocks < C // 16)[None, :]
    tile = tl.load(codes + rows * (C // 2) + columns[None, :], mask=codes_mask, other=0)
    scale = tl.load(scales + rows * (C // 16) + blocks[None, :], mask=scales_mask, other=0)
    return tile, scale.to(tl.float8e4nv, bitcast=True)


@triton.jit
def block_scaled_linear(
    x, x_scales, row_scale, x_slots, top_k, codes, scales, global_scale, lora_b, u, bias, slots, slot_weights, offsets,
    y, N, lora_r,
    E, E_POW2: tl.constexpr, C: tl.constexpr, S: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, BYTES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    WEIGHTED_BIAS: tl.constexpr, DTYPE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Routed row m is row x_slots[m] // top_k of x, x_scales and row_scale, or row m itself without slots."""
    tiles_n = tl.cdiv(N, OUTPUTS)
    tile = tl.program_id(0)
    expert, row, end = locate_tile(tile // tiles_n, offsets, E, E_POW2, TOKENS, AFTER)
    if row < end:
        rows = row + tl.arange(0, TOKENS)
        inside = rows < end
        source = token_rows(x_slots, rows, inside, top_k)
        n = tile % tiles_n * OUTPUTS + tl.arange(0, OUTPUTS)
        weight_row = expert.to(tl.int64) * N + n
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for byte in tl.range(0, C // 2, BYTES, num_stages=STAGES):
            w_tile, w_scale = _codes_tile(codes, scales, weight_row[:, None], (n < N)[:, None], byte, C, BYTES)
            x_tile, x_scale = _codes_tile(x, x_scales, source[:, None], inside[:, None], byte, C, BYTES)
            acc = tl.dot_scaled(w_tile, w_scale, E2M1, tl.trans(x_tile), x_scale, E2M1, acc)
        finish_tile(
            acc, row_scale, source, global_scale, lora_b, u, bias, slots, slot_weights, y, expert, rows, end, n, N,
            lora_r, S, R, PRECISION, WEIGHTED_BIAS, 1.0, DTYPE,
        )  # fmt: skip
