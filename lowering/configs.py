"""Tile sizes, as data: which one a launch gets follows from its sizes alone, never from a tuning run.

The one thing that matters is how many rows an expert has on average, M / E: it is known without asking the device, and
rounded to a few classes, so few variants of a kernel ever exist. Sizes chosen on an H200 (see docs/performance.md);
cards with less shared memory take the next smaller tile that fits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import torch

Config = TypeVar("Config")


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
class HopperConfig:
    """The warp-specialised product: TOKENS rows a tile, its ring and its consumers; for `least_rows` an expert and up,
    and contractions of `least_depth` and up.

    So many programs a processor; `registers` of a thread as launched, of which consumers take what the others leave.
    """

    tokens: int
    least_rows: int
    least_depth: int
    stages: int
    warps: int
    programs: int
    registers: int

    @property
    def half_tiles(self) -> bool:
        """Whether an expert's last tile may be multiplied with half of its rows: smaller ones wait for memory."""
        return self.tokens >= 64


# 256 tokens × 8 warps decode half as often for a product, which saves power, of which the card is short; but they round
# more rows up, and nothing runs beside their epilogue: only many rows and long sums pay. Small tiles wait for memory
# more than they compute: three or four of them a processor are 12 to 17 % faster than two.
HOPPER_CONFIGS = (
    HopperConfig(256, 768, 1536, 5, 8, 1, 168),
    HopperConfig(128, 96, 0, 5, 4, 2, 128),
    HopperConfig(64, 24, 0, 8, 4, 2, 128),
    HopperConfig(32, 12, 0, 8, 4, 3, 80),
    HopperConfig(16, 0, 0, 7, 4, 4, 64),
)


@dataclass(frozen=True)
class FewRowsConfig:
    """y = x Wᵀ of few rows an expert: OUTPUTS columns a tile; its warps, and how many chunks each takes in a step."""

    outputs: int
    chunks: int
    warps: int


FEW_ROWS = 4
"""Up to this many rows an expert, a linear product has little to do but read the weight (at 8 the two are level)."""
_ANY = 1 << 31
FEW_ROWS_CONFIGS = (
    (2048, FewRowsConfig(32, 1, 1)), (4096, FewRowsConfig(32, 1, 2)), (_ANY, FewRowsConfig(32, 1, 4))
)  # fmt: skip
"""(C, tile): the first that C is not above. A warp by itself waits for none, but for long sums its code is too long."""
SPARSE_CONFIGS = ((1024, FewRowsConfig(16, 1, 1)), (_ANY, FewRowsConfig(16, 2, 2)))
"""The same where so few experts have rows that the card is not full."""


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


@dataclass(frozen=True)
class BlockScaledConfig:
    """y = x Wᵀ of two packed operands: TOKENS rows × OUTPUTS columns a tile, BYTES of each one's codes a step."""

    tokens: int
    outputs: int
    bytes: int
    stages: int
    warps: int

    @property
    def shared_memory(self) -> int:
        return (self.tokens + self.outputs) * self.bytes * 9 // 8 * self.stages


BLOCK_SCALED = {(10, 0): (3, 6), (10, 3): (3, 6), (12, 0): (3, 6), (12, 1): (3, 8)}
"""Cards with block-scaled NVFP4 products, and the first Triton known to emit them; for sm_121 3.6 and 3.7 fail."""
# 128 outputs are one instruction's rows on sm_100, which has no smaller ones. Built, and not run on such a card.
BLOCK_SCALED_CONFIGS = (
    BlockScaledConfig(128, 128, 64, 4, 4),
    BlockScaledConfig(64, 128, 64, 4, 4),
    BlockScaledConfig(32, 128, 64, 4, 4),
    BlockScaledConfig(16, 128, 64, 4, 4),
)


@dataclass(frozen=True)
class GluBackwardConfig:
    """ROWS rows × COLUMNS columns a step, `span` columns a program, for `least_rows` an expert and up."""

    rows: int
    least_rows: int
    columns: int
    span: int
    stages: int
    warps: int

    def chunks(self, width: int) -> int:
        return -(-width // self.span)

    def constants(self, width: int, halves: int) -> dict[str, int]:
        """What the kernel is compiled for. Each warp multiplies a slice of the columns, of 16 or more for `tl.dot`."""
        span = min(self.span, -(-width // self.columns) * self.columns)
        slices = min(self.warps, halves * self.columns // 16)
        return dict(ROWS=self.rows, COLUMNS=self.columns, SPAN=span, SLICES=slices)


# Few rows fill the card only if their columns are spread over many programs; for many rows long spans write and sum
# less v.
GLU_BACKWARD_CONFIGS = (
    GluBackwardConfig(32, 64, 64, 1024, 3, 4),
    GluBackwardConfig(16, 4, 64, 768, 3, 4),
    GluBackwardConfig(16, 0, 128, 256, 2, 4),
)
GLU_BACKWARD_FP32 = GluBackwardConfig(16, 0, 32, 256, 1, 4)
GLU_BACKWARD_LARGE_RANK = GluBackwardConfig(8, 64, 256, 1 << 20, 1, 4)
GLU_BACKWARD_RANKS = 16
"""Up to this rank v comes out of the same pass; of more, a tile reads more of the factor than of its rows."""
SUM_ROWS, SUM_COLUMNS = 16, 256
DENSE_CONFIG = DenseConfig(128, 256, 64, 4, 8)
DECODE_TILE = (16, 128, 4)
SCRATCH_ROWS_PER_EXPERT = 768
"""From this many rows an expert on, decoding slices beats decoding in the loop of a Triton kernel."""


@dataclass(frozen=True)
class ShrinkConfig:
    """ROWS rows × COLUMNS columns a step; `streams`: moved rows are written as what no cache need hold."""

    rows: int
    columns: int
    stages: int
    streams: bool


SHRINK = ShrinkConfig(64, 128, 3, False)
SHRINK_MANY = ShrinkConfig(128, 128, 2, True)
"""Reads a factor half as often. Timed: ahead at 262,144 rows, behind at 65,536, where few tiles leave the card idle."""
SHRINK_MANY_ROWS, SHRINK_MANY_RANKS = 1 << 17, 16
SHRINK_RANKS = 64
SHRINK_ROW_RANKS, SHRINK_ROW_COLUMNS = 4, 2048
"""Of a row by itself, see `shrinks_rows`."""
GLU_ROWS, GLU_COLUMNS = 8, 256
WGRAD_ROWS, WGRAD_WIDE = 64, 128
WGRAD_PROGRAMS, WGRAD_ROWS_PER_SPLIT = 1056, 512
ROUTE_AT_ONCE = ((512, 4), (4096, 8))
"""(slots, warps) of routing in one launch: the first that has room for all slots."""
ROUTE_BLOCK, ROUTE_WARPS = 128, 4
ROUTE_CHUNKS = 1024
"""At most; a chunk is as many blocks as that takes."""


@cache
def device_limits(device: int) -> tuple[int, bool]:
    """(shared memory a program may use, whether the card has Hopper's or Blackwell's tensor memory engine)."""
    properties = torch.cuda.get_device_properties(device)
    # torch's stubs do not know this attribute.
    shared_memory: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return shared_memory, properties.major >= 9


@cache
def family(device: int) -> int:
    """The card's major compute capability (9: Hopper), 0 where it is not NVIDIA's."""
    return 0 if torch.version.hip else torch.cuda.get_device_capability(device)[0]


def uses_wgmma(device: int, dtype: torch.dtype) -> bool:
    """Whether activations of this dtype take Hopper's asynchronous products; fp32 takes the ordinary cores."""
    return family(device) == 9 and dtype != torch.float32


@cache
def first_block_scaled(device: int) -> tuple[int, int] | None:
    """The first Triton that emits block-scaled products for the card, None where none does."""
    return None if torch.version.hip else BLOCK_SCALED.get(torch.cuda.get_device_capability(device))


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


def hopper_config(rows: int, depth: int) -> HopperConfig:
    """The tile of the warp-specialised product that sums over `depth`; every one fits a Hopper card."""
    return next(c for c in HOPPER_CONFIGS if c.least_rows <= rows and c.least_depth <= depth)


def few_rows_config(m: int, e: int, rows: int, c: int) -> FewRowsConfig | None:
    """The tile of the product of few rows; None where an expert has more."""
    if rows > FEW_ROWS:
        return None
    table = SPARSE_CONFIGS if 4 * m <= e else FEW_ROWS_CONFIGS
    return next(config for most, config in table if c <= most)


def shrinks_rows(m: int, e: int, by_rank: bool) -> bool:
    """Whether a shrink takes row by row: with so few, tiles of an expert's rows are all but empty.

    A factor `[C, R]` (not `by_rank`) is read in pieces of a few numbers, which more rows repeat.
    """
    return m <= e * (FEW_ROWS if by_rank else 1)


def shrink_config(m: int, r: int, dtype: torch.dtype, device: int, *, gathers: bool) -> ShrinkConfig:
    """The tile of a shrink of M rows to `r` ranks a program; the larger one is for gathers, and was timed on Hopper."""
    many = gathers and m >= SHRINK_MANY_ROWS and r <= SHRINK_MANY_RANKS
    return SHRINK_MANY if many and dtype.itemsize == 2 and family(device) == 9 else SHRINK


def glu_backward_config(rows: int, dtype: torch.dtype, r: int) -> GluBackwardConfig:
    """Every one fits every card."""
    if dtype == torch.float32:
        return GLU_BACKWARD_FP32
    tables = (GLU_BACKWARD_LARGE_RANK, *GLU_BACKWARD_CONFIGS) if r > GLU_BACKWARD_RANKS else GLU_BACKWARD_CONFIGS
    return next(c for c in tables if c.least_rows <= rows)


class GluBackwardWay(NamedTuple):
    """The pass's tile, into how many chunks it cuts the columns, whether it makes v, and what a second launch sums."""

    config: GluBackwardConfig
    chunks: int
    makes_v: bool
    sums_v: bool
    sums_gw: bool


def glu_backward_way(rows: int, dtype: torch.dtype, width: int, r: int, *, need_gw: bool, bias: bool) -> GluBackwardWay:
    config = glu_backward_config(rows, dtype, r)
    chunks, makes_v = config.chunks(width), 0 < r <= GLU_BACKWARD_RANKS
    return GluBackwardWay(config, chunks, makes_v, makes_v and chunks > 1, need_gw and (chunks > 1 or bias))


def block_scaled_config(rows: int) -> BlockScaledConfig:
    """Every one fits every card that has such products."""
    return next((c for c in BLOCK_SCALED_CONFIGS if c.tokens <= 2 * rows), BLOCK_SCALED_CONFIGS[-1])


def wgrad_splits(m: int, programs: int) -> int:
    """Into how many row ranges the factor gradients of each expert are split, to fill the card when experts are few."""
    return max(1, min(WGRAD_PROGRAMS // max(1, programs), m // WGRAD_ROWS_PER_SPLIT, 32))


# --- What the compiler's lowerings ask (`grouped.py`) ---

LAUNCHER_ROWS_PER_EXPERT = 64
"""From this many rows an expert on, a card with a copy engine gains more by the eager launcher's TMA descriptors, and
by tiles that follow M at run time, than a launch out of Python costs."""
WGRAD_CANDIDATES = ((WGRAD_ROWS, 3), (WGRAD_ROWS // 2, 4))
"""(rows a step, stages) of the factor gradients."""
ROW_CLASSES = (8, 64, 256, 1024)
"""Rows per expert that stand for all others while choices are timed: few, so that few timings exist."""


def representative_rows(rows: int) -> int:
    """One of four classes, so that what was timed for one T serves all others of its class."""
    return next((c for c in ROW_CLASSES if rows <= 2 * c), ROW_CLASSES[-1])


def launcher_first(rows: int, hopper: bool) -> bool:
    """Whether the eager launcher is taken where nobody asked for timings."""
    return hopper and rows >= LAUNCHER_ROWS_PER_EXPERT


def linear_candidates(rows: int, dtype: torch.dtype, limit: int) -> list[LinearConfig]:
    """The table's tile, then its neighbours in size that fit."""
    chosen = linear_config(rows, dtype, limit)
    return [chosen, *_neighbours(LINEAR_CONFIGS, chosen, lambda c: c.shared_memory(dtype.itemsize) <= limit)]


def dgrad_candidates(rows: int, dtype: torch.dtype, limit: int) -> list[DgradConfig]:
    chosen = dgrad_config(rows, dtype, limit)
    return [chosen, *_neighbours(DGRAD_CONFIGS, chosen, lambda c: c.shared_memory(dtype.itemsize) <= limit)]


def _neighbours(table: tuple[Config, ...], chosen: Config, fits: Callable[[Config], bool]) -> list[Config]:
    if chosen not in table:
        return []
    at = table.index(chosen)
    return [c for c in (*table[at + 1 : at + 2], *table[max(0, at - 1) : at]) if fits(c)]
