"""Launches the block-scaled product of `kernels/block_scaled.py`, where the card and the weight's format allow it."""

import triton
from torch import Tensor

from . import configs
from .kernels import block_scaled as kernels
from .launch import TRITON_DTYPE, cdiv, launch, padded_rank, precision
from .rows import Rows
from .weight import Weight


def supports(weight: Weight, device: int) -> bool:
    """Both operands' scales must be of one format, and the activations' is NVFP4."""
    return weight.block == 16 and emits(configs.first_block_scaled(device))


def emits(first: tuple[int, int] | None) -> bool:
    """Whether this Triton is one from `first` on."""
    return first is not None and tuple(map(int, triton.__version__.split(".")[:2])) >= first


def linear(
    x: Rows, offsets: Tensor, weight: Weight, lora_b: Tensor | None, u: Tensor, bias: Tensor | None,
    slots: Tensor | None, slot_weights: Tensor | None, *, out: Tensor, rows_each: int, after: bool,
) -> None:  # fmt: skip
    """Write y `[M, N]` from packed rows; the rest as for `hopper.product`."""
    e, n, _ = weight.sizes
    m = out.shape[0]
    config = configs.block_scaled_config(rows_each)
    constants = {name: value for name, value in weight.constants.items() if name not in ("B", "UNIT")}
    launch(
        kernels.block_scaled_linear, ((m // config.tokens + e) * cdiv(n, config.outputs) if m else 0,), out.device,
        x.values, x.block_scales, x.scale, x.slots, x.top_k, weight.codes, weight.scales, weight.global_scale, lora_b,
        u, bias, slots, slot_weights, offsets, out, n, u.shape[1],
        R=padded_rank(u.shape[1]), TOKENS=config.tokens, OUTPUTS=config.outputs, BYTES=config.bytes,
        STAGES=config.stages, PRECISION=precision(out.dtype), WEIGHTED_BIAS=slots is not None,
        DTYPE=TRITON_DTYPE[out.dtype], AFTER=after, **constants, num_warps=config.warps,
    )  # fmt: skip
