"""The activations between the two projections, and their derivatives, as plain elementwise torch.

Every function works in the dtype it is given (callers pass float32 or float64) and on any device.
"""

import math

import torch
from torch import Tensor

from .validation import is_gated

_OAI_ALPHA = 1.702  # gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1)
_GELU_TANH_CUBIC = 0.044715


def activation_width(pre_width: int, activation: str) -> int:
    """I, given the width of the pre-activation (2I where the activation is gated)."""
    return pre_width // 2 if is_gated(activation) else pre_width


def activate(pre: Tensor, activation: str, limit: float | None) -> Tensor:
    """act(pre): `[M, 2I]` (columns `[gate, up]`) -> `[M, I]`; relu2 keeps its width."""
    if not is_gated(activation):
        return torch.relu(pre).square()
    gate, up = pre.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value, _ = _gate(gate, activation)
    return value * (up + 1) if activation == "swiglu_oai" else value * up


def activate_backward(pre: Tensor, grad: Tensor, activation: str, limit: float | None) -> tuple[Tensor, Tensor]:
    """(d loss / d pre, act(pre)) for `grad` = d loss / d act(pre) `[M, I]`.

    The clamps pass the gradient inside and on their bounds and stop it outside, as torch.clamp does.
    """
    if not is_gated(activation):
        positive = torch.relu(pre)
        return grad * 2 * positive, positive.square()
    gate, up = pre.chunk(2, -1)
    gate_open = up_open = None
    if limit is not None:
        gate_open, up_open = gate <= limit, up.abs() <= limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value, slope = _gate(gate, activation)
    linear = up + 1 if activation == "swiglu_oai" else up
    grad_gate, grad_up = grad * linear * slope, grad * value
    if gate_open is not None and up_open is not None:
        grad_gate = torch.where(gate_open, grad_gate, 0)
        grad_up = torch.where(up_open, grad_up, 0)
    return torch.cat([grad_gate, grad_up], -1), value * linear


def _gate(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(f(gate), f'(gate)) of the gate's non-linearity."""
    if activation == "gelu":
        cdf = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
        density = torch.exp(-0.5 * gate.square()) * (1 / math.sqrt(2 * math.pi))
        return gate * cdf, cdf + gate * density
    if activation == "gelu_tanh":
        root = math.sqrt(2 / math.pi)
        tanh = torch.tanh(root * (gate + _GELU_TANH_CUBIC * gate**3))
        inner_slope = root * (1 + 3 * _GELU_TANH_CUBIC * gate.square())
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh.square()) * inner_slope
    alpha = _OAI_ALPHA if activation == "swiglu_oai" else 1.0
    sigmoid = torch.sigmoid(alpha * gate)
    value = gate * sigmoid
    return value, sigmoid + alpha * value * (1 - sigmoid)
