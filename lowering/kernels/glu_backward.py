"""Gradients through activation × router weight, and the v that the next dgrad wants of them, from one read of pre."""

import triton
import triton.language as tl

from .activation import activation_tile
from .dependent import wait_for_previous
from .tiles import locate_tile, token_rows


@triton.jit
def _clear_unrouted(gw, slots, offsets, M, E, ROWS: tl.constexpr):
    """gw is 0 for a slot of no expert; those come last in `slots`, and program i sees to the i-th ROWS of all rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unrouted = (rows >= tl.load(offsets + E - 1)) & (rows < M)
    slot = tl.load(slots + rows, mask=unrouted, other=0)
    tl.store(gw + slot, tl.zeros((ROWS,), gw.dtype.element_ty), mask=unrouted)


@triton.jit
def glu_backward(
    pre, pre_stride, slot_weights, gh, slots, offsets, lora_b, gpre, h, gw, gw_chunks, v_chunks, M, lora_r, scaling,
    E, E_POW2: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPAN: tl.constexpr, SLICES: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """gpre and h from gh = d loss / d h, and sums of gh · act and of scaling · gpre b, gpre as rounded: gw and v.

    An output that is None is not computed. gw_chunks and v_chunks get the sums over each chunk of SPAN columns, which
    `sum_chunks` adds up; where one chunk is all, v_chunks is v, and gw (per slot) may be written here. SLICES of the
    columns are multiplied apart, a warp each.
    """
    wait_for_previous(PDL)
    CHUNKS: tl.constexpr = (WIDTH + SPAN - 1) // SPAN
    GATED: tl.constexpr = ACTIVATION != "relu2"
    HALVES: tl.constexpr = 2 if GATED else 1
    PRE_WIDTH: tl.constexpr = HALVES * WIDTH
    DEPTH: tl.constexpr = HALVES * COLUMNS // SLICES
    if gw is not None:
        _clear_unrouted(gw, slots, offsets, M, E, ROWS)
    chunk = tl.program_id(0) % CHUNKS
    expert, row, end = locate_tile(tl.program_id(0) // CHUNKS, offsets, E, E_POW2, ROWS)
    if row < end:
        rows = row + tl.arange(0, ROWS)
        inside = rows < end
        slot = tl.load(slots + rows, mask=inside, other=0)
        router = tl.load(slot_weights + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        row64 = rows.to(tl.int64)[:, None]
        pre_rows = pre + row64 * pre_stride
        in_chunks = chunk.to(tl.int64) * M + rows
        if gw is not None or gw_chunks is not None:
            gw_sum = tl.zeros((ROWS,), tl.float32)
        if lora_b is not None:
            r = tl.arange(0, R)
            lora_b_e = lora_b + expert.to(tl.int64) * PRE_WIDTH * lora_r
            v_sum = tl.zeros((SLICES, ROWS, R), tl.float32)
        for step in range(0, SPAN, COLUMNS):
            columns = chunk * SPAN + step + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (columns < WIDTH)[None, :]
            # Every load before the first store: none is moved past one, and those in flight together hide the memory.
            if gh is not None:
                gh_tile = tl.load(gh + row64 * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            if lora_b is not None:
                b_place = tl.reshape(tl.arange(0, HALVES * COLUMNS), (SLICES, DEPTH))
                b_column = chunk * SPAN + step + b_place // HALVES
                b_row = b_column + b_place % HALVES * WIDTH
                b_mask = (b_column < WIDTH)[:, :, None] & (r < lora_r)[None, None, :]
                b = tl.load(lora_b_e + b_row[:, :, None] * lora_r + r[None, None, :], mask=b_mask, other=0.0)
            act, by_gate, by_up = activation_tile(pre_rows, columns, mask, WIDTH, ACTIVATION, LIMIT)
            if gw is not None or gw_chunks is not None:
                gw_sum += tl.sum(tl.where(mask, gh_tile * act, 0.0), 1)
            if gpre is not None:
                grad = gh_tile * router
                target = gpre + row64 * PRE_WIDTH + columns[None, :]
                by_gate = (grad * by_gate).to(gpre.dtype.element_ty)
                tl.store(target, by_gate, mask=mask)
                if GATED:
                    by_up = (grad * by_up).to(gpre.dtype.element_ty)
                    tl.store(target + WIDTH, by_up, mask=mask)
                if lora_b is not None:
                    both = tl.join(by_gate, by_up) if GATED else by_gate
                    # Else the compiler computes a 16-bit product's operand, hence the activation, a second time, in
                    # the product's layout and with twice the registers. What is not pure is not repeated.
                    if both.dtype.primitive_bitwidth == 16:
                        both = tl.inline_asm_elementwise(
                            "mov.b32 $0, $1;", "=r,r", [both], both.dtype, is_pure=False, pack=2
                        )
                    both = tl.permute(tl.reshape(both, (ROWS, SLICES, DEPTH)), (1, 0, 2))
                    v_sum = tl.dot(both, b.to(gpre.dtype.element_ty), v_sum, input_precision=PRECISION)
            if h is not None:
                h_tile = (act * router).to(h.dtype.element_ty)
                tl.store(h + row64 * WIDTH + columns[None, :], h_tile, mask=mask)
        if gw is not None:
            tl.store(gw + slot, gw_sum.to(gw.dtype.element_ty), mask=inside)
        if gw_chunks is not None:
            tl.store(gw_chunks + in_chunks, gw_sum, mask=inside)
        if lora_b is not None:
            where_v = in_chunks[:, None] * lora_r + r[None, :]
            v_tile = (tl.sum(v_sum, 0) * scaling).to(v_chunks.dtype.element_ty)
            tl.store(v_chunks + where_v, v_tile, mask=inside[:, None] & (r < lora_r)[None, :])


@triton.jit
def sum_chunks(
    gw_chunks, v_chunks, slots, offsets, gy, gy_stride, gy_slots, bias, gw, v, M, top_k, lora_r,
    E, E_POW2: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """gw (per slot) and v, each the sum of its chunks in their order; one that is None is not computed.

    gw has gy · bias added where the down projection has a bias; a slot of no expert gets 0.
    """
    wait_for_previous(PDL)
    if gw is not None:
        _clear_unrouted(gw, slots, offsets, M, E, ROWS)
    expert, row, end = locate_tile(tl.program_id(0), offsets, E, E_POW2, ROWS)
    if row < end:
        rows = row + tl.arange(0, ROWS)
        inside = rows < end
        row64 = rows.to(tl.int64)
        if v is not None:
            r = tl.arange(0, R)
            v_mask = inside[:, None] & (r < lora_r)[None, :]
            v_sum = tl.zeros((ROWS, R), tl.float32)
            for chunk in tl.range(CHUNKS, loop_unroll_factor=4):
                from_v = (tl.cast(chunk, tl.int64) * M + row64)[:, None] * lora_r + r[None, :]
                v_sum += tl.load(v_chunks + from_v, mask=v_mask, other=0.0)
            tl.store(v + row64[:, None] * lora_r + r[None, :], v_sum.to(v.dtype.element_ty), mask=v_mask)
        if gw is not None:
            gw_sum = tl.zeros((ROWS,), tl.float32)
            for chunk in tl.range(CHUNKS, loop_unroll_factor=4):
                gw_sum += tl.load(gw_chunks + tl.cast(chunk, tl.int64) * M + row64, mask=inside, other=0.0)
            if bias is not None:
                source = token_rows(gy_slots, rows, inside, top_k)[:, None]
                bias_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
                for column in range(0, N, COLUMNS):
                    columns = column + tl.arange(0, COLUMNS)
                    mask = inside[:, None] & (columns < N)[None, :]
                    gy_tile = tl.load(gy + source * gy_stride + columns[None, :], mask=mask, other=0.0)
                    bias_row = tl.load(bias + expert.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
                    bias_sum += gy_tile.to(tl.float32) * bias_row.to(tl.float32)[None, :]
                gw_sum += tl.sum(bias_sum, 1)
            slot = tl.load(slots + rows, mask=inside, other=0)
            tl.store(gw + slot, gw_sum.to(gw.dtype.element_ty), mask=inside)
