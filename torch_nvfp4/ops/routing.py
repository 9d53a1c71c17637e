"""Routing and combine as plain torch that never asks for a count: sizes depend on T and K only, on every device."""

import torch
from torch import Tensor

from . import cuda


def moe_route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the M = T*K slots by expert, stably.

    Args:
        topk_ids: `[T, K]`, any integer dtype; an id outside `[0, num_experts)` is a slot that is not routed.
        num_experts: E, at least 1.

    Returns, all int32:
        rows `[M]`: a permutation of the slots, routed ones first (by expert, then by slot), the others last.
        inverse `[M]`: the row of each slot, -1 for a slot that is not routed.
        offsets `[E]`: the end row of each expert, so expert e owns rows `offsets[e-1]` to `offsets[e]`.
    """
    ids = topk_ids.reshape(-1).to(torch.int64)
    routed = (ids >= 0) & (ids < num_experts)
    expert = torch.where(routed, ids, num_experts)  # E is the bin of the slots that are not routed
    rows = torch.argsort(expert, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
    offsets = counts[:num_experts].cumsum(0, dtype=torch.int32)
    position = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    inverse = torch.empty_like(position).scatter_(0, rows, position)
    return rows.to(torch.int32), torch.where(routed, inverse, -1), offsets


def combine(rows_MN: Tensor, inverse_M: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """out[t] = sum over k of rows[inverse[t*K + k]], summed in fp32 in the order of k: `[M, N]` -> `[T, N]`.

    Gathers, so the same input always gives the same bits. Slots that are not routed are left out by selection, not
    by a product with 0: what lies in their rows may be NaN. K gathers added up are pointwise, so a compiler fuses
    them with what follows (a reduction over k would be a kernel of its own from K = 8 on); on a GPU with nobody
    tracing it is one kernel.
    """
    if rows_MN.is_cuda and rows_MN.dtype != torch.float64 and _is_eager(rows_MN) and _has_kernel(rows_MN.device):
        return cuda.cuda_kernel("combine")(rows_MN, inverse_M, top_k, dtype)
    inverse_TK = inverse_M.view(inverse_M.shape[0] // top_k, top_k)
    accumulate = torch.float64 if rows_MN.dtype == torch.float64 else torch.float32
    total: Tensor | float = 0.0  # so that a sum of nothing but -0.0 is 0.0
    for row_T in inverse_TK.unbind(1):
        picked = torch.where((row_T >= 0).unsqueeze(-1), rows_MN.index_select(0, row_T.clamp_min(0)), 0)
        total = picked.to(accumulate) + total
    assert isinstance(total, Tensor)  # K is at least 1
    return total.to(dtype)


def _has_kernel(device: torch.device) -> bool:
    return cuda.unsupported(device.index) is None


def _is_eager(tensor: Tensor) -> bool:
    """Whether nothing traces, counts or transforms what happens to the tensor."""
    observed = torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()
    return type(tensor) is Tensor and not observed


def invert_rows(rows_M: Tensor, offsets_E: Tensor) -> Tensor:
    """`inverse` of `moe_route`, from its other two results."""
    position = torch.arange(rows_M.shape[0], dtype=torch.int32, device=rows_M.device)
    inverse = torch.empty_like(position).scatter(0, rows_M.to(torch.int64), position)
    return torch.where(inverse < offsets_E[-1], inverse, -1)
