"""4-bit activations: rows in NVFP4, each on a scale of its own or all on one that calibration found."""

import torch
from torch import Tensor

from ..format import global_scales, quantize


def quantize_rows(x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[M, C/2]`, scales `[M, C/16]` and row scales fp32 `[M]` of x `[M, C]`, C a multiple of 16.

    A row's scale is amax / 2688, 1 where that is 0; its blocks are quantised under it as `format.quantize` does. A
    block with a value that is not finite gets a NaN scale, and its row is scaled by what is finite in it.

    input_scale: fp32, 0-d, the scale of every row in place of that. Values beyond 2688 times it saturate, and a block
    whose largest is 0 or underflows under it is zeros.
    """
    x = x.to(torch.float32)
    if input_scale is None:
        scale = global_scales(torch.where(x.isfinite(), x, 0.0).abs().amax(1))
    else:
        scale = input_scale.repeat(x.shape[0])
    codes, scales, _ = quantize(x.unsqueeze(1), scale.unsqueeze(1), check_finite=False)
    return codes.squeeze(1), scales.squeeze(1), scale
