"""Activation × router weight, before the down projection."""

import triton
import triton.language as tl

from .activation import activation_tile
from .dependent import wait_for_previous
from .shrink import store_rows


@triton.jit
def glu_forward(
    pre, pre_stride, slot_weights, slots, offsets, h,
    E, WIDTH: tl.constexpr, H_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ORDER: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """h = act(pre) · router weight, in the column order that the next product reads, zero-padded."""
    wait_for_previous(PDL)
    column_tiles: tl.constexpr = (H_WIDTH + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    rows = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tile % column_tiles * COLUMNS
    inside = rows < tl.load(offsets + E - 1)
    slot = tl.load(slots + rows, mask=inside, other=0)
    router = tl.load(slot_weights + slot, mask=inside, other=0.0).to(tl.float32)
    columns = column + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (columns < WIDTH)[None, :]
    pre_rows = pre + rows.to(tl.int64)[:, None] * pre_stride
    act, _, _ = activation_tile(pre_rows, columns, mask, WIDTH, ACTIVATION, LIMIT)
    store_rows(h, rows, inside, column, (act * router[:, None]).to(DTYPE), H_WIDTH, ROWS, COLUMNS, ORDER)
