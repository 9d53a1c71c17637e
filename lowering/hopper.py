"""Launches the warp-specialised grouped product of `kernels/hopper.py`, where the card and the sizes allow it."""

from functools import cache
from types import ModuleType

import torch
import triton
from torch import Tensor

from . import configs
from .launch import TRITON_DTYPE, cdiv, launch, padded_rank
from .weight import Weight


@cache
def _kernels() -> tuple[ModuleType, ModuleType] | None:
    """The product and what feeds it, or None where this Triton has no Gluon that they are known to work with."""
    if not (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 7):
        return None
    from .kernels import hopper, hopper_feed

    return hopper, hopper_feed


def supports(weight: Weight, x: Tensor, *, transposed: bool) -> bool:
    """Whether the kernel's boxes fit codes and scales, whole steps make up k, and the formats have a decoder."""
    _, n, c = weight.sizes
    halves = weight.global_scale.shape[1]
    kinds = x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and weight.block == 16)
    aligned = weight.codes.data_ptr() % 16 == 0 and weight.scales.data_ptr() % 4 == 0
    if not kinds or c % 64 or not aligned or configs.family(x.device.index) != 9:
        return False
    steps = n % (64 * halves) == 0 if transposed else n % 4 == 0 and n % (2 * halves) == 0
    return steps and _kernels() is not None


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
    kernel, feed = kernels
    e, n, c = weight.sizes
    m, dtype = x.shape[0], x.dtype
    out_width, depth = (c, n) if transposed else (n, c)
    if m == 0:
        return
    config = configs.hopper_config(rows_each, depth)
    tiles_m = cdiv(out_width, feed.OUTPUTS)
    programs = min((m // config.tokens + e) * tiles_m, config.programs * configs.processors(x.device.index))
    launch(
        kernel.grouped_product, (programs,), x.device,
        feed.x_boxes(x, config.tokens), row_scale, feed.code_boxes(weight.codes, transposed), weight.scales,
        weight.global_scale, factor, u, bias, slots, slot_weights, offsets, out, n, out_width, u.shape[1],
        tiles_m, programs,
        R=padded_rank(u.shape[1]), TOKENS=config.tokens, STEPS=depth // feed.DEPTH, STAGES=config.stages,
        WARPS=config.warps, TRANSPOSED=transposed, WEIGHTED_BIAS=slots is not None,
        RAGGED=out_width % feed.OUTPUTS != 0, DTYPE=TRITON_DTYPE[dtype], AFTER=after,
        HALF_TILES=config.half_tiles, **weight.constants, num_warps=config.warps, maxnreg=config.registers,
    )  # fmt: skip
