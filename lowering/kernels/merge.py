"""W + scaling · b a, packed again on W's own global scale: to the bit what `torch_nvfp4.ops.merge` gives."""

import triton
import triton.language as tl

from .decode import block_scale, decode_pair
from .quantize import encode


@triton.jit
def merge(
    codes, scales, global_scale, a, b, scaling, out_codes, out_scales, N, lora_r,
    C: tl.constexpr, B: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A box of ROWS rows × BLOCKS blocks of one expert; a and b as fp32. Launch without fused multiply-adds.

    The box is a list of blocks, so that a thread owns the same half of a block all the way: the loop over ranks then
    moves no value between threads. (Each row of blocks reads a again, out of the first-level cache.)
    """
    MX: tl.constexpr = B == 32
    expert = tl.program_id(2)
    place = tl.arange(0, ROWS * BLOCKS)
    row = tl.program_id(1) * ROWS + place // BLOCKS
    block = tl.program_id(0) * BLOCKS + place % BLOCKS
    inside = (row < N) & (block < C // B)
    # What lies outside reads the last row or block again: masks in the loop would cost a third of its instructions.
    row, block = tl.minimum(row, N - 1), tl.minimum(block, C // B - 1)
    weight_row = expert.to(tl.int64) * N + row
    delta = tl.zeros((ROWS * BLOCKS, B), tl.float32)
    a_r = a + expert.to(tl.int64) * lora_r * C + (block * B)[:, None] + tl.arange(0, B)[None, :]
    b_r = b + weight_row * lora_r
    for _ in range(lora_r):
        a_values = tl.load(a_r)
        b_values = tl.load(b_r)
        delta = tl.fma(tl.broadcast_to(b_values[:, None], delta.shape), a_values, delta)
        a_r += C
        b_r += 1
    delta *= scaling

    where = weight_row * (C // B) + block
    byte = tl.load(scales + where)
    code_where = where[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :]
    packed = tl.load(codes + code_where)
    g = tl.load(global_scale + expert * S + (0 if S == 1 else (row >= N // 2).to(tl.int32)))
    factor = tl.broadcast_to((block_scale(byte, MX) * g)[:, None], (ROWS * BLOCKS, B // 2))
    even, odd = decode_pair(packed, factor, tl.float32, True, False)
    fresh, fresh_byte = encode(tl.interleave(even, odd) + delta, tl.broadcast_to(g, (ROWS * BLOCKS,)), B, MX)
    changed = tl.max((delta != 0.0).to(tl.int32), 1) > 0
    tl.store(out_scales + where, tl.where(changed, fresh_byte, byte), mask=inside)
    tl.store(out_codes + code_where, tl.where(changed[:, None], fresh, packed), mask=inside[:, None])
