"""Per-row passes around the grouped products: u = scaling · x f, the gather of token rows, and the split by columns."""

import triton
import triton.language as tl

from .tiles import locate_tile


@triton.jit
def store_rows(
    out, rows, row_mask, column, tile, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Store a tile of rows, as it is or SPLIT: even columns in the first half of the row, odd ones in the second."""
    start = out + rows.to(tl.int64)[:, None] * WIDTH
    if SPLIT:
        even, odd = tl.split(tl.reshape(tile, (ROWS, COLUMNS // 2, 2)))
        columns = column // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        mask = row_mask[:, None] & (columns < WIDTH // 2)
        tl.store(start + columns, even, mask=mask)
        tl.store(start + WIDTH // 2 + columns, odd, mask=mask)
    else:
        columns = column + tl.arange(0, COLUMNS)[None, :]
        tl.store(start + columns, tile, mask=row_mask[:, None] & (columns < WIDTH))


@triton.jit
def shrink(
    x, x_stride, slots, offsets, factor, u, out, scaling, lora_r, top_k,
    E, E_POW2: tl.constexpr, WIDTH: tl.constexpr, FACTOR_WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_RANK: tl.constexpr, X_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """u = scaling · x[slots // top_k] f, and the rows themselves into `out` (as they are, or SPLIT), zero-padded.

    f is `[R, FACTOR_WIDTH]` (BY_RANK, lora_a) or `[FACTOR_WIDTH, R]` (lora_b). With X_SPLIT, x already has its columns
    in the split order. Programs along axis 1 take R ranks each; the first of them also moves the rows.
    """
    expert, row, end = locate_tile(tl.program_id(0), offsets, E, E_POW2, ROWS)
    if row < end:
        rows = row + tl.arange(0, ROWS)
        inside = rows < end
        source = rows.to(tl.int64)
        if slots is not None:
            source = (tl.load(slots + rows, mask=inside, other=0) // top_k).to(tl.int64)
        x_rows = x + source[:, None] * x_stride
        if R > 0:
            r = tl.program_id(1) * R + tl.arange(0, R)
            factor_e = factor + expert.to(tl.int64) * lora_r * FACTOR_WIDTH
            acc = tl.zeros((ROWS, R), tl.float32)
        for column in range(0, WIDTH if out is None else OUT_WIDTH, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            tile = tl.load(x_rows + columns[None, :], mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)
            if R > 0:
                c = columns
                if X_SPLIT:
                    c = tl.where(columns < WIDTH // 2, 2 * columns, 2 * columns - WIDTH + 1)
                if BY_RANK:
                    where_f = r[None, :] * FACTOR_WIDTH + c[:, None]
                else:
                    where_f = c[:, None] * lora_r + r[None, :]
                f = tl.load(factor_e + where_f, mask=(c < FACTOR_WIDTH)[:, None] & (r < lora_r)[None, :], other=0.0)
                acc = tl.dot(tile, f.to(DTYPE), acc, input_precision=PRECISION)
            if out is not None:
                if tl.program_id(1) == 0:
                    store_rows(out, rows, inside, column, tile, OUT_WIDTH, ROWS, COLUMNS, SPLIT)
        if R > 0:
            where = rows.to(tl.int64)[:, None] * lora_r + r[None, :]
            tl.store(u + where, (acc * scaling).to(DTYPE), mask=inside[:, None] & (r < lora_r)[None, :])
