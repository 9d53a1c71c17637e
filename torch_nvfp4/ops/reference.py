"""The specification: every op in float64, a loop over routed rows or slots, nothing clever.

Kernels are tested against these functions. Gradients are torch's own, taken through them: nothing here shares a
formula with `autograd.py` or a line with the kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..format import E2M1_VALUES, format_of, unpack


def dense_weight(codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """e2m1(code) · scale · global_scale as float64 `[E, N, C]`; S = 2: each half of the rows has a global scale."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)[unpack(codes).long()]
    block_scales = scales.to(torch.float64).repeat_interleave(format_of(scales.dtype).block_size, -1)
    n, s = codes.shape[1], global_scale.shape[1]
    row_scales = global_scale.to(torch.float64).repeat_interleave(n // s, 1)
    return values * block_scales * row_scales.unsqueeze(-1)


def activate(pre: Tensor, activation: str, limit: float | None) -> Tensor:
    """One pre-activation row `[2I]` (`[I]` for relu2) -> `[I]`."""
    if activation == "relu2":
        return F.relu(pre) ** 2
    gate, up = pre[: pre.shape[0] // 2], pre[pre.shape[0] // 2 :]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def moe_route(topk_ids: Tensor, num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """(rows, inverse, offsets) as lists: slots by expert then by slot, those of no expert last."""
    ids = topk_ids.flatten().tolist()
    rows: list[int] = []
    offsets: list[int] = []
    for expert in range(num_experts):
        rows += [slot for slot, i in enumerate(ids) if i == expert]
        offsets.append(len(rows))
    inverse = [rows.index(slot) if 0 <= i < num_experts else -1 for slot, i in enumerate(ids)]
    rows += [slot for slot, i in enumerate(ids) if not 0 <= i < num_experts]
    return rows, inverse, offsets


def expert_of_row(row: int, offsets: list[int]) -> int | None:
    """The expert that owns a routed row, None from `offsets[-1]` on."""
    return next((expert for expert, end in enumerate(offsets) if row < end), None)


def project(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    scaling: float,
) -> Tensor:
    """One row through one expert: (W + scaling · b @ a) x + bias."""
    y = weight @ x
    if lora_a is not None and lora_b is not None:
        y = y + scaling * (lora_b @ (lora_a @ x))
    return y if bias is None else y + bias


def moe_lora(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_lora_a: Tensor | None = None, gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None, down_lora_b: Tensor | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    *, gate_up_scaling: float = 1.0, down_scaling: float = 1.0, activation: str = "silu", limit: float | None = None,
) -> Tensor:  # fmt: skip
    """`nvfp4::moe_lora` on dense weights (`dense_weight` of the packed ones), all tensors float64; `[T, H]`.

    The sum over k of router weight · down(act(gate_up(x))), each expert with its LoRA delta, over the slots whose id
    names an expert.
    """

    def of(tensor: Tensor | None, expert: int) -> Tensor | None:
        return None if tensor is None else tensor[expert]

    out = []
    for t in range(x.shape[0]):
        total = torch.zeros(down.shape[1], dtype=torch.float64)
        for k, expert in enumerate(topk_ids[t].tolist()):
            if not 0 <= expert < gate_up.shape[0]:
                continue
            pre = project(
                x[t], gate_up[expert], of(gate_up_lora_a, expert), of(gate_up_lora_b, expert),
                of(gate_up_bias, expert), gate_up_scaling,
            )  # fmt: skip
            y = project(
                activate(pre, activation, limit), down[expert], of(down_lora_a, expert), of(down_lora_b, expert),
                of(down_bias, expert), down_scaling,
            )  # fmt: skip
            total = total + topk_weights[t, k] * y
        out.append(total)
    return torch.stack(out) if out else x.new_zeros(0, down.shape[1])
