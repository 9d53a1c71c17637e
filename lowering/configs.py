"""Tile sizes, as data: which one a launch gets follows from its sizes alone, never from a tuning run.

The one thing that matters is how many rows an expert has on average, M / E: it is known without asking the device, and
rounded to a few classes, so few variants of a kernel ever exist. Sizes chosen on an H200 (see docs/performance.md);
cards with less shared memory take the next smaller tile that fits.
"""

from dataclasses import dataclass
from functools import cache

import torch

CONSUMER_SHARED_MEMORY = 99 * 1024


@dataclass(frozen=True)
class LinearConfig:
    """y = x Wᵀ: TOKENS rows × OUTPUTS columns a tile, BYTES of codes a step."""

    tokens: int
    outputs: int
    bytes: int
    stages: int
    warps: int

    def shared_memory(self, itemsize: int) -> int:
        step = self.tokens * 2 * self.bytes * itemsize + self.outputs * self.bytes * 9 // 8
        return step * self.stages


@dataclass(frozen=True)
class DgradConfig:
    """gx = gy W: TOKENS rows × 2·BYTES columns a tile, DEPTH rows of the weight a step."""

    tokens: int
    bytes: int
    depth: int
    stages: int
    warps: int

    def shared_memory(self, itemsize: int) -> int:
        step = self.tokens * self.depth * itemsize + self.depth * self.bytes * 9 // 8
        return step * self.stages + 2 * self.depth * self.bytes * itemsize


# Largest first; a class of rows per expert starts at the first tile that is not larger than it.
LINEAR_CONFIGS = (
    LinearConfig(256, 64, 32, 3, 4),
    LinearConfig(128, 64, 64, 3, 4),
    LinearConfig(64, 64, 64, 3, 4),
    LinearConfig(16, 64, 64, 4, 4),
)
DGRAD_CONFIGS = (
    DgradConfig(128, 64, 64, 3, 4),
    DgradConfig(64, 64, 64, 3, 4),
)
# fp32 runs on the ordinary cores: small tiles, no wgmma.
LINEAR_FP32 = LinearConfig(32, 32, 32, 2, 4)
DGRAD_FP32 = DgradConfig(32, 16, 32, 2, 4)


@dataclass(frozen=True)
class DenseConfig:
    """Products with a decoded slice: TOKENS × OUTPUTS a tile, DEPTH of the contraction a step."""

    tokens: int
    outputs: int
    depth: int
    stages: int
    warps: int

    def shared_memory(self, itemsize: int) -> int:
        return (self.tokens + self.outputs) * self.depth * itemsize * self.stages


DENSE_CONFIG = DenseConfig(128, 256, 64, 4, 8)
DECODE_TILE = (16, 128, 4)
SCRATCH_ROWS_PER_EXPERT = 768
"""From this many rows an expert on, decoding slices beats decoding in the loop."""

SHRINK_ROWS, SHRINK_COLUMNS = 64, 128
SHRINK_RANKS = 64
GLU_ROWS, GLU_COLUMNS = 8, 256
WGRAD_ROWS, WGRAD_WIDE = 64, 128
WGRAD_PROGRAMS, WGRAD_ROWS_PER_SPLIT = 1056, 512
ROUTE_BLOCK = 256
ROUTE_CHUNKS = 128


@cache
def device_limits(device: int) -> tuple[int, bool]:
    """(shared memory a program may use, whether the card has Hopper's or Blackwell's tensor memory engine)."""
    properties = torch.cuda.get_device_properties(device)
    # torch's stubs do not know this attribute.
    shared_memory: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return shared_memory, properties.major >= 9


@cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def use_scratch(m: int, e: int, n: int, halves: int, dtype: torch.dtype, device: int) -> bool:
    """Whether a product decodes slices into scratch; dgrad's contraction must then end each half on a whole step."""
    limit, hopper = device_limits(device)
    fits = DENSE_CONFIG.shared_memory(dtype.itemsize) <= limit
    steps = n % (halves * DENSE_CONFIG.depth) == 0
    return hopper and fits and steps and dtype != torch.float32 and rows_per_expert(m, e) >= SCRATCH_ROWS_PER_EXPERT


def rows_per_expert(m: int, e: int) -> int:
    return max(1, m // e)


def linear_config(rows: int, dtype: torch.dtype, limit: int) -> LinearConfig:
    """The tile for an average of `rows` rows per expert on a card with `limit` bytes of shared memory."""
    if dtype == torch.float32:
        return LINEAR_FP32
    fitting = [c for c in LINEAR_CONFIGS if c.shared_memory(dtype.itemsize) <= limit]
    return next((c for c in fitting if c.tokens <= 2 * rows), fitting[-1])


def dgrad_config(rows: int, dtype: torch.dtype, limit: int) -> DgradConfig:
    """As `linear_config`, for the product with the weight's transpose."""
    if dtype == torch.float32:
        return DGRAD_FP32
    fitting = [c for c in DGRAD_CONFIGS if c.shared_memory(dtype.itemsize) <= limit]
    return next((c for c in fitting if c.tokens <= 2 * rows), fitting[-1])


def wgrad_splits(m: int, programs: int) -> int:
    """Into how many row ranges the factor gradients of each expert are split, to fill the card when experts are few."""
    return max(1, min(WGRAD_PROGRAMS // max(1, programs), m // WGRAD_ROWS_PER_SPLIT, 32))
