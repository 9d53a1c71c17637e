"""The two grouped products with packed weights: y = x W_eᵀ·g + u b_eᵀ (+ bias) and gx = (gy·g) W_e + v a_e.

`x` comes in the order that `shrink.py` writes: routed rows, all even columns in the first half and all odd ones in the
second, each half padded with zeros to a multiple of the tile. Then the low nibbles of a tile of bytes meet one x tile
and the high nibbles another, and nothing is ever interleaved. A linear product's rows may have a scale each (4-bit
rows, see `rows.py`). Rows are multiplied in the decoded tile's dtype, which is theirs but for fp16 with MXFP4.
"""

import triton
import triton.language as tl

from .decode import decode_pair, lifted_scale, spread
from .tiles import locate_tile


@triton.jit
def _rows_tile(x, row, end, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """x[row : row + ROWS, column : column + COLUMNS] of a contiguous `[M, width]`, or through its TMA descriptor."""
    if TMA:
        # Rows after the expert's end are another expert's: they only reach results that are not stored.
        tile = x.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        mask = (rows < end)[:, None] & (columns < width)[None, :]
        tile = tl.load(x + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def settled(acc):
    """acc once every product issued so far is done with its operands.

    Triton lets a loop's last wgmma run on into the next step even where its left operand lies in registers, which that
    step then overwrites (seen with triton 3.6 and 3.7 on Hopper, as garbage in half of the rows of a few tile sizes).
    An accumulator that something else reads is waited for.
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _half_scales(global_scale, expert, n, N, S: tl.constexpr, UNIT: tl.constexpr):
    """The fp32 factor of each output row n."""
    first = tl.load(global_scale + expert * S) * UNIT
    if S == 2:
        second = tl.load(global_scale + expert * S + 1) * UNIT
        factor = tl.where(n < N // 2, first, second)
    else:
        factor = tl.where(n < N, first, 0.0)
    return factor


@triton.jit
def finish_tile(
    acc, row_scale, source, global_scale, lora_b, u, bias, slots, slot_weights, y, expert, rows, end, n, N, lora_r,
    S: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, WEIGHTED_BIAS: tl.constexpr, UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """y at rows × n from acc = W xᵀ `[outputs, tokens]`: scales, LoRA, bias. Row scales are found at `source`."""
    weight_row = expert.to(tl.int64) * N + n
    acc *= _half_scales(global_scale, expert, n, N, S, UNIT)[:, None]
    if row_scale is not None:
        acc *= tl.load(row_scale + source, mask=rows < end, other=0.0)[None, :]
    for first_rank in tl.static_range(0, R, 32):  # a piece at a time, so that no rank outgrows shared memory
        r = first_rank + tl.arange(0, min(R, 32))
        b_tile = tl.load(
            lora_b + weight_row[:, None] * lora_r + r[None, :],
            mask=(n < N)[:, None] & (r < lora_r)[None, :], other=0.0,
        )  # fmt: skip
        u_tile = tl.load(
            u + rows.to(tl.int64)[:, None] * lora_r + r[None, :],
            mask=(rows < end)[:, None] & (r < lora_r)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(b_tile.to(DTYPE), tl.trans(u_tile), acc, input_precision=PRECISION)
    if bias is not None:
        bias_tile = tl.load(bias + weight_row, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if WEIGHTED_BIAS:
            slot = tl.load(slots + rows, mask=rows < end, other=0)
            bias_tile = bias_tile * tl.load(slot_weights + slot, mask=rows < end, other=0.0).to(tl.float32)[None, :]
        acc += bias_tile
    where = rows.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y + where, acc.to(DTYPE), mask=(rows < end)[None, :] & (n < N)[:, None])


@triton.jit
def linear_tile(
    x, row_scale, codes, scales, global_scale, lora_b, u, bias, slots, slot_weights, y, expert, row, end, n_tile, N,
    lora_r,
    C: tl.constexpr, B: tl.constexpr, S: tl.constexpr, R: tl.constexpr, X_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, PACKED_ASM: tl.constexpr, WGMMA: tl.constexpr, PRECISION: tl.constexpr,
    WEIGHTED_BIAS: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of y, computed as W xᵀ: the decoded weight is the left operand and never leaves the registers."""
    MX: tl.constexpr = B == 32
    HALF_B: tl.constexpr = B // 2
    n = n_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_row = expert.to(tl.int64) * N + n
    codes_row = codes + weight_row[:, None] * (C // 2)
    scales_row = scales + weight_row[:, None] * (C // B)
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for byte in tl.range(0, C // 2, BYTES, num_stages=STAGES):
        columns = byte + tl.arange(0, BYTES)
        blocks = byte // HALF_B + tl.arange(0, BYTES // HALF_B)
        packed = tl.load(codes_row + columns[None, :], mask=(n < N)[:, None] & (columns < C // 2)[None, :], other=0)
        block = tl.load(scales_row + blocks[None, :], mask=(n < N)[:, None] & (blocks < C // B)[None, :], other=0)
        x_even = _rows_tile(x, row, end, byte, X_WIDTH, TOKENS, BYTES, TMA)
        x_odd = _rows_tile(x, row, end, X_WIDTH // 2 + byte, X_WIDTH, TOKENS, BYTES, TMA)
        scale = spread(lifted_scale(block, DTYPE, MX), OUTPUTS, BYTES // HALF_B, HALF_B)
        low, high = decode_pair(packed, scale, scale.dtype, MX, PACKED_ASM)
        acc = tl.dot(low, tl.trans(x_even.to(low.dtype)), acc, input_precision=PRECISION)
        acc = tl.dot(high, tl.trans(x_odd.to(high.dtype)), acc, input_precision=PRECISION)
        if WGMMA:
            acc = settled(acc)
    rows = row + tl.arange(0, TOKENS)
    finish_tile(
        acc, row_scale, rows, global_scale, lora_b, u, bias, slots, slot_weights, y, expert, rows, end, n, N, lora_r,
        S, R, PRECISION, WEIGHTED_BIAS, UNIT, DTYPE,
    )  # fmt: skip


@triton.jit
def grouped_linear(
    x, row_scale, codes, scales, global_scale, lora_b, u, bias, slots, slot_weights, offsets, y, N, lora_r,
    E, E_POW2: tl.constexpr, C: tl.constexpr, B: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    X_WIDTH: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, PACKED_ASM: tl.constexpr, WGMMA: tl.constexpr, PRECISION: tl.constexpr,
    WEIGHTED_BIAS: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, OUTPUTS)
    tile = tl.program_id(0)
    expert, row, end = locate_tile(tile // tiles_n, offsets, E, E_POW2, TOKENS, AFTER)
    if row < end:
        linear_tile(
            x, row_scale, codes, scales, global_scale, lora_b, u, bias, slots, slot_weights, y, expert, row, end,
            tile % tiles_n, N, lora_r, C, B, S, R, X_WIDTH, TOKENS, OUTPUTS, BYTES, STAGES, TMA, PACKED_ASM,
            WGMMA, PRECISION, WEIGHTED_BIAS, UNIT, DTYPE,
        )  # fmt: skip


@triton.jit
def _dgrad_half(
    acc_even, acc_odd, gy, codes, scales, expert, row, end, byte, n_begin, n_end, N,
    C: tl.constexpr, B: tl.constexpr, TOKENS: tl.constexpr, BYTES: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, PACKED_ASM: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add gy[:, n_begin : n_end] @ (weight rows n_begin … n_end), without the global scale."""
    MX: tl.constexpr = B == 32
    HALF_B: tl.constexpr = B // 2
    columns = byte + tl.arange(0, BYTES)
    blocks = byte // HALF_B + tl.arange(0, BYTES // HALF_B)
    first_row = expert.to(tl.int64) * N
    for n0 in tl.range(n_begin, n_end, DEPTH, num_stages=STAGES):
        n = n0 + tl.arange(0, DEPTH)
        weight_row = (first_row + n)[:, None]
        inside = (n < n_end)[:, None]
        codes_mask, scales_mask = inside & (columns < C // 2)[None, :], inside & (blocks < C // B)[None, :]
        packed = tl.load(codes + weight_row * (C // 2) + columns[None, :], mask=codes_mask, other=0)
        block = tl.load(scales + weight_row * (C // B) + blocks[None, :], mask=scales_mask, other=0)
        gy_tile = _rows_tile(gy, row, end, n0, N, TOKENS, DEPTH, TMA)
        scale = spread(lifted_scale(block, DTYPE, MX), DEPTH, BYTES // HALF_B, HALF_B)
        low, high = decode_pair(packed, scale, scale.dtype, MX, PACKED_ASM)
        gy_tile = gy_tile.to(low.dtype)
        acc_even = tl.dot(gy_tile, low, acc_even, input_precision=PRECISION)
        acc_odd = tl.dot(gy_tile, high, acc_odd, input_precision=PRECISION)
    return acc_even, acc_odd


@triton.jit
def grouped_dgrad(
    gy, codes, scales, global_scale, lora_a, v, offsets, gx, N, lora_r,
    E, E_POW2: tl.constexpr, C: tl.constexpr, B: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    TOKENS: tl.constexpr, BYTES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    PACKED_ASM: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Tiles of gx; the accumulators of even and of odd columns meet when they are stored."""
    tiles_c: tl.constexpr = (C // 2 + BYTES - 1) // BYTES
    program = tl.program_id(0)
    expert, row, end = locate_tile(program // tiles_c, offsets, E, E_POW2, TOKENS, AFTER)
    if row < end:
        byte = program % tiles_c * BYTES
        even = tl.zeros((TOKENS, BYTES), tl.float32)
        odd = tl.zeros((TOKENS, BYTES), tl.float32)
        if S == 2:
            # The half with the smaller global scale first: then the ratio is at most 1 and nothing overflows.
            half = N // 2
            g0 = tl.load(global_scale + expert * 2)
            g1 = tl.load(global_scale + expert * 2 + 1)
            swap = tl.abs(g0) > tl.abs(g1)
            g_small = tl.where(swap, g1, g0)
            g = tl.where(swap, g0, g1)
            ratio = tl.where(g == 0.0, 0.0, g_small / tl.where(g == 0.0, 1.0, g))
            small = tl.where(swap, half, 0)
            even, odd = _dgrad_half(
                even, odd, gy, codes, scales, expert, row, end, byte, small, small + half, N,
                C, B, TOKENS, BYTES, DEPTH, STAGES, TMA, PACKED_ASM, PRECISION, DTYPE,
            )  # fmt: skip
            even *= ratio
            odd *= ratio
            even, odd = _dgrad_half(
                even, odd, gy, codes, scales, expert, row, end, byte, half - small, N - small, N,
                C, B, TOKENS, BYTES, DEPTH, STAGES, TMA, PACKED_ASM, PRECISION, DTYPE,
            )  # fmt: skip
        else:
            g = tl.load(global_scale + expert)
            even, odd = _dgrad_half(
                even, odd, gy, codes, scales, expert, row, end, byte, 0, N, N,
                C, B, TOKENS, BYTES, DEPTH, STAGES, TMA, PACKED_ASM, PRECISION, DTYPE,
            )  # fmt: skip
        even *= g * UNIT
        odd *= g * UNIT

        rows = row + tl.arange(0, TOKENS)
        columns = byte + tl.arange(0, BYTES)
        for first_rank in tl.static_range(0, R, 32):
            r = first_rank + tl.arange(0, min(R, 32))
            v_tile = tl.load(
                v + rows.to(tl.int64)[:, None] * lora_r + r[None, :],
                mask=(rows < end)[:, None] & (r < lora_r)[None, :], other=0.0,
            )  # fmt: skip
            a_even = lora_a + (expert.to(tl.int64) * lora_r + r)[:, None] * C + 2 * columns[None, :]
            a_mask = (r < lora_r)[:, None] & (columns < C // 2)[None, :]
            even = tl.dot(v_tile, tl.load(a_even, mask=a_mask, other=0.0).to(DTYPE), even, input_precision=PRECISION)
            odd = tl.dot(v_tile, tl.load(a_even + 1, mask=a_mask, other=0.0).to(DTYPE), odd, input_precision=PRECISION)
        c = 2 * byte + tl.arange(0, 2 * BYTES)
        where = rows.to(tl.int64)[:, None] * C + c[None, :]
        tile = tl.interleave(even.to(DTYPE), odd.to(DTYPE))
        tl.store(gx + where, tile, mask=(rows < end)[:, None] & (c < C)[None, :])
