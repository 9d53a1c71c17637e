"""What feeds Hopper's own product (`hopper.py`): its tiles, and the warps that keep its ring filled.

One warp has the copy engine (TMA) fetch x and codes; two take turns at decoding block scales into the ring. They walk
the same tiles as the consumers, each by itself, and meet them at barriers only.
"""

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_decode import decode_scales
from .hopper_layouts import DEPTH, OUTPUTS, slots_shape

FILLERS = gl.constexpr(2)
M_TILE = gl.constexpr(OUTPUTS)
K_STEP = gl.constexpr(DEPTH)


_X_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_COLUMNS_BOX = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
_ROWS_BOX = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=3)


def x_boxes(x: Tensor, tokens: int) -> TensorDescriptor:
    """A TMA descriptor of contiguous rows, for boxes `[tokens, DEPTH]`."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [tokens, DEPTH], _X_BOX)


def code_boxes(codes: Tensor, transposed: bool) -> TensorDescriptor:
    """A TMA descriptor of codes `[E, N, C/2]` as 16-bit words.

    Transposed, a box is DEPTH rows of the weight × OUTPUTS columns. Otherwise it is OUTPUTS rows × DEPTH columns, with
    row 4i + s at `[s, i]`: eight threads side by side then read rows that lie side by side.
    """
    e, n, half_c = codes.shape
    words = codes.view(torch.int16)
    if transposed:
        box = [DEPTH, OUTPUTS // 4]
        return TensorDescriptor(words, [e * n, half_c // 2], [half_c // 2, 1], box, _COLUMNS_BOX)
    shape, strides = [4, e * n // 4, half_c // 2], [half_c // 2, 2 * half_c, 1]
    return TensorDescriptor(words, shape, strides, [4, OUTPUTS // 4, DEPTH // 4], _ROWS_BOX)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def expert_tiles(offsets, E, E_POW2: gl.constexpr, BLOCK: gl.constexpr, AFTER: gl.constexpr):
    """Of each expert its number, first row, end row, row tiles, and these with those of the experts before it.

    Each warp has all of it. Only tiles that have rows count: a tile without would leave its program idle while others
    still work.
    """
    EXPERTS: gl.constexpr = E_POW2 if E_POW2 > 32 else 32
    experts = gl.arange(0, EXPERTS, gl.BlockedLayout([EXPERTS // 32], [32], [gl.num_warps()], [0]))
    has_begin = experts < E
    if not AFTER:
        has_begin = has_begin & (experts > 0)
    begin = gl.load(offsets + experts - 1, mask=has_begin, other=0)
    end = gl.load(offsets + experts, mask=experts < E, other=0)
    counts = (end - begin + BLOCK - 1) // BLOCK
    return experts, begin, end, counts, gl.associative_scan(counts, 0, _add)


@gluon.jit
def count_tiles(offsets, E, E_POW2: gl.constexpr, BLOCK: gl.constexpr, AFTER: gl.constexpr):
    """(row tiles of each expert, the same with those of the experts before it): what `locate_tile` asks."""
    _experts, _begin, _end, counts, until = expert_tiles(offsets, E, E_POW2, BLOCK, AFTER)
    return counts, until


@gluon.jit
def locate_tile(tile, offsets, counts, until, BLOCK: gl.constexpr, AFTER: gl.constexpr):
    """(expert, first row, end row of the expert) of a row tile; see `count_tiles`."""
    before = until <= tile
    expert = gl.sum(before.to(gl.int32), 0)
    tile -= gl.sum(gl.where(before, counts, 0), 0)
    begin = gl.load(offsets + expert - 1, mask=AFTER or expert > 0, other=0)
    return expert, begin + tile * BLOCK, gl.load(offsets + expert)


@gluon.jit
def halves(global_scale, expert, S: gl.constexpr):
    """(first half's rows to sum first as 0 or 1, ratio of its scale to the other's, the other's scale)."""
    if S == 2:
        g0 = gl.load(global_scale + expert * 2)
        g1 = gl.load(global_scale + expert * 2 + 1)
        swap = gl.abs(g0) > gl.abs(g1)
        small = gl.where(swap, g1, g0)
        large = gl.where(swap, g0, g1)
        ratio = gl.where(large == 0.0, 0.0, small / gl.where(large == 0.0, 1.0, large))
        first = gl.where(swap, 1, 0)
    else:
        large = gl.load(global_scale + expert)
        ratio = large
        first = 0
    return first, ratio, large


@gluon.jit
def _first_half(global_scale, expert, TWO: gl.constexpr):
    """Which half `_k_of_step` is to begin with."""
    first = 0
    if TWO:
        first, _ratio, _large = halves(global_scale, expert, 2)
    return first


@gluon.jit
def _k_of_step(step, first, STEPS: gl.constexpr, TWO: gl.constexpr):
    """Where a step begins along k; with TWO halves, the half `first` comes first."""
    k = step * K_STEP
    if TWO:
        HALF: gl.constexpr = STEPS // 2
        k = gl.where(step < HALF, step + first * HALF, step - HALF + (1 - first) * HALF) * K_STEP
    return k


@gluon.jit
def produce(
    x, codes, global_scale, offsets, full, empty, x_ring, codes_ring, N, tiles_m, programs,
    E, E_POW2: gl.constexpr, TOKENS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr, S: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """Keep the ring filled: for each step the codes and a tile of x, on the barrier that its scales are told on too."""
    BYTES: gl.constexpr = M_TILE * K_STEP // 2 + TOKENS * K_STEP * 2
    TWO: gl.constexpr = TRANSPOSED and S == 2
    count = 0
    counts, until = count_tiles(offsets, E, E_POW2, TOKENS, AFTER)
    for tile in range(gl.program_id(0), gl.sum(counts, 0) * tiles_m, programs):
        expert, row, end = locate_tile(tile // tiles_m, offsets, counts, until, TOKENS, AFTER)
        m = tile % tiles_m * M_TILE
        first = _first_half(global_scale, expert, TWO)
        for step in range(STEPS):
            k = _k_of_step(step, first, STEPS, TWO)
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            if TRANSPOSED:
                place = [expert * N + k, m // 4]
            else:
                place = [0, (expert * N + m) // 4, k // 4]
            tma.async_copy_global_to_shared(codes, place, full.index(stage), codes_ring.index(stage))
            tma.async_copy_global_to_shared(x, [row, k], full.index(stage), x_ring.index(stage))
            count += 1


@gluon.jit
def fill_scales(
    scales, global_scale, offsets, full, empty, scales_ring, N, out_width, tiles_m, programs,
    E, E_POW2: gl.constexpr, C: gl.constexpr, B: gl.constexpr, S: gl.constexpr, TOKENS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, RAGGED: gl.constexpr, DTYPE: gl.constexpr,
    AFTER: gl.constexpr, FILLER: gl.constexpr,
):  # fmt: skip
    """Fill the ring's block scales for all consumers, one warp every FILLERS-th step, in turn.

    Loads are two of its steps ahead of what it decodes.
    """
    MX: gl.constexpr = B == 32
    TWO: gl.constexpr = TRANSPOSED and S == 2
    ROWS: gl.constexpr = K_STEP if TRANSPOSED else M_TILE
    WORDS: gl.constexpr = 2 if TRANSPOSED else 1
    WORD: gl.constexpr = 2 if MX else 4
    PER_ROW: gl.constexpr = C // B // WORD
    LAYOUT: gl.constexpr = gl.BlockedLayout([ROWS // 32, WORDS], [32, 1], [1, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))[None, :]
    words = scales.to(gl.pointer_type(gl.int16 if MX else gl.int32), bitcast=True)
    count = 0
    counts, until = count_tiles(offsets, E, E_POW2, TOKENS, AFTER)
    for tile in range(gl.program_id(0), gl.sum(counts, 0) * tiles_m, programs):
        expert, _row, _end = locate_tile(tile // tiles_m, offsets, counts, until, TOKENS, AFTER)
        m0 = tile % tiles_m * M_TILE
        first = _first_half(global_scale, expert, TWO)
        if TRANSPOSED:
            base = words + expert.to(gl.int64) * N * PER_ROW + m0 // (B * WORD)
            inside = (word < (out_width - m0) // (B * WORD)) & (row < K_STEP)
        else:
            base = words + (expert.to(gl.int64) * N + m0) * PER_ROW
            inside = (row < out_width - m0) & (word < 1)
        place = row * PER_ROW + word
        begin = (FILLER + (FILLERS - 1) * count) % FILLERS  # this warp's first step, going on with its turn
        nearest, next = gl.minimum(begin, STEPS - 1), gl.minimum(begin + FILLERS, STEPS - 1)
        now = _load_words(base, place, inside, nearest, first, PER_ROW, STEPS, TRANSPOSED, TWO, RAGGED)
        after = _load_words(base, place, inside, next, first, PER_ROW, STEPS, TRANSPOSED, TWO, RAGGED)
        for step in range(begin, STEPS, FILLERS):
            ahead = gl.minimum(step + 2 * FILLERS, STEPS - 1)
            last = _load_words(base, place, inside, ahead, first, PER_ROW, STEPS, TRANSPOSED, TWO, RAGGED)
            scale = decode_scales(now, DTYPE, MX)
            stage = (count + step) % STAGES
            mbarrier.wait(empty.index(stage), (((count + step) // STAGES) & 1) ^ 1)
            scales_ring.index(stage).store(_to_slots(scale, B, TRANSPOSED))
            mbarrier.arrive(full.index(stage), count=1)
            now = after
            after = last
        count += STEPS


@gluon.jit
def _load_words(
    base, place, inside, step, first, PER_ROW: gl.constexpr, STEPS: gl.constexpr, TRANSPOSED: gl.constexpr,
    TWO: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    if TRANSPOSED:
        at = base + _k_of_step(step, first, STEPS, TWO) * PER_ROW
    else:
        at = base + step
    if RAGGED:
        words = gl.load(at + place, mask=inside, other=0)
    else:
        words = gl.load(at + place)
    return words


# Block scales lie in the ring as a consumer's thread wants them, in one piece. For gx, `[blocks of outputs, k's bits 1
# and 2, its other bits]`; for y, with row 4i + 2j + h of the tile and block 2l + b (MXFP4: l), `[i, b, j · l · h]`.


@gluon.jit
def _to_slots(scale, B: gl.constexpr, TRANSPOSED: gl.constexpr):
    if TRANSPOSED:  # [k, blocks]
        slots = scale.reshape([8, 4, 2, M_TILE // B]).permute((3, 1, 0, 2))
    else:  # [rows, blocks]
        slots = scale.reshape([M_TILE // 4, 2, 2, 2, K_STEP // B // 2]).permute((0, 4, 1, 3, 2))
    return slots.reshape(slots_shape(B, TRANSPOSED))
