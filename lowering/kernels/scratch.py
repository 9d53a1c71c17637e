"""The rival of decoding in the loop: a slice of the weight decoded to half precision, then a dense grouped product.

With many rows an expert, decoding once per slice costs less than decoding again for every tile of rows. A slice is a
range of experts × a range of output columns and lies in a bounded buffer (see `lowering/scratch.py`).
"""

import triton
import triton.language as tl

from .decode import decode_pair, lifted_scale, spread
from .tiles import locate_tile


@triton.jit(do_not_specialize=["first_expert", "first_row", "first_byte", "rows", "bytes_"])
def decode_slice(
    codes, scales, out, N, first_expert, first_row, first_byte, rows, bytes_,
    C: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, PACKED_ASM: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """out[expert, row, column] = code · scale / unit for a box of the weight; `out` is contiguous."""
    MX: tl.constexpr = B == 32
    HALF_B: tl.constexpr = B // 2
    expert = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BYTES
    columns = column + tl.arange(0, BYTES)
    blocks = (first_byte + column) // HALF_B + tl.arange(0, BYTES // HALF_B)
    weight_row = (first_expert + expert).to(tl.int64) * N + first_row + row
    inside = (row < rows)[:, None]
    packed = tl.load(
        codes + weight_row[:, None] * (C // 2) + (first_byte + columns)[None, :],
        mask=inside & (columns < bytes_)[None, :], other=0,
    )  # fmt: skip
    block = tl.load(
        scales + weight_row[:, None] * (C // B) + blocks[None, :], mask=inside & (blocks < C // B)[None, :], other=0
    )
    scale = spread(lifted_scale(block, DTYPE, MX), ROWS, BYTES // HALF_B, HALF_B)
    tl.static_assert(scale.dtype == DTYPE, "decoded weights of this format do not fit the scratch's dtype")
    low, high = decode_pair(packed, scale, DTYPE, MX, PACKED_ASM)
    c = 2 * column + tl.arange(0, 2 * BYTES)
    where = (expert.to(tl.int64) * rows + row)[:, None] * (2 * bytes_) + c[None, :]
    tl.store(out + where, tl.interleave(low, high), mask=inside & (c < 2 * bytes_)[None, :])


@triton.jit
def _accumulate(
    acc, x, weight, row, weight_base, column, k_begin, k_end,
    TRANSPOSED: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for k in tl.range(k_begin, k_end, DEPTH, num_stages=STAGES):
        x_tile = x.load([row, k])
        if TRANSPOSED:  # dgrad: the contraction runs over the weight's rows
            acc = tl.dot(x_tile, weight.load([weight_base + k, column]), acc)
        else:
            acc = tl.dot(x_tile, tl.trans(weight.load([weight_base + column, k])), acc)
    return acc


# Slices differ in these only; one compiled kernel serves them all, so that it can be launched again without a look-up.
_PER_SLICE = ["first_expert", "experts", "first_column", "columns", "weight_rows", "programs"]


@triton.jit(do_not_specialize=_PER_SLICE)
def grouped_dense(
    x, weight, global_scale, factor, u, bias, slots, slot_weights, offsets, y,
    out_width, depth_total, lora_r, first_expert, experts, first_column, columns, weight_rows, programs,
    E, E_POW2: tl.constexpr, S: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, TRANSPOSED: tl.constexpr, WEIGHTED_BIAS: tl.constexpr,
    UNIT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One slice of y (linear) or of gx (TRANSPOSED), by a fixed number of programs: how many tiles a slice has depends
    on the routing, which the host does not know. x and weight come through TMA descriptors.
    """
    begin = tl.load(offsets + first_expert - 1, mask=first_expert > 0, other=0)
    end = tl.load(offsets + first_expert + experts - 1)
    first_tile = begin // TOKENS + first_expert
    row_tiles = end // TOKENS + first_expert + experts - first_tile
    column_tiles = tl.cdiv(columns, OUTPUTS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, programs):
        # Rows first: the rows of a slice stay in L2 while its weight, as large as all of L2, streams by once.
        expert, row, row_end = locate_tile(first_tile + tile % row_tiles, offsets, E, E_POW2, TOKENS)
        if row < row_end:
            local = tile // row_tiles * OUTPUTS
            base = (expert - first_expert) * weight_rows
            acc = tl.zeros((TOKENS, OUTPUTS), tl.float32)
            n = local + tl.arange(0, OUTPUTS)
            n_inside = n < columns
            n += first_column
            if TRANSPOSED and S == 2:
                # The half with the smaller global scale first: then the ratio is at most 1 and nothing overflows.
                half = depth_total // 2
                g0 = tl.load(global_scale + expert * 2)
                g1 = tl.load(global_scale + expert * 2 + 1)
                swap = tl.abs(g0) > tl.abs(g1)
                g = tl.where(swap, g0, g1)
                ratio = tl.where(g == 0.0, 0.0, tl.where(swap, g1, g0) / tl.where(g == 0.0, 1.0, g))
                small = tl.where(swap, half, 0)
                acc = _accumulate(acc, x, weight, row, base, local, small, small + half, True, DEPTH, STAGES)
                acc *= ratio
                acc = _accumulate(
                    acc, x, weight, row, base, local, half - small, depth_total - small, True, DEPTH, STAGES
                )
                acc *= g * UNIT
            else:
                acc = _accumulate(acc, x, weight, row, base, local, 0, depth_total, TRANSPOSED, DEPTH, STAGES)
                if S == 2:
                    g0 = tl.load(global_scale + expert * 2) * UNIT
                    g1 = tl.load(global_scale + expert * 2 + 1) * UNIT
                    acc *= tl.where(n < out_width // 2, g0, g1)[None, :]
                else:
                    acc *= tl.load(global_scale + expert) * UNIT

            rows = row + tl.arange(0, TOKENS)
            inside = rows < row_end
            for first_rank in tl.static_range(0, R, 32):
                r = first_rank + tl.arange(0, min(R, 32))
                u_tile = tl.load(
                    u + rows.to(tl.int64)[:, None] * lora_r + r[None, :],
                    mask=inside[:, None] & (r < lora_r)[None, :], other=0.0,
                )  # fmt: skip
                factor_e = factor + expert.to(tl.int64) * lora_r * out_width
                if TRANSPOSED:
                    where_f = r[:, None] * out_width + n[None, :]
                else:
                    where_f = n[None, :] * lora_r + r[:, None]
                f_tile = tl.load(factor_e + where_f, mask=(r < lora_r)[:, None] & n_inside[None, :], other=0.0)
                acc = tl.dot(u_tile, f_tile.to(DTYPE), acc)
            if bias is not None:
                bias_tile = tl.load(bias + expert.to(tl.int64) * out_width + n, mask=n_inside, other=0.0)
                bias_tile = bias_tile.to(tl.float32)[None, :]
                if WEIGHTED_BIAS:
                    slot = tl.load(slots + rows, mask=inside, other=0)
                    bias_tile = bias_tile * tl.load(slot_weights + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
                acc += bias_tile
            where = rows.to(tl.int64)[:, None] * out_width + n[None, :]
            tl.store(y + where, acc.to(DTYPE), mask=inside[:, None] & n_inside[None, :])
