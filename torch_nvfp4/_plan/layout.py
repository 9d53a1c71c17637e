"""Layouts of a training over several cards: memory, bytes on the links, and time of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._memory import Run, estimate
from .card import EXPERT_FORWARD, GPUS_PER_NODE, LINK_EFFICIENCY, REST, USABLE, Card, experts_seconds
from .model import Model

ADAPTER_ITEMSIZE = 4


@dataclass(frozen=True)
class Layout:
    """Over `gpus` cards: experts split over groups of `ep`; `shard`: FSDP2 of the experts' shares over the gpus / ep
    groups and of all else over all cards; without it both are held in full.
    """

    gpus: int
    ep: int
    shard: bool

    @property
    def name(self) -> str:
        if self.ep == 1:
            return "FSDP2" if self.shard else "DDP"
        return f"EP {self.ep}" + (" x FSDP2" if self.shard else "")


@dataclass(frozen=True)
class Job:
    """What each card does in a step: `batch` sequences of `seq_len` tokens, layers checkpointed and compiled."""

    seq_len: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.seq_len * self.batch


@dataclass(frozen=True)
class Plan:
    """Bytes a card, bytes a card sends and receives in a step (the larger), seconds of a step."""

    layout: Layout
    weights: int
    adapters: int
    transient: int
    peak: int
    fits: bool
    gathered: int
    exchanged: int
    reduced: int
    compute_s: float
    step_s: float


def candidates(model: Model, gpus: int) -> list[Layout]:
    """DDP, FSDP2, and expert parallelism within a node and over as many cards as E allows, each with and without."""
    sizes = [ep for ep in range(2, gpus + 1) if gpus % ep == 0 and model.experts % ep == 0]
    within = [ep for ep in sizes if ep <= GPUS_PER_NODE]
    chosen = sorted({*within[-1:], *sizes[-1:]})
    return [Layout(gpus, ep, shard) for ep in (1, *chosen) for shard in (False, True)]


def plan(model: Model, card: Card, layout: Layout, job: Job) -> Plan:
    """Routing balanced, each rank with its own tokens, gathers beside the computation, all-to-all not."""
    dp = layout.gpus // layout.ep
    experts_share = layout.ep * (dp if layout.shard else 1)
    rest_share = layout.gpus if layout.shard else 1
    expert_adapters = ADAPTER_ITEMSIZE * model.moe_layers * model.experts * model.expert_adapter
    linear_adapters = ADAPTER_ITEMSIZE * model.layers * model.linear_adapter
    weights = model.packed_bytes // experts_share + model.plain_bytes // rest_share
    adapters = expert_adapters // experts_share + linear_adapters // rest_share

    run = Run(job.tokens, compiled="layers")
    step = estimate(weights, adapters, model.sizes, run)
    transient = _gathered_layers(model, layout) + _buffers(model, layout, job)
    step = replace(step, activations=replace(step.activations, layer=step.activations.layer + transient))

    gathered, reduced = _collected(model, layout, expert_adapters, linear_adapters)
    exchanged = _exchanged(model, layout, job)
    compute = _compute_s(model, card, layout, job)
    within = _share_within(layout.ep)
    all_to_all = max(
        exchanged * within / (card.link * LINK_EFFICIENCY), exchanged * (1 - within) / (card.network * LINK_EFFICIENCY)
    )
    step_s = max(compute + all_to_all, gathered.seconds(card, layout)) + reduced.seconds(card, layout)
    return Plan(
        layout, weights, 4 * adapters, step.peak - weights - adapters - step.moments, step.peak,
        step.peak <= USABLE * card.memory, gathered.total, exchanged, reduced.total, compute, step_s,
    )  # fmt: skip


def _gathered_layers(model: Model, layout: Layout) -> int:
    """Two layers as FSDP2 gathers them: the one that runs and the next."""
    if not layout.shard:
        return 0
    experts = model.experts * (model.expert_bytes + ADAPTER_ITEMSIZE * model.expert_adapter) // layout.ep
    experts = experts if layout.gpus > layout.ep else 0
    rest = 2 * (model.attention + model.shared + model.hidden * model.experts)
    return 2 * (experts + rest)


def _peers(model: Model, layout: Layout) -> float:
    """Of a token's K experts, on how many ranks: evenly drawn, a rank is missed with (1 - 1/P)^K."""
    return layout.ep * (1 - (1 - 1 / layout.ep) ** model.slots)


def _buffers(model: Model, layout: Layout, job: Job) -> int:
    """x and its gradient for each slot, and what travels, sent and received; bf16, while one layer's backward runs."""
    if layout.ep == 1:
        return 0
    return round(2 * job.tokens * model.hidden * (2 * model.slots + 4 * _peers(model, layout)))


def _exchanged(model: Model, layout: Layout, job: Job) -> int:
    """Tokens leave and return in the forward, in its repetition for the backward, and in the backward."""
    if layout.ep == 1:
        return 0
    away = _peers(model, layout) * (1 - 1 / layout.ep)
    return round(6 * model.moe_layers * job.tokens * (2 * model.hidden + 8 * model.slots) * away)


@dataclass(frozen=True)
class Collected:
    """Bytes that a card gets (or gives) in collectives over the ranks with the same experts, and over all ranks."""

    experts: int
    rest: int

    @property
    def total(self) -> int:
        return self.experts + self.rest

    def seconds(self, card: Card, layout: Layout) -> float:
        """Rings through all cards of a node, whose networks share the node's traffic.

        Where ep fills a node, none of its cards has the experts of another, and each one's network carries its own.
        """
        inside = self.total / (card.link * LINK_EFFICIENCY)
        if layout.gpus <= GPUS_PER_NODE:
            return inside
        networks = card.network * LINK_EFFICIENCY
        sharing = max(1, GPUS_PER_NODE // layout.ep)
        return max(inside, self.experts / (sharing * networks) + self.rest / (GPUS_PER_NODE * networks))


def _collected(model: Model, layout: Layout, expert_adapters: int, linear_adapters: int) -> tuple[Collected, Collected]:
    """(weights and adapters gathered in a step: twice; gradients reduced)."""
    dp, world = layout.gpus // layout.ep, layout.gpus
    of_experts, of_rest = (dp - 1) / dp / layout.ep, (world - 1) / world
    times = 1 if layout.shard else 2  # an all-reduce is a reduce-scatter and a gather
    reduced = Collected(round(times * expert_adapters * of_experts), round(times * linear_adapters * of_rest))
    if not layout.shard:
        return Collected(0, 0), reduced
    experts, rest = model.packed_bytes + expert_adapters, model.plain_bytes + linear_adapters
    return Collected(round(2 * experts * of_experts), round(2 * rest * of_rest)), reduced


def _share_within(ep: int) -> float:
    """Of what leaves a card for its ep group, the share that stays in the node."""
    return 1.0 if ep <= GPUS_PER_NODE else (GPUS_PER_NODE - 1) / (ep - 1)


def _compute_s(model: Model, card: Card, layout: Layout, job: Job) -> float:
    """Forward twice (layers are checkpointed) and backward once."""
    here = model.experts // layout.ep * model.expert_bytes
    experts = experts_seconds(card, job.tokens * model.slots, model.hidden, model.intermediate, here)
    experts *= (1 + EXPERT_FORWARD) * model.moe_layers
    linear = 6 * job.tokens * (
        model.layers * model.attention + model.dense_layers * model.dense_mlp + model.moe_layers * model.shared
    )  # fmt: skip
    core = 4.5 * 2 * job.tokens * job.seq_len * model.attention_width * model.layers  # causal: half of 4 T S
    head = 4 * job.tokens * model.head  # forward and the gradient of its input: it is frozen
    return experts + (linear + core + head) / (card.flops * REST)
