"""Launches Hopper's own grouped products, `kernels/hopper.py` and `few_rows.py`, where card and sizes allow them."""

import math
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import configs
from .launch import TRITON_DTYPE, cdiv, launch, padded_rank, row_tiles
from .weight import Weight

TRITON = (3, 6), (3, 7)
"""The first and the last Triton whose Gluon the kernels are known to work with."""


class _Kernels(NamedTuple):
    """The product, what feeds it, and the product of few rows."""

    many_rows: ModuleType
    feed: ModuleType
    few_rows: ModuleType


@cache
def _kernels() -> _Kernels | None:
    """None where this Triton has no Gluon that they are known to work with."""
    if not TRITON[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= TRITON[1]:
        return None
    from .kernels import few_rows, hopper, hopper_feed

    return _Kernels(hopper, hopper_feed, few_rows)


def obstacle(weight: Weight, x: Tensor, *, transposed: bool) -> str | None:
    """Why the kernels cannot take a product, None where they can.

    Their boxes must fit codes and scales, whole steps make up k, and the formats have a decoder.
    """
    _, n, c = weight.sizes
    halves = weight.global_scale.shape[1]
    if configs.family(x.device.index) != 9:
        return "the card is not Hopper"
    if _kernels() is None:
        first, last = (".".join(map(str, version)) for version in TRITON)
        return f"Hopper's own products need Triton {first} to {last}, and this is {triton.__version__}"
    if x.dtype != torch.bfloat16 and (x.dtype != torch.float16 or weight.block != 16):
        kinds = f"{x.dtype} with blocks of {weight.block}"
        return f"Hopper's own products take bf16, and fp16 with blocks of 16, not {kinds}"
    unit = 64 * halves if transposed else math.lcm(4, 2 * halves)
    if c % 64 or n % unit:
        return f"Hopper's own products need C in 64s and N in {unit}s, and these are {c} and {n}"
    if weight.codes.data_ptr() % 16 or weight.scales.data_ptr() % 4:
        return "Hopper's own products need codes that begin at 16 bytes, and scales at 4"
    return None


def product(
    x: Tensor, offsets: Tensor, weight: Weight, factor: Tensor | None, u: Tensor, bias: Tensor | None = None,
    slots: Tensor | None = None, slot_weights: Tensor | None = None, row_scale: Tensor | None = None, *,
    out: Tensor, rows_each: int, transposed: bool = False, after: bool = False,
) -> None:  # fmt: skip
    """Write y `[M, N]` from rows in FRAGMENT order, or, transposed, gx `[M, C]` from rows as they are.

    row_scale: a factor of each row's product. rows_each: how many rows an expert has on average.
    after: the experts are some of more, and `offsets` is preceded by the end row of the expert before.
    """
    kernels = _kernels()
    assert kernels is not None
    feed = kernels.feed
    e, n, c = weight.sizes
    m, dtype = x.shape[0], x.dtype
    out_width, depth = (c, n) if transposed else (n, c)
    if m == 0:
        return
    few = None if transposed else configs.few_rows_config(m, e, rows_each, c)
    if few is not None:
        tiles_m, tokens = cdiv(n, few.outputs), kernels.few_rows.TOKENS.value
        launch(
            kernels.few_rows.few_rows_product, (min(m, row_tiles(m, e, tokens)) * tiles_m,), x.device,
            x, row_scale, weight.codes, weight.scales, weight.global_scale, factor, u, bias, slots, slot_weights,
            offsets, out, n, u.shape[1], tiles_m,
            R=padded_rank(u.shape[1]), X_WIDTH=x.shape[1], OUTPUTS=few.outputs, CHUNKS=few.chunks, WARPS=few.warps,
            WEIGHTED_BIAS=slots is not None, DTYPE=TRITON_DTYPE[dtype], AFTER=after, **weight.constants,
            num_warps=few.warps,
        )  # fmt: skip
        return
    config = configs.hopper_config(rows_each, depth)
    tiles_m = cdiv(out_width, feed.OUTPUTS)
    programs = min((m // config.tokens + e) * tiles_m, config.programs * configs.processors(x.device.index))
    launch(
        kernels.many_rows.grouped_product, (programs,), x.device,
        feed.x_boxes(x, config.tokens), row_scale, feed.code_boxes(weight.codes, transposed), weight.scales,
        weight.global_scale, factor, u, bias, slots, slot_weights, offsets, out, n, out_width, u.shape[1],
        tiles_m, programs,
        R=padded_rank(u.shape[1]), TOKENS=config.tokens, STEPS=depth // feed.DEPTH, STAGES=config.stages,
        WARPS=config.warps, TRANSPOSED=transposed, WEIGHTED_BIAS=slots is not None,
        RAGGED=out_width % feed.OUTPUTS != 0, DTYPE=TRITON_DTYPE[dtype], AFTER=after,
        HALF_TILES=config.half_tiles, **weight.constants, num_warps=config.warps, maxnreg=config.registers,
    )  # fmt: skip
