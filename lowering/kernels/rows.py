"""Rows in NVFP4, on an fp32 scale each or on one for all: as `torch_nvfp4.ops.rows` to the bit. See `quantize.py`."""

import triton
import triton.language as tl

from .activation import activation_tile
from .decode import block_scale, decode_pair
from .quantize import amax_scale, encode, magnitude_bits
from .shrink import store_rows


@triton.jit
def _tile(x_rows, columns, mask, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION is None:
        tile = tl.load(x_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        tile, _, _ = activation_tile(x_rows, columns, mask, WIDTH, ACTIVATION, LIMIT)
    return tile


@triton.jit
def quantize_rows(
    x, x_stride, slot_weights, slots, offsets, input_scale, row_scale, out, codes, scales, h, M,
    E, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ORDER: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x or, with an ACTIVATION, of act(x) rounded to DTYPE: their scales and blocks.

    out: code · block scale as DTYPE, exact, in column order ORDER, zero-padded; without it `codes` `[M, WIDTH / 2]` and
    `scales` `[M, WIDTH / 16]`. With slot weights the row scale is weighted, and h, where given, gets the unquantised
    act(x) · weight. input_scale is the scale of all rows; without one a row is read twice, the second time out of a
    cache. Launch without fused multiply-adds.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < (M if offsets is None else tl.load(offsets + E - 1))
    row64 = rows.to(tl.int64)
    x_rows = x + row64[:, None] * x_stride
    if input_scale is None:
        largest = tl.zeros((ROWS, COLUMNS), tl.int32)
        for column in range(0, WIDTH, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (columns < WIDTH)[None, :]
            bits = magnitude_bits(_tile(x_rows, columns, mask, WIDTH, ACTIVATION, LIMIT).to(DTYPE))
            largest = tl.maximum(largest, tl.where(bits < 0x7F800000, bits, 0))
        scale = amax_scale(tl.max(largest, 1).to(tl.float32, bitcast=True))
    else:
        scale = tl.broadcast_to(tl.load(input_scale), (ROWS,))

    weighted = scale
    router = scale
    if slot_weights is not None:
        slot = tl.load(slots + rows, mask=inside, other=0)
        router = tl.load(slot_weights + slot, mask=inside, other=0.0).to(tl.float32)
        weighted = scale * router
    tl.store(row_scale + rows, weighted, mask=inside)
    BLOCKS: tl.constexpr = ROWS * COLUMNS // 16
    g = tl.reshape(tl.broadcast_to(scale[:, None], (ROWS, COLUMNS // 16)), (BLOCKS,))
    for column in range(0, WIDTH if out is None else OUT_WIDTH, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (columns < WIDTH)[None, :]
        tile = _tile(x_rows, columns, mask, WIDTH, ACTIVATION, LIMIT)
        if h is not None:
            h_tile = (tile * router[:, None]).to(DTYPE)
            tl.store(h + row64[:, None] * WIDTH + columns[None, :], h_tile, mask=mask)
        packed, byte = encode(tl.reshape(tile.to(DTYPE).to(tl.float32), (BLOCKS, 16)), g, 16, False)
        if out is not None:
            factor = tl.broadcast_to(block_scale(byte, False)[:, None], (BLOCKS, 8))
            even, odd = decode_pair(packed, factor, tl.float32, True, False)
            values = tl.reshape(tl.interleave(even, odd), (ROWS, COLUMNS)).to(DTYPE)
            store_rows(out, rows, inside, column, values, OUT_WIDTH, ROWS, COLUMNS, ORDER)
        else:
            pairs = column // 2 + tl.arange(0, COLUMNS // 2)
            blocks = column // 16 + tl.arange(0, COLUMNS // 16)
            codes_mask = inside[:, None] & (pairs < WIDTH // 2)[None, :]
            scales_mask = inside[:, None] & (blocks < WIDTH // 16)[None, :]
            packed = tl.reshape(packed, (ROWS, COLUMNS // 2))
            byte = tl.reshape(byte, (ROWS, COLUMNS // 16))
            tl.store(codes + row64[:, None] * (WIDTH // 2) + pairs[None, :], packed, mask=codes_mask)
            tl.store(scales + row64[:, None] * (WIDTH // 16) + blocks[None, :], byte, mask=scales_mask)
