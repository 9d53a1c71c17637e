"""Cards, links, and how much of their peaks a training step reaches: one measured card, the others scaled."""

from __future__ import annotations

from dataclasses import dataclass

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Card:
    """flops, bandwidth: of a large bf16 product and of a large copy, FLOP/s and bytes/s. memory: bytes.

    link: bytes/s of one direction to the other cards of the node; network: to other nodes, for each card.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int
    link: float
    network: float
    measured: bool


# The H200's rates are those of benchmarks/results. The others have its share of their data sheets' peaks: 0.81 of 989
# (H100) and 2250 TFLOP/s (B200), 0.88 of 3.35 and 8 TB/s. Links are data sheets' NVLink 4 and 5, and 400 Gb/s a card.
CARDS = {
    "h200": Card("H200", 800e12, 4.23e12, 139 * 2**30, 450e9, 50e9, True),
    "h100": Card("H100", 800e12, 2.95e12, 79 * 2**30, 450e9, 50e9, False),
    "b200": Card("B200", 1820e12, 7.05e12, 178 * 2**30, 900e9, 50e9, False),
}

USABLE = 0.92
"""Of a card's memory, for tensors: the rest is the context's, the collectives', and what no block fits into."""
LINK_EFFICIENCY = 0.7
"""Of a link's rate that a large collective reaches. Assumed: no run on several cards was measured."""

EXPERT_PRODUCTS = 0.67
"""Of the matrix rate that the experts' products reach, fitted to `benchmarks/results/layer_*.json`, compiled."""
EXPERT_BYTES = 32.0
"""Bytes that one forward and backward move for each routed row and each of its H + I columns, fitted likewise."""
EXPERT_FORWARD = 0.45
"""The forward's share of the experts' forward and backward, likewise."""
REST = 0.28
"""Of the matrix rate that everything but the experts reaches: what is left of the one measured training step."""

HOST_S = 1.9e-3
"""One forward and backward of a layer's experts takes the host this long, compiled: the least at few tokens."""

LAYER_TOLERANCE = 0.12
"""How far the experts' estimate may be off a measured layer of 512 rows an expert or more."""
FEW_TOLERANCE = 0.2
"""The same at fewer rows, where the host decides."""
STEP_TOLERANCE = 0.05
"""How far the step's estimate may be off the measured one, to which `REST` was fitted."""


def experts_seconds(card: Card, rows: float, hidden: int, intermediate: int, weight_bytes: float) -> float:
    """One forward and backward of a layer's experts, for M routed rows; at least three reads of the weights."""
    products = 12 * rows * hidden * intermediate / (card.flops * EXPERT_PRODUCTS)
    traffic = rows * (hidden + intermediate) * EXPERT_BYTES / card.bandwidth
    return max(products + traffic, 3 * weight_bytes / card.bandwidth, HOST_S)
