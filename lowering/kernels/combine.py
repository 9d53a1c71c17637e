"""out[t] = sum over k of rows[inverse[t, k]]: a gather, summed in fp32 in the order of k, so always the same bits."""

import triton
import triton.language as tl

from .dependent import wait_for_previous


@triton.jit
def combine(
    rows, rows_stride, inverse, out, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One token, one piece of its columns. A slot that is not routed (inverse -1) is not read at all."""
    wait_for_previous(PDL)
    program = tl.program_id(0).to(tl.int64)
    token = program // SPLITS
    columns = program % SPLITS * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + k)
        picked = tl.load(rows + row.to(tl.int64) * rows_stride + columns, mask=inside & (row >= 0), other=0.0)
        total += picked.to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
