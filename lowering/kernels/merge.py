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
    """A box of ROWS rows × BLOCKS blocks of one expert; a and b in bf16. Launch without fused multiply-adds."""
    MX: tl.constexpr = B == 32
    expert = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row_inside, block_inside = row < N, block < C // B
    weight_row = expert.to(tl.int64) * N + row
    column = block[:, None] * B + tl.arange(0, B)[None, :]
    delta = tl.zeros((ROWS, BLOCKS, B), tl.float32)
    a_r = a + expert.to(tl.int64) * lora_r * C + column
    b_r = b + weight_row * lora_r
    for _ in range(lora_r):
        a_values = tl.load(a_r, mask=block_inside[:, None], other=0.0).to(tl.float32)
        b_values = tl.load(b_r, mask=row_inside, other=0.0).to(tl.float32)
        delta = tl.fma(b_values[:, None, None], a_values[None, :, :], delta)
        a_r += C
        b_r += 1
    delta *= scaling

    where = weight_row[:, None] * (C // B) + block[None, :]
    inside = row_inside[:, None] & block_inside[None, :]
    byte = tl.load(scales + where, mask=inside, other=0)
    code_where = where[:, :, None] * (B // 2) + tl.arange(0, B // 2)[None, None, :]
    packed = tl.load(codes + code_where, mask=inside[:, :, None], other=0)
    g = tl.load(global_scale + expert * S)
    if S == 2:
        g = tl.where(row < N // 2, g, tl.load(global_scale + expert * S + 1))
    g = tl.broadcast_to(tl.broadcast_to(g, (ROWS,))[:, None], (ROWS, BLOCKS))
    factor = tl.broadcast_to((block_scale(byte, MX) * g)[:, :, None], (ROWS, BLOCKS, B // 2))
    even, odd = decode_pair(packed, factor, tl.float32, True, False)
    merged = tl.interleave(even, odd) + delta

    fresh, fresh_byte = encode(tl.reshape(merged, (ROWS * BLOCKS, B)), tl.reshape(g, (ROWS * BLOCKS,)), B, MX)
    changed = tl.max((delta != 0.0).to(tl.int32), 2) > 0
    fresh = tl.where(changed[:, :, None], tl.reshape(fresh, (ROWS, BLOCKS, B // 2)), packed)
    fresh_byte = tl.where(changed, tl.reshape(fresh_byte, (ROWS, BLOCKS)), byte)
    tl.store(out_scales + where, fresh_byte, mask=inside)
    tl.store(out_codes + code_where, fresh, mask=inside[:, :, None])
