"""Routing: slots in stable order by expert, and only integers.

Few slots take one launch, every expert a program that looks at all of them. Many take three, none of which walks a
long chain of steps: chunks count their slots, every expert adds its counts up over the chunks, chunks place theirs.
"""

import triton
import triton.language as tl

from .dependent import wait_for_previous


@triton.jit
def _expert_of(ids, slots, M, E):
    """The expert of each slot, E where it is not routed or lies after the last one."""
    inside = slots < M
    expert = tl.load(ids + slots, mask=inside, other=0).to(tl.int64)  # no unsigned id could say "none"
    return tl.where(inside & (expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["M"])
def route_at_once(ids, rows, inverse, offsets, M, E, SLOTS: tl.constexpr, PDL: tl.constexpr = False):
    """rows, inverse and offsets; program e sees to the slots of expert e, program E to those that are not routed."""
    wait_for_previous(PDL)
    me = tl.program_id(0)
    slots = tl.arange(0, SLOTS)
    expert = _expert_of(ids, slots, M, E)
    first = tl.sum((expert < me).to(tl.int32), 0)
    mine = (expert == me) & (slots < M)
    row = first - 1 + tl.cumsum(mine.to(tl.int32), 0)
    tl.store(rows + row, slots, mask=mine)
    tl.store(inverse + slots, tl.where(me < E, row, -1), mask=mine)
    tl.store(offsets + me - 1, first, mask=me > 0)


@triton.jit(do_not_specialize=["M", "blocks_per_chunk"])
def route_count(
    ids, counts, M, blocks_per_chunk, E, BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """counts[chunk, expert]: how many slots of this program's chunk each expert has; bin E: those not routed.

    Bin E also has what lies after the last slot, in the last chunk: nothing asks for that count.
    """
    wait_for_previous(PDL)
    chunk = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BINS,), tl.int32)
    for block in range(0, blocks_per_chunk):
        slots = (chunk * blocks_per_chunk + block) * BLOCK + tl.arange(0, BLOCK)
        total += tl.histogram(_expert_of(ids, slots, M, E), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + chunk * BINS + bins, total, mask=bins <= E)


@triton.jit(do_not_specialize=["chunks"])
def route_scan(counts, chunks, BINS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr = False):
    """counts[chunk, expert], in place: how many slots the expert has up to and with the chunk; one expert a program."""
    wait_for_previous(PDL)
    chunk = tl.arange(0, CHUNKS)
    column = counts + tl.program_id(0) + chunk * BINS
    total = tl.cumsum(tl.load(column, mask=chunk < chunks, other=0), 0)
    tl.store(column, total, mask=chunk < chunks)


@triton.jit(do_not_specialize=["M", "blocks_per_chunk", "chunks"])
def route_place(
    ids, counts, rows, inverse, offsets, M, blocks_per_chunk, chunks, E, BINS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """rows, inverse and (program 0) offsets, from the counts that are added up.

    A slot's row: how many slots lower experts have, its own expert in earlier chunks, and its own before it here.
    """
    wait_for_previous(PDL)
    chunk = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    total = tl.load(counts + (chunks - 1) * BINS + bins, mask=bins <= E, other=0)
    earlier = tl.load(counts + (chunk - 1) * BINS + bins, mask=(bins <= E) & (chunk > 0), other=0)
    end = tl.cumsum(total, 0)
    if chunk == 0:
        tl.store(offsets + bins, end, mask=bins < E)
    next_row = end - total + earlier
    position = tl.arange(0, BLOCK)
    for block in range(0, blocks_per_chunk):
        slots = (chunk * blocks_per_chunk + block) * BLOCK + position
        expert = _expert_of(ids, slots, M, E)
        # Summed along the first axis, which a thread has all of: no value crosses threads.
        same_before = (expert[:, None] == expert[None, :]) & (position[:, None] < position[None, :])
        row = tl.gather(next_row, expert, 0) + tl.sum(same_before.to(tl.int32), 0)
        tl.store(rows + row, slots.to(tl.int32), mask=slots < M)
        tl.store(inverse + slots, tl.where(expert < E, row, -1), mask=slots < M)
        next_row += tl.histogram(expert, BINS)
