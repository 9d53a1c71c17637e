"""Expert parallelism: each rank keeps some of the experts, and tokens travel to them.

A rank sends a token once to each rank that holds one of its experts; there the ids of other ranks' experts count as not
routed. What comes back is the sum over that rank's experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._held import Held
from ..nn import PROJECTIONS, LoRAFactors, NVFP4Experts, ProjectionName
from .exchange import Capacity, arrive, bounded, exact, exchange, merge, scale_gradient, settled, take

Overflow = Literal["refuse", "drop"]
_STACKED = ("codes", "scales", "global_scale", "bias", "lora_a", "lora_b")
_NO_ROOM = (
    "expert parallelism: more tokens for one rank than the capacity has room for "
    "(a larger capacity, or overflow='drop', or the exact exchange)"
)


class _Share(NamedTuple):
    """Which experts a rank keeps: `experts` of them from `first` on, and how it reaches the others."""

    group: Any
    rank: int
    ranks: int
    experts: int
    capacity: int | None
    slots: int | None
    overflow: Overflow

    @property
    def first(self) -> int:
        return self.rank * self.experts


class ParallelExperts(NVFP4Experts):
    """`NVFP4Experts` of which each rank holds E / P: what `parallelize_experts` makes of one.

    `forward` takes this rank's tokens with ids in `[0, E)` of all experts, as before. `num_experts` and the leading dim
    of every parameter are this rank's. `lost`: int64 buffer, the slots that a capacity had no room for, over all
    forwards (a layer that is recomputed for its backward counts again).
    """

    share: _Share
    lost: Tensor

    @property
    def holds_a_share(self) -> bool:
        """Whether the LoRA factors are those of this rank's experts alone; not so within `whole_adapters`."""
        return self.num_experts < self.share.experts * self.share.ranks

    @property
    def experts_held(self) -> Held:
        share = self.share
        return share.first, share.experts, share.experts * share.ranks

    def _run(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, lora: Mapping[ProjectionName, LoRAFactors] | None
    ) -> Tensor:
        share, k = self.share, topk_ids.shape[1]
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))  # what the op does; here, before it is sent
        ids = _int32(topk_ids, share.experts * share.ranks)
        if share.capacity is None:
            sending = exact(ids, share.experts, share.ranks, share.group)
        else:
            most = share.capacity * min(k, share.experts)
            room = Capacity(share.capacity, min(share.slots or most, most), share.overflow == "drop")
            sending = bounded(ids, share.experts, share.ranks, room)
            self._count(sending.lost, room.drop)
        routes, sizes = sending.routes, (share.group, sending.receive, sending.send)
        # Ids travel beside the weights, as floats: exact up to 2**24 experts, and one collective less.
        carrier = torch.promote_types(topk_weights.dtype, torch.float32)
        beside = take(torch.cat([topk_weights.to(carrier), sending.ids_TK.to(carrier)], 1), routes)
        empty = (routes.slot_S < 0).unsqueeze(1)
        beside = torch.cat([beside[:, :k], beside[:, k:].masked_fill(empty, -1)], 1)
        x_there, beside_there = exchange(take(x, routes), *sizes), exchange(beside, *sizes)
        ids_there = settled(beside_there.detach())[:, k:].to(torch.int32) - share.first
        weights_there = beside_there[:, :k].to(topk_weights.dtype)
        here = arrive(x_there, ids_there, weights_there, share.experts, sending.slots)
        y = super()._run(here.x, here.ids, here.weights, self._averaged(lora))
        return merge(exchange(merge(y, here.routes), share.group, sending.send, sending.receive), routes)

    def _averaged(self, lora: Mapping[ProjectionName, LoRAFactors] | None) -> Mapping[ProjectionName, LoRAFactors]:
        """The factors with gradients divided by P.

        An expert sees the tokens of all P ranks, and its gradient is the sum over their losses; wrappers of data
        parallelism average the gradients of what all ranks hold. So all are gradients of the mean of the losses.
        """
        own = {p: self._factors(p) for p in PROJECTIONS} if lora is None else lora
        share = 1 / self.share.ranks
        return {
            projection: LoRAFactors(scale_gradient(a, share), scale_gradient(b, share), scaling)
            for projection, (a, b, scaling) in own.items()
            if a is not None and b is not None
        }

    def _count(self, lost: Tensor | None, drop: bool) -> None:
        assert lost is not None
        self.lost += lost.detach()
        if not drop:
            torch._assert_async(lost == 0, _NO_ROOM)  # on the device: nobody waits for it

    def extra_repr(self) -> str:
        share = self.share
        of = f", experts {share.first} to {share.first + share.experts - 1} of {share.experts * share.ranks}"
        room = "" if share.capacity is None else f", capacity={share.capacity}, overflow={share.overflow}"
        return super().extra_repr() + of + room


def _int32(ids_TK: Tensor, experts: int) -> Tensor:
    """Ids as int32; one that its dtype holds and int32 does not stays outside `[0, E)`."""
    if ids_TK.dtype == torch.int64:
        return torch.where((ids_TK >= 0) & (ids_TK < experts), ids_TK, -1).to(torch.int32)
    return ids_TK.to(torch.int32)


def parallelize_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    capacity: int | None = None,
    slots: int | None = None,
    overflow: Overflow = "refuse",
) -> list[str]:
    """Split every `NVFP4Experts` of a model over the ranks of `mesh`, in place; returns their names.

    Each rank keeps experts `[r * E / P, (r + 1) * E / P)`: codes, scales, biases and LoRA factors, PEFT's too. What is
    not an `NVFP4Experts` stays as it is. Call it on the same model on every rank, with its adapters on it, before
    FSDP2, DDP, `torch.compile` and the optimiser.

    Args:
        mesh: 1-D, or one with a dim named "ep", over which experts are split.
        capacity: None for the exact exchange, whose sizes are those of the routing (a host sync in each layer). A
            number for one without shapes that depend on data: the tokens that a rank can send to each other rank in
            one call, T at most. The same on all ranks.
        slots: with a capacity, how many slots of those tokens the other rank computes; None for all that they can
            have, capacity x min(K, E / P). Buffers are as large as these say.
        overflow: "refuse": tokens without room are an error (on a GPU one of the device, seen at the next sync).
            "drop": they skip those experts. Both count them in each layer's `lost`.

    All ranks must run the same layers the same number of times, forward and backward, with T = 0 where one has no
    tokens. ValueError for a model without packed experts or with E that P does not divide, a mesh without such a dim,
    experts that are split or sharded already, and options that do not fit; the model is then as it was.
    """
    ep = _ep_dim(mesh)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, NVFP4Experts)]
    _check(found, ep.size(), capacity, slots, overflow)
    wrappers = list(peft_wrappers(model))
    for _, module in found:
        e = module.num_experts // ep.size()
        share = _Share(ep.get_group(), ep.get_local_rank(), ep.size(), e, capacity, slots, overflow)
        mine = slice(share.first, share.first + e)
        for projection in PROJECTIONS:
            for part in _STACKED:
                parameter = getattr(module, f"{projection}_{part}")
                if parameter is not None:
                    parameter.data = parameter.data[mine].clone()  # a copy, so that the others' are freed
        for wrapper in wrappers:
            if wrapper.get_base_layer() is module:
                _split_peft(wrapper, module.num_experts, mine)
        module.num_experts = e
        module.__class__ = ParallelExperts
        module.share = share  # type: ignore[assignment]
        device = module.packed("gate_up")[0].device
        module.register_buffer("lost", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
    return [name for name, _ in found]


def _ep_dim(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if "ep" in names:
        return mesh["ep"] if mesh.ndim > 1 else mesh
    if mesh.ndim == 1:
        return mesh
    raise ValueError(f"mesh must be 1-D or have a dim named 'ep', got {mesh.ndim} dims named {list(names)}")


def _check(
    found: list[tuple[str, NVFP4Experts]], ranks: int, capacity: int | None, slots: int | None, overflow: str
) -> None:
    if not found:
        raise ValueError("the model has no packed experts (NVFP4Experts) to split")
    if overflow not in ("refuse", "drop"):
        raise ValueError(f"overflow must be 'refuse' or 'drop', got {overflow!r}")
    if slots is not None and capacity is None:
        raise ValueError("slots are those of a capacity: give capacity, too")
    for name, number in (("capacity", capacity), ("slots", slots)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    for name, module in found:
        if isinstance(module, ParallelExperts):
            raise ValueError(f"{name}: its experts are split already")
        if any(type(p.data) is not Tensor for p in module.parameters()):
            raise ValueError(f"{name}: its parameters are sharded already: split experts first, then shard")
        if module.num_experts % ranks:
            raise ValueError(f"{name}: E = {module.num_experts} experts cannot be split evenly over {ranks} ranks")


def peft_wrappers(model: nn.Module) -> Iterator[Any]:
    """PEFT's wrappers of packed experts, an outer one before those inside it."""
    layers = sys.modules.get("torch_nvfp4._hf.peft_layers")  # who made wrappers has loaded it
    for module in model.modules():
        if layers is not None and isinstance(module, layers.ParamWrapper) and module.projection is not None:
            yield module


def _split_peft(wrapper: Any, experts: int, mine: slice) -> None:
    """PEFT's factors stack experts slowest in A `[E*R, C]`, fastest in B `[N, R*E]`."""
    for name, a in wrapper.lora_A.items():
        b = wrapper.lora_B[name]
        a.weight.data = a.weight.data.unflatten(0, (experts, -1))[mine].flatten(0, 1).clone()
        b.weight.data = b.weight.data.unflatten(1, (-1, experts))[..., mine].flatten(1).clone()
        a.out_features = b.in_features = a.weight.shape[0]
    wrapper.num_experts = mine.stop - mine.start


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of all that belongs to split experts, with PEFT's wrappers about them: what to shard apart.

    With a 2-D mesh ("dp", "ep"), FSDP2 shards these over `mesh["dp"]` and all the rest over both dims:

        for module in experts_modules(model).values():
            fully_shard(module, mesh=mesh["dp"])
        fully_shard(layer, mesh=mesh["dp", "ep"]._flatten())  # each layer, and then the model
    """
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        if isinstance(base, ParallelExperts) and not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = module
    return outermost


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter that one rank of each ep group holds: what data parallelism over all ranks must leave alone.

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters(model)))
    """
    inside = tuple(f"{name}." if name else "" for name in experts_modules(model))
    return {name: parameter for name, parameter in model.named_parameters() if inside and name.startswith(inside)}
