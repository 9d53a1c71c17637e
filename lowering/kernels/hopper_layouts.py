"""How Hopper's own product (`hopper.py`) lays a step's words, block scales and sums over threads and shared memory."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

OUTPUTS = 128
DEPTH = 64


@gluon.constexpr_function
def words_layout(transposed, warps):
    """Of the 16-bit words of a step: `[OUTPUTS / 4, DEPTH]` (transposed), or `[4, OUTPUTS / 4, DEPTH / 4]`.

    A thread has the words of the rows of the left operand that are its own, in the order in which it holds their k.
    """
    if transposed:
        registers = [[0, 1], [0, 8], [0, 16], [0, 32]]
        lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
        group = [[0, 0]] if warps == 8 else []
        return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]] + group, [], [OUTPUTS // 4, DEPTH])
    registers = [[0, 0, 1], [1, 0, 0], [0, 0, 8]] + ([[2, 0, 0]] if warps == 4 else [])
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    group = [[2, 0, 0]] if warps == 8 else []
    shape = [4, OUTPUTS // 4, DEPTH // 4]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8, 0], [0, 16, 0]] + group, [], shape)


@gluon.constexpr_function
def blocks_layout(transposed, warps, b, depth):
    """The same words by blocks, `depth` of k: `[blocks of outputs, words, k]`, or `[OUTPUTS, blocks of k, words]`."""
    words = b // 4
    if transposed:
        registers = [[0, 0, 1]] + [[0, 0, k] for k in (8, 16, 32) if k < depth]
        outputs = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]] if b == 32 else [
            [0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]  # fmt: skip
        group = [[0, 0, 0]] if warps == 8 else []
        lanes = [[0, 0, 2], [0, 0, 4]] + outputs[:3]
        return gl.DistributedLinearLayout(registers, lanes, outputs[3:] + group, [], [OUTPUTS // b, words, depth])
    blocks = depth // b
    registers = [[0, 0, 1], [8, 0, 0]] + ([[0, blocks // 2, 0]] if depth == DEPTH else [])
    registers += [[64, 0, 0]] if warps == 4 else []
    lanes = [[0, 0, 2], [0, 0, 4] if b == 32 else [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    group = [[64, 0, 0]] if warps == 8 else []
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]] + group, [], [OUTPUTS, blocks, words])


@gluon.constexpr_function
def grouped(layout):
    """A layout of `blocks_layout` with a dim of 2 in front, along which the two warpgroups differ."""

    def deeper(bases):
        return [[0, *basis] for basis in bases]

    return gl.DistributedLinearLayout(
        deeper(layout.reg_bases), deeper(layout.lane_bases), deeper(layout.warp_bases[:-1]) + [[1, 0, 0, 0]], [],
        [2, *layout.shape],
    )  # fmt: skip


@gluon.constexpr_function
def slots_shape(b, transposed):
    return [OUTPUTS // b, 4, 16] if transposed else [OUTPUTS // 4, DEPTH // b // 2, 8]


@gluon.constexpr_function
def slots_layout(transposed, warps, b):
    """Of the ring's block scales, what `blocks_layout` is of the words."""
    blocks = blocks_layout(transposed, warps, b, DEPTH)

    def slot(basis):
        if transposed:
            block, _, k = basis
            return [block, k >> 1 & 3, k & 1 | k >> 3 << 1]
        p, block, _ = basis
        half = DEPTH // b // 2
        return [p & 7 | p >> 1 & 24, block % half, p >> 3 & 1 | block // half << 1 | p >> 6 << 2]

    registers = [slot(basis) for basis in blocks.reg_bases if any(slot(basis))]
    lanes, groups = ([slot(basis) for basis in bases] for bases in (blocks.lane_bases, blocks.warp_bases))
    return gl.DistributedLinearLayout(registers, lanes, groups, [], slots_shape(b, transposed))


@gluon.jit
def split(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The left and the right half of the columns."""
    return x.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)).split()


@gluon.jit
def output_index(p):
    """Which of the tile's outputs the accumulator's row p holds."""
    return ((p >> 4) & 3) * 32 + (p & 7) * 4 + (p >> 6) * 2 + ((p >> 3) & 1)


@gluon.constexpr_function
def out_layout(tokens, warps):
    """Of `[TOKENS, OUTPUTS]`: what the accumulator is once its rows are put in order."""
    registers = [[0, 1]] + ([[0, 2]] if warps == 4 else []) + [[1, 0]]
    registers += [[8 << i, 0] for i in range((tokens // 8).bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    group = [[0, 2]] if warps == 8 else []
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32], [0, 64]] + group, [], [tokens, OUTPUTS])
