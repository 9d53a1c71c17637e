"""Tokens between ranks: who sends which row where, and the two moves that a row makes, each the other's gradient.

Letters: T tokens of this rank, K slots of each, E experts, P ranks, S rows of a buffer. Everything stays on the device,
but for the sizes of the exact exchange.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..ops.routing import combine


class Routes(NamedTuple):
    """A buffer's rows and the slots that they carry.

    slot_S: int32, the slot `t * top_k + k` whose token a row carries, -1 for a row that carries none.
    row_M: int32 `[T * top_k]`, the row of a slot, -1 for a slot without one.
    """

    slot_S: Tensor
    row_M: Tensor
    top_k: int

    @property
    def by_slot(self) -> Routes:
        """The same rows for a tensor that has a row for each slot."""
        return self._replace(top_k=1)


def take(x_TN: Tensor, routes: Routes) -> Tensor:
    """`[T, N]` -> `[S, N]`: each row its token's; what a row without one holds is unspecified."""
    return _Take.apply(x_TN, *routes)


def merge(y_SN: Tensor, routes: Routes) -> Tensor:
    """`[S, N]` -> `[T, N]`: each token the sum of its rows in the order of its slots, in fp32, rounded once."""
    return _Merge.apply(y_SN, *routes)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself, whose gradient is multiplied by `factor`."""
    return _ScaleGradient.apply(x, factor)


def exchange(x: Tensor, group: Any, receive: list[int] | None = None, send: list[int] | None = None) -> Tensor:
    """`all_to_all_single` with its gradient: rows `send[p]` to rank p of the group, `receive[p]` from it.

    Without sizes, the same number to each.
    """
    return collectives.all_to_all_single_autograd(x, receive, send, group)


def settled(x: Tensor) -> Tensor:
    """What an exchange returns as a plain tensor, outside autograd: the stream waits, not the host."""
    return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_S: Tensor, row_M: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slot_S, row_M)
        ctx.top_k, ctx.dtype = top_k, x.dtype
        return _gather(settled(x), slot_S, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, row_M = ctx.saved_tensors
        return combine(settled(grad), row_M, ctx.top_k, ctx.dtype), None, None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slot_S: Tensor, row_M: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slot_S, row_M)
        ctx.top_k = top_k
        return combine(settled(y), row_M, top_k, y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slot_S, _ = ctx.saved_tensors
        return _gather(settled(grad), slot_S, ctx.top_k), None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return grad * ctx.factor, None


def _gather(x_TN: Tensor, slot_S: Tensor, top_k: int) -> Tensor:
    if guard_or_false(x_TN.shape[0] == 0):  # a rank without tokens still fills buffers of a fixed size
        return x_TN.new_zeros(slot_S.shape[0], x_TN.shape[1])
    return x_TN.index_select(0, slot_S.clamp_min(0) // top_k)


class Capacity(NamedTuple):
    """Rows of fixed number for each pair of ranks: `tokens` that one sends, `slots` of theirs that the other computes.

    drop: what does not fit is not computed; else it is an error.
    """

    tokens: int
    slots: int
    drop: bool


class Sending(NamedTuple):
    """This rank's part of an exchange.

    ids_TK: `topk_ids` int32 without the slots that nobody computes (-1).
    send, receive: rows for and from each rank, None where they are the same for all.
    slots: to compute here, S' of them.
    lost: int64 scalar, the slots that a capacity has no room for; None where there is no capacity.
    """

    routes: Routes
    ids_TK: Tensor
    send: list[int] | None
    receive: list[int] | None
    slots: int
    lost: Tensor | None


def _destinations(ids_TK: Tensor, per_rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Each slot's rank `[T, K]` (-1: none), and `[T, K, K]` whether slot k has the rank of slot j."""
    routed = (ids_TK >= 0) & (ids_TK < per_rank * ranks)
    rank_TK = torch.where(routed, ids_TK // per_rank, -1)
    same_TKK = (rank_TK.unsqueeze(2) == rank_TK.unsqueeze(1)) & routed.unsqueeze(2)
    return rank_TK, same_TKK


def _route(rank_TK: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots by rank: (slots in order, row of each slot, first row and number of rows of each rank)."""
    slots_M, row_M, end_P = torch.ops.nvfp4.moe_route(rank_TK, ranks)
    begin_P = torch.cat([end_P.new_zeros(1), end_P[:-1]])
    return slots_M, row_M, begin_P, end_P - begin_P


def _one_each(rank_TK: Tensor, same_TKK: Tensor) -> Tensor:
    """`rank_TK` with only the first of a token's slots for each rank: a token goes to a rank once."""
    return torch.where(same_TKK.tril(-1).any(2), -1, rank_TK)


def exact(ids_TK: Tensor, per_rank: int, ranks: int, group: Any) -> Sending:
    """Sizes as the routing has them, which the host must know: one exchange of 2 P integers and one host sync."""
    rank_TK, same_TKK = _destinations(ids_TK, per_rank, ranks)
    slots_M, row_M, _, tokens_P = _route(_one_each(rank_TK, same_TKK), ranks)
    slots_P = _route(rank_TK, ranks)[3]
    mine_P2 = torch.stack([tokens_P, slots_P], 1)
    theirs_P2 = settled(collectives.all_to_all_single(mine_P2, None, None, group))
    sizes: list[int] = torch.cat([tokens_P, theirs_P2[:, 0], theirs_P2[:, 1]]).tolist()
    send, receive, slots = sizes[:ranks], sizes[ranks : 2 * ranks], sum(sizes[2 * ranks :])
    return Sending(Routes(slots_M[: sum(send)], row_M, ids_TK.shape[1]), ids_TK, send, receive, slots, None)


def bounded(ids_TK: Tensor, per_rank: int, ranks: int, capacity: Capacity) -> Sending:
    """Sizes of the capacity, whatever the routing: no shape depends on data and no host waits."""
    t, k = ids_TK.shape
    rank_TK, same_TKK = _destinations(ids_TK, per_rank, ranks)
    slots_M, row_M, begin_P, tokens_P = _route(_one_each(rank_TK, same_TKK), ranks)
    # The row of the one slot of its token that travels to a slot's rank, counted from the first that goes there.
    carried_TK = torch.where(same_TKK, row_M.view(t, 1, k), -1).amax(2)
    carried_TK = carried_TK - begin_P[rank_TK.clamp_min(0)]
    kept_TK = (rank_TK >= 0) & (carried_TK < capacity.tokens)
    if capacity.slots < capacity.tokens * min(k, per_rank):
        _, at_M, first_P, _ = _route(torch.where(kept_TK, rank_TK, -1), ranks)
        kept_TK = kept_TK & (at_M.view(t, k) - first_P[rank_TK.clamp_min(0)] < capacity.slots)
    lost = (rank_TK >= 0).sum() - kept_TK.sum()

    column = torch.arange(capacity.tokens, dtype=torch.int32, device=ids_TK.device)
    taken = column < tokens_P.unsqueeze(1)
    source = torch.where(taken, begin_P.unsqueeze(1) + column, t * k).reshape(-1)
    slot_S = torch.cat([slots_M, slots_M.new_full((1,), -1)]).index_select(0, source)
    row = rank_TK.reshape(-1) * capacity.tokens + carried_TK.reshape(-1)
    travels = (row_M >= 0) & (carried_TK.reshape(-1) < capacity.tokens)
    routes = Routes(slot_S, torch.where(travels, row, -1).to(torch.int32), k)
    return Sending(routes, torch.where(kept_TK, ids_TK, -1), None, None, ranks * capacity.slots, lost)


class Arrived(NamedTuple):
    """What the ranks sent, a row for each slot to compute: x `[S', H]`, ids int32 and weights `[S', 1]`."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    routes: Routes


def arrive(x_SH: Tensor, ids_SK: Tensor, weights_SK: Tensor, experts: int, slots: int) -> Arrived:
    """Rows as they came, spread to one for each of their slots with an id in `[0, experts)`, in the order of experts.

    So the layer's buffers hold the slots of this rank's experts alone, not K of each token.
    """
    slot_M, row_M, _ = torch.ops.nvfp4.moe_route(ids_SK, experts)
    routes = Routes(slot_M[:slots], row_M, ids_SK.shape[1])
    ids = ids_SK.reshape(-1, 1).index_select(0, routes.slot_S)
    weights = take(weights_SK.reshape(-1, 1), routes.by_slot)
    return Arrived(take(x_SH, routes), ids, weights, routes)
