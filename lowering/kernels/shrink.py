"""Per-row passes around the grouped products: u = scaling · x f, the gather of token rows, and their column order.

A product that decodes in its loop wants x's columns in the order in which the nibbles of its weight lie in registers.
SPLIT: all even columns in the first half of the row, all odd ones in the second. FRAGMENT: the columns of each 32
permuted, such that column 8t + 4b + 2j + h comes to place 16j + 8h + 2t + b (t < 4, the others < 2).
"""

import triton
import triton.language as tl

from .activation import activation_tile
from .dependent import release_next, wait_for_previous
from .tiles import in_turns, locate_tile, token_rows

PLAIN = tl.constexpr(0)
SPLIT = tl.constexpr(1)
FRAGMENT = tl.constexpr(2)


@triton.jit
def factor_tile(
    factor, column, r, lora_r, WIDTH: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr,
    BY_RANK: tl.constexpr, ORDER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """An expert's factor `[COLUMNS, R]` for the columns that lie from place `column` on in rows of this order.

    Rows are PADDED wide. FRAGMENT is permuted here: as addresses it would read memory one number at a time.
    """
    places = column + tl.arange(0, COLUMNS)
    c = places
    if ORDER == SPLIT:
        c = tl.where(places < PADDED // 2, 2 * places, 2 * places - PADDED + 1)
    if BY_RANK:
        where = r[None, :] * WIDTH + c[:, None]
    else:
        where = c[:, None] * lora_r + r[None, :]
    tile = tl.load(factor + where, mask=(c < WIDTH)[:, None] & (r < lora_r)[None, :], other=0.0).to(DTYPE)
    if ORDER == FRAGMENT:
        tile = tl.permute(tl.reshape(tile, (COLUMNS // 32, 4, 2, 2, 2, R)), (0, 3, 4, 1, 2, 5))
        tile = tl.reshape(tile, (COLUMNS, R))
    return tile


@triton.jit
def store_rows(
    out, rows, row_mask, column, tile, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ORDER: tl.constexpr, STREAM: tl.constexpr = False,
):  # fmt: skip
    """Store a tile of rows whose columns begin at `column`, in this column order."""
    MODIFIER: tl.constexpr = ".cs" if STREAM else ""
    start = out + rows.to(tl.int64)[:, None] * WIDTH
    if ORDER == SPLIT:
        even, odd = tl.split(tl.reshape(tile, (ROWS, COLUMNS // 2, 2)))
        columns = column // 2 + tl.arange(0, COLUMNS // 2)[None, :]
        mask = row_mask[:, None] & (columns < WIDTH // 2)
        tl.store(start + columns, even, mask=mask, cache_modifier=MODIFIER)
        tl.store(start + WIDTH // 2 + columns, odd, mask=mask, cache_modifier=MODIFIER)
    else:
        if ORDER == FRAGMENT:
            tile = tl.permute(tl.reshape(tile, (ROWS, COLUMNS // 32, 4, 2, 2, 2)), (0, 1, 4, 5, 2, 3))
            tile = tl.reshape(tile, (ROWS, COLUMNS))
        columns = column + tl.arange(0, COLUMNS)[None, :]
        tl.store(start + columns, tile, mask=row_mask[:, None] & (columns < WIDTH), cache_modifier=MODIFIER)


@triton.jit
def shrink(
    x, x_stride, slots, offsets, factor, u, out, scaling, lora_r, top_k, moved, moved_scale, row_scale,
    E, E_POW2: tl.constexpr, WIDTH: tl.constexpr, FACTOR_WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_RANK: tl.constexpr, X_ORDER: tl.constexpr,
    ORDER: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, STREAM: tl.constexpr = False,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """u = scaling · x[slots // top_k] f, and the rows themselves into `out` in column order ORDER, zero-padded.

    f is `[R, FACTOR_WIDTH]` (BY_RANK, lora_a) or `[FACTOR_WIDTH, R]` (lora_b); x has its columns in order X_ORDER.
    Programs along axis 1 take R ranks each; the first of them also moves the rows. moved: rows to move in place of x's,
    OUT_WIDTH wide and in their order already, and a scale of each to `row_scale`.
    """
    wait_for_previous(PDL)
    tile_number = tl.program_id(0)
    if slots is not None:
        tile_number = in_turns(tile_number, tl.num_programs(0), E)
    expert, row, end = locate_tile(tile_number, offsets, E, E_POW2, ROWS)
    if row < end:
        rows = row + tl.arange(0, ROWS)
        inside = rows < end
        source = token_rows(slots, rows, inside, top_k)
        x_rows = x + source[:, None] * x_stride
        if moved is not None:
            if tl.program_id(1) == 0:
                tl.store(row_scale + rows, tl.load(moved_scale + source, mask=inside, other=0.0), mask=inside)
        if R > 0:
            r = tl.program_id(1) * R + tl.arange(0, R)
            factor_e = factor + expert.to(tl.int64) * lora_r * FACTOR_WIDTH
            acc = tl.zeros((ROWS, R), tl.float32)
        for column in range(0, WIDTH if out is None else OUT_WIDTH, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            tile = tl.load(x_rows + columns[None, :], mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)
            if R > 0:
                f = factor_tile(
                    factor_e, column, r, lora_r, FACTOR_WIDTH, WIDTH, COLUMNS, R, BY_RANK, X_ORDER, DTYPE
                )  # fmt: skip
                acc = tl.dot(tile, f, acc, input_precision=PRECISION)
            if out is not None:
                if tl.program_id(1) == 0:
                    if moved is None:
                        store_rows(out, rows, inside, column, tile, OUT_WIDTH, ROWS, COLUMNS, ORDER, STREAM)
                    else:
                        mask = inside[:, None] & (columns < OUT_WIDTH)[None, :]
                        moved_tile = tl.load(
                            moved + source[:, None] * OUT_WIDTH + columns[None, :], mask=mask, other=0.0
                        )
                        store_rows(out, rows, inside, column, moved_tile, OUT_WIDTH, ROWS, COLUMNS, ORDER)
        if R > 0:
            where = rows.to(tl.int64)[:, None] * lora_r + r[None, :]
            tl.store(u + where, (acc * scaling).to(DTYPE), mask=inside[:, None] & (r < lora_r)[None, :])


@triton.jit
def shrink_row(
    x, x_stride, slots, slot_weights, offsets, factor, u, out, scaling, lora_r, top_k,
    E, E_POW2: tl.constexpr, WIDTH: tl.constexpr, FACTOR_WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    R: tl.constexpr, COLUMNS: tl.constexpr, BY_RANK: tl.constexpr, X_ORDER: tl.constexpr, ORDER: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """`shrink` of one row a program, and R ranks: a sum of its own for each, which all of a processor's cores share.

    With an ACTIVATION the rows are those of `glu_forward`, h = act(x) · router weight, with x where it lies.
    """
    wait_for_previous(PDL)
    release_next(PDL)
    row = tl.program_id(0)
    experts = tl.arange(0, E_POW2)
    ends = tl.load(offsets + experts, mask=experts < E, other=0)
    expert = tl.sum(((ends <= row) & (experts < E)).to(tl.int32), 0)
    if expert < E:
        rows = row + tl.arange(0, 1)
        if ACTIVATION is None:
            source = token_rows(slots, rows, rows >= 0, top_k)[:, None]
        else:
            source = rows.to(tl.int64)[:, None]
            router = tl.load(slot_weights + tl.load(slots + rows)).to(tl.float32)[:, None]
        r = tl.program_id(1) * R + tl.arange(0, R)
        factor_e = factor + expert.to(tl.int64) * lora_r * FACTOR_WIDTH
        acc = tl.zeros((R,), tl.float32)
        for column in range(0, WIDTH if out is None else OUT_WIDTH, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = (columns < WIDTH)[None, :]
            if ACTIVATION is None:
                tile = tl.load(x + source * x_stride + columns[None, :], mask=mask, other=0.0)
            else:
                act, _, _ = activation_tile(x + source * x_stride, columns, mask, WIDTH, ACTIVATION, LIMIT)
                tile = (act * router).to(DTYPE)
            f = factor_tile(
                factor_e, column, r, lora_r, FACTOR_WIDTH, WIDTH, COLUMNS, R, BY_RANK, X_ORDER, DTYPE
            )  # fmt: skip
            acc += tl.sum(f.to(tl.float32) * tl.reshape(tile, (COLUMNS, 1)).to(tl.float32), 0)
            if out is not None:
                if tl.program_id(1) == 0:
                    store_rows(out, rows, rows >= 0, column, tile, OUT_WIDTH, 1, COLUMNS, ORDER)
        where = row.to(tl.int64) * lora_r + r
        tl.store(u + where, (acc * scaling).to(DTYPE), mask=r < lora_r)
