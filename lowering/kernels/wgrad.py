"""Gradients of the LoRA factors: out_e = p_eᵀ q_e over the rows of each expert, one of P and Q being small."""

import triton
import triton.language as tl

from .dependent import wait_for_previous
from .tiles import token_rows


@triton.jit
def wgrad(
    narrow, narrow_stride, narrow_slots, wide, wide_stride, wide_slots, offsets, out, narrow_width, wide_width,
    out_split_stride, out_expert_stride, out_narrow_stride, out_wide_stride, top_k,
    NARROW: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One tile `[NARROW, WIDE]` of one expert over its share of the expert's rows; no rows give exactly 0.

    Into how many shares the rows are split is no constant: it changes with M, and a kernel need not.
    """
    wait_for_previous(PDL)
    wide_tiles = tl.cdiv(wide_width, WIDE)
    tile = tl.program_id(0)
    wide_columns = tile % wide_tiles * WIDE + tl.arange(0, WIDE)
    narrow_columns = tile // wide_tiles * NARROW + tl.arange(0, NARROW)
    expert = tl.program_id(1)
    split = tl.program_id(2)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    share = tl.cdiv(end - begin, tl.num_programs(2) * ROWS) * ROWS
    begin += split * share
    end = tl.minimum(begin + share, end)
    acc = tl.zeros((NARROW, WIDE), tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = rows < end
        narrow_rows = token_rows(narrow_slots, rows, inside, top_k)
        wide_rows = token_rows(wide_slots, rows, inside, top_k)
        # Loaded transposed, so that the small operand is the left one of the product.
        p = tl.load(
            narrow + narrow_rows[None, :] * narrow_stride + narrow_columns[:, None],
            mask=inside[None, :] & (narrow_columns < narrow_width)[:, None], other=0.0,
        )  # fmt: skip
        q = tl.load(
            wide + wide_rows[:, None] * wide_stride + wide_columns[None, :],
            mask=inside[:, None] & (wide_columns < wide_width)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(p.to(DTYPE), q.to(DTYPE), acc, input_precision=PRECISION)
    where = expert.to(tl.int64) * out_expert_stride + split.to(tl.int64) * out_split_stride
    where += narrow_columns.to(tl.int64)[:, None] * out_narrow_stride
    where += wide_columns.to(tl.int64)[None, :] * out_wide_stride
    mask = (narrow_columns < narrow_width)[:, None] & (wide_columns < wide_width)[None, :]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=mask)
