"""codes and scales -> values: e2m1(code) · (block scale · global scale) in fp32, in this order, rounded once."""

import triton
import triton.language as tl

from .decode import block_scale, decode_pair


@triton.jit
def dequantize(
    codes, scales, global_scale, out, blocks, blocks_per_scale,
    B: tl.constexpr, BLOCKS: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks; where a block lies in a row does not matter, since rows are whole numbers of blocks."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    packed = tl.load(
        codes + block[:, None] * (B // 2) + tl.arange(0, B // 2)[None, :], mask=inside[:, None], other=0
    )  # fmt: skip
    scale = block_scale(tl.load(scales + block, mask=inside, other=0), MX)
    factor = scale * tl.load(global_scale + block // blocks_per_scale, mask=inside, other=1.0)
    even, odd = decode_pair(packed, tl.broadcast_to(factor[:, None], (BLOCKS, B // 2)), tl.float32, True, False)
    where = block[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(out + where, tl.interleave(even, odd).to(out.dtype.element_ty), mask=inside[:, None])
