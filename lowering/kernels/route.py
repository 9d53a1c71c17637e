"""Routing in two launches: per-chunk histograms, then every chunk places its slots. Stable, and only integers."""

import triton
import triton.language as tl


@triton.jit
def _expert_of(ids, slots, M, E):
    """The expert of each slot, E where it is not routed (or lies after the last slot: such a slot must be masked)."""
    expert = tl.load(ids + slots, mask=slots < M, other=-1).to(tl.int64)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["M", "blocks_per_chunk"])
def route_count(ids, counts, M, blocks_per_chunk, E, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[chunk, expert]: how many slots of this program's chunk each expert has; bin E: those not routed."""
    chunk = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BINS,), tl.int32)
    for block in range(0, blocks_per_chunk):
        slots = (chunk * blocks_per_chunk + block) * BLOCK + tl.arange(0, BLOCK)
        total += tl.histogram(tl.where(slots < M, _expert_of(ids, slots, M, E), BINS - 1), BINS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), total)


@triton.jit(do_not_specialize=["M", "blocks_per_chunk", "chunks"])
def route_place(
    ids, counts, rows, inverse, offsets, M, blocks_per_chunk, chunks,
    E, BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """rows, inverse and (program 0) offsets.

    A slot's row: how many slots lower experts have, its own expert in earlier chunks, and its own before it here.
    """
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    earlier = tl.zeros((BINS,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        other = first + tl.arange(0, CHUNKS)
        part = tl.load(counts + other[:, None] * BINS + bins[None, :], mask=(other < chunks)[:, None], other=0)
        total += tl.sum(part, 0)
        earlier += tl.sum(tl.where((other < chunk)[:, None], part, 0), 0)
    end = tl.cumsum(total, 0)
    if chunk == 0:
        tl.store(offsets + bins, end, mask=bins < E)
    next_row = end - total + earlier
    for block in range(0, blocks_per_chunk):
        slots = (chunk.to(tl.int64) * blocks_per_chunk + block) * BLOCK + tl.arange(0, BLOCK)
        inside = slots < M
        expert = tl.where(inside, _expert_of(ids, slots, M, E), BINS - 1)
        position = tl.arange(0, BLOCK)
        same_before = (expert[:, None] == expert[None, :]) & (position[None, :] < position[:, None])
        row = tl.gather(next_row, expert, 0) + tl.sum(same_before.to(tl.int32), 1)
        tl.store(rows + row, slots.to(tl.int32), mask=inside)
        tl.store(inverse + slots, tl.where(expert < E, row, -1), mask=inside)
        next_row += tl.histogram(expert, BINS)
