"""The gated activations and their derivatives, as `ops/activation.py` has them, of a tile of rows of pre."""

import triton
import triton.language as tl


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
