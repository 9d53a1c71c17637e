"""The grouped products on Hopper: y = x W_eᵀ·g + u b_eᵀ (+ bias) and gx = (gy·g) W_e + v a_e, in one kernel body.

Both are out[token, m] = sum over k of W[m, k] x[token, k] with the weight as the left operand, decoded in registers:
for `y`, m runs over the weight's rows and k over its columns; for `gx` (TRANSPOSED) the other way round. Written in
Gluon, because overlap is all: one warp keeps a ring of tiles filled by TMA, two more decode block scales into it, once
for all, and the consumers decode half a step while the matrix units work on the half before. Triton itself would wait
for each product (`grouped_gemm.settled`).

No value moves between threads. The two k that one register of the left operand pairs are nibbles four apart in a pair
of 16-bit words (`y`), or the same nibble of two weight rows (`gx`, where `ldmatrix` transposes): the decoder leaves
every nibble where it is. For `y` this fixes the order in which k is summed, so x comes with the columns of each 32
permuted (FRAGMENT order of `shrink.py`). Output rows are ordered so that a thread's lie next to each other in memory.

A tile has OUTPUTS columns. With four consumer warps each thread decodes all four nibbles of its words, and two programs
share a processor. With eight, for twice the TOKENS, each warpgroup has half of the outputs. The last tile of an expert,
where it is at most half full, multiplies with half of its rows.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .dependent import wait_for_previous
from .hopper_decode import decode, decode_two
from .hopper_feed import K_STEP, M_TILE, count_tiles, fill_scales, halves, locate_tile, produce
from .hopper_layouts import (
    blocks_layout,
    grouped,
    out_layout,
    output_index,
    slots_layout,
    slots_shape,
    split,
    words_layout,
)

WORKER_REGISTERS = gl.constexpr(40)


@gluon.jit
def _from_slots(slots, B: gl.constexpr, TRANSPOSED: gl.constexpr, WARPS: gl.constexpr):
    """A step's block scales `[blocks, DEPTH]` (TRANSPOSED) or `[OUTPUTS, blocks]`, of its two halves of k."""
    scale = slots.load(slots_layout(TRANSPOSED, WARPS, B))
    SCALES: gl.constexpr = gl.SliceLayout(1 if TRANSPOSED else 2, blocks_layout(TRANSPOSED, WARPS, B, K_STEP))
    if TRANSPOSED:
        scale = scale.reshape([M_TILE // B, 4, 8, 2]).permute((0, 2, 1, 3)).reshape([M_TILE // B, K_STEP])
        low, high = split(gl.convert_layout(scale, SCALES, assert_trivial=True), M_TILE // B, K_STEP)
    else:
        scale = (
            scale.reshape([4, 8, K_STEP // B // 2, 2, 2, 2]).permute((3, 0, 5, 1, 4, 2)).reshape([M_TILE, K_STEP // B])
        )
        low, high = split(gl.convert_layout(scale, SCALES, assert_trivial=True), M_TILE, K_STEP // B)
    return low, high


@gluon.jit
def _left(
    words, scale, B: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, TRANSPOSED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The left operand `[OUTPUTS, DEPTH / 2]` of half a step."""
    MX: gl.constexpr = B == 32
    HALF: gl.constexpr = blocks_layout(TRANSPOSED, WARPS, B, K_STEP // 2)
    if TRANSPOSED:
        words = words.reshape([M_TILE // B, B // 4, K_STEP // 2])
    else:
        words = words.reshape([M_TILE, K_STEP // 2 // B, B // 4])
    if TRANSPOSED and WARPS == 8:
        # Each warpgroup takes two of the four nibbles.
        GROUPED: gl.constexpr = grouped(HALF)
        words = gl.convert_layout(words, gl.SliceLayout(0, GROUPED), assert_trivial=True).expand_dims(0)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, gl.SliceLayout(2, GROUPED)), assert_trivial=True)
        scale = scale.expand_dims(0).expand_dims(2)
        shift = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, GROUPED)))) * 8
        shift = shift.expand_dims(1).expand_dims(2).expand_dims(3)
        a, b = decode_two(words, scale, shift, DTYPE, MX)
        rows = gl.join(a, b).reshape([2, 4, 8, K_STEP // 2, 2]).permute((0, 1, 4, 2, 3))
    else:
        words = gl.convert_layout(words, HALF, assert_trivial=True)
        AXIS: gl.constexpr = 1 if TRANSPOSED else 2
        scale = gl.convert_layout(scale, gl.SliceLayout(AXIS, HALF), assert_trivial=True).expand_dims(AXIS)
        a, b, c, d = decode(words, scale, DTYPE, MX)
        quads = gl.join(gl.join(a, b), gl.join(c, d))
        if TRANSPOSED:
            rows = quads.reshape([4, 8, K_STEP // 2, 2, 2]).permute((4, 0, 3, 1, 2))
        else:
            rows = quads.reshape([M_TILE, 8, 2, 2]).permute((0, 3, 2, 1))
    return gl.convert_layout(rows.reshape([M_TILE, K_STEP // 2]), OPERAND, assert_trivial=True)


@gluon.jit
def _halved_words(codes, TRANSPOSED: gl.constexpr, WARPS: gl.constexpr):
    """The words of a step for its first and its second half of k."""
    WORDS: gl.constexpr = words_layout(TRANSPOSED, WARPS)
    if TRANSPOSED:
        low, high = split(codes.permute((1, 0)).load(WORDS), M_TILE // 4, K_STEP)
    else:
        words = codes.load(WORDS).reshape([2, 2, 4, 8, K_STEP // 4]).permute((0, 2, 1, 3, 4))
        low, high = split(words.reshape([M_TILE, K_STEP // 4]), M_TILE, K_STEP // 4)
    return low, high


@gluon.jit
def _add_lora(
    acc, factor, u, expert, row, end, m0, out_width, lora_r, R: gl.constexpr, TOKENS: gl.constexpr,
    TRANSPOSED: gl.constexpr, WARPS: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """acc + factor uᵀ, 16 ranks at a time: more would take shared memory that another program needs."""
    CHUNK: gl.constexpr = 16
    U_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // CHUNK, CHUNK // 8], [WARPS, 1], [1, 0])
    U_SHARED: gl.constexpr = gl.NVMMASharedLayout(CHUNK * 2, 16, rank=2)
    u_tile = gl.allocate_shared_memory(DTYPE, [TOKENS, CHUNK], U_SHARED)
    m = m0 + output_index(gl.arange(0, M_TILE, gl.SliceLayout(1, OPERAND)))
    r = gl.arange(0, CHUNK, gl.SliceLayout(0, OPERAND))
    row_u = row + gl.arange(0, TOKENS, gl.SliceLayout(1, U_LOAD))
    r_u = gl.arange(0, CHUNK, gl.SliceLayout(0, U_LOAD))
    factor_e = factor + expert.to(gl.int64) * lora_r * out_width
    for chunk in gl.static_range(0, R, CHUNK):
        if TRANSPOSED:
            place = (r + chunk)[None, :] * out_width + m[:, None]
        else:
            place = m[:, None] * lora_r + (r + chunk)[None, :]
        mask = (m < out_width)[:, None] & (r + chunk < lora_r)[None, :]
        f = gl.load(factor_e + place, mask=mask, other=0.0).to(DTYPE)
        u_place = row_u.to(gl.int64)[:, None] * lora_r + (r_u + chunk)[None, :]
        u_tile.store(gl.load(u + u_place, mask=(row_u < end)[:, None] & (r_u + chunk < lora_r)[None, :], other=0.0))
        fence_async_shared()
        acc = warpgroup_mma(f, u_tile.permute((1, 0)), acc, is_async=True)
        acc, f = warpgroup_mma_wait(0, deps=[acc, f])
    return acc


@gluon.jit
def _add_bias(
    acc, bias, slots, slot_weights, expert, row, end, m, out_width, TOKENS: gl.constexpr, MMA: gl.constexpr,
    WEIGHTED_BIAS: gl.constexpr,
):  # fmt: skip
    bias_m = gl.load(bias + expert.to(gl.int64) * out_width + m, mask=m < out_width, other=0.0)
    added = bias_m.to(gl.float32)[:, None]
    if WEIGHTED_BIAS:
        rows = row + gl.arange(0, TOKENS, gl.SliceLayout(0, MMA))
        slot = gl.load(slots + rows, mask=rows < end, other=0)
        added = added * gl.load(slot_weights + slot, mask=rows < end, other=0.0).to(gl.float32)[None, :]
    return acc + added


@gluon.jit
def _anew(number):
    """The same number, and the compiler cannot tell: what is computed from it is not kept from tile to tile."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store(
    acc, out, row, end, m0, out_width, TOKENS: gl.constexpr, WARPS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = out_layout(TOKENS, WARPS)
    if WARPS == 8:  # 256 rows' places would take registers that the main loop needs
        out_width = _anew(out_width)
    tile = acc.to(DTYPE).reshape([2, 4, 2, 8, TOKENS]).permute((4, 1, 3, 0, 2)).reshape([TOKENS, M_TILE])
    tile = gl.convert_layout(tile, OUT, assert_trivial=True)
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, OUT))
    column = gl.arange(0, M_TILE, gl.SliceLayout(0, OUT))
    mask = (token < end - row)[:, None] & (column < out_width - m0)[None, :]
    out_tile = out + row.to(gl.int64) * out_width + m0
    gl.store(out_tile + token[:, None] * out_width + column[None, :], tile, mask=mask)


@gluon.jit
def _consume(
    full, empty, x_ring, codes_ring, scales_ring, row_scale, global_scale, factor, u, bias, slots, slot_weights,
    offsets, out, N, out_width, lora_r, tiles_m, programs,
    E, E_POW2: gl.constexpr, B: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
    TOKENS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    TRANSPOSED: gl.constexpr, WEIGHTED_BIAS: gl.constexpr, UNIT: gl.constexpr,
    DTYPE: gl.constexpr, AFTER: gl.constexpr, HALF_TILES: gl.constexpr,
):  # fmt: skip
    count = 0
    counts, until = count_tiles(offsets, E, E_POW2, TOKENS, AFTER)
    for tile in range(gl.program_id(0), gl.sum(counts, 0) * tiles_m, programs):
        expert, row, end = locate_tile(tile // tiles_m, offsets, counts, until, TOKENS, AFTER)
        m0 = tile % tiles_m * M_TILE
        if HALF_TILES and end - row <= TOKENS // 2:
            count = _multiply(
                full, empty, x_ring, codes_ring, scales_ring, row_scale, global_scale, factor, u, bias, slots,
                slot_weights, out, N, out_width, lora_r, count, expert, row, end, m0, B, S, R, TOKENS // 2, STEPS,
                STAGES, WARPS, TRANSPOSED, WEIGHTED_BIAS, UNIT, DTYPE,
            )  # fmt: skip
        else:
            count = _multiply(
                full, empty, x_ring, codes_ring, scales_ring, row_scale, global_scale, factor, u, bias, slots,
                slot_weights, out, N, out_width, lora_r, count, expert, row, end, m0, B, S, R, TOKENS, STEPS,
                STAGES, WARPS, TRANSPOSED, WEIGHTED_BIAS, UNIT, DTYPE,
            )  # fmt: skip


@gluon.jit
def _multiply(
    full, empty, x_ring, codes_ring, scales_ring, row_scale, global_scale, factor, u, bias, slots, slot_weights,
    out, N, out_width, lora_r, count, expert, row, end, m0,
    B: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
    TOKENS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    TRANSPOSED: gl.constexpr, WEIGHTED_BIAS: gl.constexpr, UNIT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A tile: decode and multiply step by step, then scale, LoRA, bias and store. Returns the steps taken so far."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    TWO: gl.constexpr = TRANSPOSED and S == 2
    ratio = 1.0
    large = 1.0
    if TRANSPOSED:
        _first, ratio, large = halves(global_scale, expert, S)
    acc = gl.zeros([M_TILE, TOKENS], gl.float32, MMA)
    previous = gl.zeros([M_TILE, K_STEP // 2], DTYPE, OPERAND)
    for step in range(STEPS):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        scale_low, scale_high = _from_slots(scales_ring.index(stage), B, TRANSPOSED, WARPS)
        low, high = _halved_words(codes_ring.index(stage), TRANSPOSED, WARPS)
        x = x_ring.index(stage).slice(0, TOKENS).permute((1, 0))
        left = _left(low, scale_low, B, OPERAND, DTYPE, TRANSPOSED, WARPS)
        acc = warpgroup_mma(left, x.slice(0, K_STEP // 2), acc, is_async=True)
        # All products before this one are done: with their registers, and with the stage before.
        acc, previous = warpgroup_mma_wait(1, deps=[acc, previous])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        previous = _left(high, scale_high, B, OPERAND, DTYPE, TRANSPOSED, WARPS)
        acc = warpgroup_mma(previous, x.slice(K_STEP // 2, K_STEP // 2), acc, is_async=True)
        acc, left = warpgroup_mma_wait(1, deps=[acc, left])
        if TWO:
            if step == STEPS // 2 - 1:
                acc = warpgroup_mma_wait(0, deps=[acc])
                acc = acc * ratio
        count += 1
    acc, previous = warpgroup_mma_wait(0, deps=[acc, previous])
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)

    _finish(
        acc, row_scale, global_scale, factor, u, bias, slots, slot_weights, out, N, out_width, lora_r, expert, row, end,
        m0, large, S, R, TOKENS, WARPS, TRANSPOSED, WEIGHTED_BIAS, UNIT, DTYPE,
    )  # fmt: skip
    return count


@gluon.jit
def _finish(
    acc, row_scale, global_scale, factor, u, bias, slots, slot_weights, out, N, out_width, lora_r, expert, row, end, m0,
    large, S: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, TRANSPOSED: gl.constexpr,
    WEIGHTED_BIAS: gl.constexpr, UNIT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Scale a tile's sums, add LoRA and bias, store. `large`: what `halves` says of the global scales (TRANSPOSED)."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    m = m0 + output_index(gl.arange(0, M_TILE, gl.SliceLayout(1, MMA)))
    if TRANSPOSED:
        acc = acc * (large * UNIT)
    elif S == 2:
        g0 = gl.load(global_scale + expert * 2) * UNIT
        g1 = gl.load(global_scale + expert * 2 + 1) * UNIT
        acc = acc * gl.where(m < N // 2, g0, g1)[:, None]
    else:
        acc = acc * (gl.load(global_scale + expert) * UNIT)
    if row_scale is not None:
        token = row + gl.arange(0, TOKENS, gl.SliceLayout(0, MMA))
        acc = acc * gl.load(row_scale + token, mask=token < end, other=0.0)[None, :]
    if R > 0:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
        acc = _add_lora(
            acc, factor, u, expert, row, end, m0, out_width, lora_r, R, TOKENS, TRANSPOSED, WARPS, OPERAND, DTYPE
        )
    if bias is not None:
        acc = _add_bias(acc, bias, slots, slot_weights, expert, row, end, m, out_width, TOKENS, MMA, WEIGHTED_BIAS)
    _store(acc, out, row, end, m0, out_width, TOKENS, WARPS, DTYPE)


@gluon.jit(do_not_specialize=["tiles_m", "programs"])
def grouped_product(
    x, row_scale, codes, scales, global_scale, factor, u, bias, slots, slot_weights, offsets, out, N, out_width,
    lora_r, tiles_m, programs,
    E, E_POW2: gl.constexpr, C: gl.constexpr, B: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
    TOKENS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    TRANSPOSED: gl.constexpr, WEIGHTED_BIAS: gl.constexpr, RAGGED: gl.constexpr, UNIT: gl.constexpr,
    DTYPE: gl.constexpr, AFTER: gl.constexpr, HALF_TILES: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """x: a descriptor of `[TOKENS, DEPTH]` boxes; codes: of the codes as int16, see `code_boxes`."""
    SLOTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_ring = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, K_STEP], x.layout)
    codes_ring = gl.allocate_shared_memory(gl.int16, [STAGES] + codes.block_type.shape, codes.layout)
    scales_ring = gl.allocate_shared_memory(DTYPE, [STAGES] + slots_shape(B, TRANSPOSED), SLOTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # x and codes; scales
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    wait_for_previous(PDL)
    gl.warp_specialize(
        [
            (_consume, (
                full, empty, x_ring, codes_ring, scales_ring, row_scale, global_scale, factor, u, bias, slots,
                slot_weights, offsets, out, N, out_width, lora_r, tiles_m, programs, E, E_POW2, B, S, R, TOKENS,
                STEPS, STAGES, WARPS, TRANSPOSED, WEIGHTED_BIAS, UNIT, DTYPE, AFTER, HALF_TILES)),
            (produce, (
                x, codes, global_scale, offsets, full, empty, x_ring, codes_ring, N, tiles_m, programs,
                E, E_POW2, TOKENS, STEPS, STAGES, TRANSPOSED, S, AFTER)),
            (fill_scales, (
                scales, global_scale, offsets, full, empty, scales_ring, N, out_width, tiles_m, programs,
                E, E_POW2, C, B, S, TOKENS, STEPS, STAGES, TRANSPOSED, RAGGED, DTYPE, AFTER, 0)),
            (fill_scales, (
                scales, global_scale, offsets, full, empty, scales_ring, N, out_width, tiles_m, programs,
                E, E_POW2, C, B, S, TOKENS, STEPS, STAGES, TRANSPOSED, RAGGED, DTYPE, AFTER, 1)),
        ],
        [1] * 3, [WORKER_REGISTERS] * 3,
    )  # fmt: skip
