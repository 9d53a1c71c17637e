"""Which rows of which expert a program works on, from the end rows of the experts alone, and where they come from."""

import triton
import triton.language as tl


@triton.jit
def locate_tile(tile, offsets, E, E_POW2: tl.constexpr, BLOCK: tl.constexpr, AFTER: tl.constexpr = False):
    """(expert, first row, end row of the expert) of a row tile; first row >= end row where the tile is idle.

    Expert e owns the tile numbers from begin // BLOCK + e to end // BLOCK + e. That is never too few, needs no prefix
    sum over tile counts, and M // BLOCK + E tiles always suffice. AFTER: `offsets` points into a longer list, and the
    end row before it is where the first of these experts begins; tile numbers count from there.
    """
    if AFTER:
        tile += tl.load(offsets - 1) // BLOCK
    experts = tl.arange(0, E_POW2)
    ends = tl.load(offsets + experts, mask=experts < E, other=0)
    before = (ends // BLOCK + experts + 1 <= tile) & (experts < E)
    expert = tl.sum(before.to(tl.int32), 0)
    has_begin = (expert > 0) & (expert < E)
    if AFTER:
        has_begin = expert < E
    begin = tl.load(offsets + expert - 1, mask=has_begin, other=0)
    end = tl.load(offsets + expert, mask=expert < E, other=0)
    row = begin + (tile - begin // BLOCK - expert) * BLOCK
    return expert, row, end


@triton.jit
def in_turns(program, programs, E):
    """A numbering of the same tiles in which neighbours are of different experts, at about the same place in each.

    Rows of an expert are in the order of the tokens, so tiles that run at a time gather from the same few tokens, which
    the second-level cache holds even where it does not hold all.
    """
    per_expert, rest = programs // E, programs % E
    turn = program % E
    return turn * per_expert + tl.minimum(turn, rest) + program // E


@triton.jit
def token_rows(slots, rows, mask, top_k):
    """Where routed rows lie in a token-side tensor: row slots[m] // top_k, or row m itself without slots; int64."""
    source = rows.to(tl.int64)
    if slots is not None:
        source = (tl.load(slots + rows, mask=mask, other=0) // top_k).to(tl.int64)
    return source
