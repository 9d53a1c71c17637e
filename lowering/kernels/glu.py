"""Activation × router weight before the down projection, and its backward; the formulas of `ops/activation.py`."""

import triton
import triton.language as tl

from .shrink import store_rows
from .tiles import locate_tile


@triton.jit
def gate_value(gate, ACTIVATION: tl.constexpr):
    """(f(gate), f'(gate)) in fp32."""
    if ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * cdf
        slope = cdf + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        slope_inner = 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
        value = 0.5 * gate * (1.0 + tanh)
        slope = 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * slope_inner
    else:
        alpha: tl.constexpr = 1.702 if ACTIVATION == "swiglu_oai" else 1.0
        sigmoid = tl.sigmoid(alpha * gate)
        value = gate * sigmoid
        slope = sigmoid + alpha * value * (1.0 - sigmoid)
    return value, slope


@triton.jit
def activation_tile(pre_rows, columns, mask, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """(act(pre), its derivatives by gate and by up) for columns of rows of pre, which is `[M, 2·WIDTH]` where gated."""
    if ACTIVATION == "relu2":
        pre = tl.load(pre_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        # Not a maximum with 0, which would hide NaN.
        positive = tl.where(pre < 0.0, 0.0, pre)
        act = positive * positive
        by_gate = 2.0 * positive
        by_up = by_gate
    else:
        gate = tl.load(pre_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(pre_rows + WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if LIMIT is not None:
            gate_open = gate <= LIMIT
            up_open = tl.abs(up) <= LIMIT
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        value, slope = gate_value(gate, ACTIVATION)
        linear = up + 1.0 if ACTIVATION == "swiglu_oai" else up
        act = value * linear
        by_gate = linear * slope
        by_up = value
        if LIMIT is not None:
            by_gate = tl.where(gate_open, by_gate, 0.0)
            by_up = tl.where(up_open, by_up, 0.0)
    return act, by_gate, by_up


@triton.jit
def glu_forward(
    pre, pre_stride, slot_weights, slots, offsets, h,
    E, WIDTH: tl.constexpr, H_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ORDER: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """h = act(pre) · router weight, in the column order that the next product reads, zero-padded."""
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


@triton.jit
def glu_backward(
    pre, pre_stride, slot_weights, gh, slots, offsets, gy, gy_stride, gy_slots, bias, gpre, h, gw, M, top_k,
    E, E_POW2: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """gpre, h and gw (per slot) from gh = d loss / d h; an output that is None is not computed.

    gw sums gh · act over the row, plus gy · bias where the down projection has one; a slot of no expert gets 0.
    """
    if gw is not None:  # the slots of no expert come last in `slots`
        last_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        unrouted = (last_rows >= tl.load(offsets + E - 1)) & (last_rows < M)
        slot = tl.load(slots + last_rows, mask=unrouted, other=0)
        tl.store(gw + slot, tl.zeros((ROWS,), gw.dtype.element_ty), mask=unrouted)
    expert, row, end = locate_tile(tl.program_id(0), offsets, E, E_POW2, ROWS)
    if row < end:
        rows = row + tl.arange(0, ROWS)
        inside = rows < end
        slot = tl.load(slots + rows, mask=inside, other=0)
        router = tl.load(slot_weights + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        row64 = rows.to(tl.int64)[:, None]
        pre_rows = pre + row64 * pre_stride
        GATED: tl.constexpr = ACTIVATION != "relu2"
        gw_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        for column in range(0, WIDTH, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (columns < WIDTH)[None, :]
            act, by_gate, by_up = activation_tile(pre_rows, columns, mask, WIDTH, ACTIVATION, LIMIT)
            if h is not None:
                h_tile = act * router
                tl.store(h + row64 * WIDTH + columns[None, :], h_tile.to(h.dtype.element_ty), mask=mask)
            if gh is not None:
                gh_tile = tl.load(gh + row64 * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                gw_sum += tl.where(mask, gh_tile * act, 0.0)
                if gpre is not None:
                    grad = gh_tile * router
                    PRE_WIDTH: tl.constexpr = 2 * WIDTH if GATED else WIDTH
                    target = gpre + row64 * PRE_WIDTH + columns[None, :]
                    tl.store(target, (grad * by_gate).to(gpre.dtype.element_ty), mask=mask)
                    if GATED:
                        tl.store(target + WIDTH, (grad * by_up).to(gpre.dtype.element_ty), mask=mask)
        if gw is not None:
            total = tl.sum(gw_sum, 1)
            if bias is not None:
                source = row64
                if gy_slots is not None:
                    source = (tl.load(gy_slots + rows, mask=inside, other=0) // top_k).to(tl.int64)[:, None]
                bias_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
                for column in range(0, N, COLUMNS):
                    columns = column + tl.arange(0, COLUMNS)
                    mask = inside[:, None] & (columns < N)[None, :]
                    gy_tile = tl.load(gy + source * gy_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                    bias_row = tl.load(bias + expert.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
                    bias_sum += gy_tile * bias_row.to(tl.float32)[None, :]
                total += tl.sum(bias_sum, 1)
            tl.store(gw + slot, total.to(gw.dtype.element_ty), mask=inside)
