"""Eager CUDA launchers of `quantize`, `fake_quantize`, `dequantize`: the bytes of `torch_nvfp4.format`, no host sync.

The kernels see a list of blocks: a row is a whole number of them, and a global scale applies to a run of them.
"""

import math

import torch
from torch import Tensor

from torch_nvfp4 import format as formats
from torch_nvfp4.format import MXFP4, Format

from .kernels import dequantize as dequantize_kernels
from .kernels import quantize as quantize_kernels
from .launch import as_bytes, cdiv, launch

ELEMENTS = 4096
"""Of one program."""
AMAX_PROGRAMS = 1024
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def quantize(x: Tensor, global_scale: Tensor | None = None, *, format: str = "nvfp4") -> tuple[Tensor, Tensor, Tensor]:
    """See `format.quantize` with `check_finite=False`. One launch, three where the global scale is computed."""
    fmt, x, used = _inputs(x, global_scale, format)
    *lead, c = x.shape
    codes = x.new_empty([*lead, c // 2], dtype=torch.uint8)
    scales = x.new_empty([*lead, c // fmt.block_size], dtype=torch.uint8)
    _launch_quantize(x, used, fmt, codes, scales, None)
    return codes, scales.view(fmt.scale_dtype), used


def fake_quantize(x: Tensor, global_scale: Tensor | None = None, *, format: str = "nvfp4") -> Tensor:
    """See `format.fake_quantize`; launches as for `quantize`, and no codes are written."""
    fmt, x, used = _inputs(x, global_scale, format)
    out = x.new_empty(x.shape)
    _launch_quantize(x, used, fmt, None, None, out)
    return out


def dequantize(
    codes: Tensor, scales: Tensor, global_scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:  # fmt: skip
    """See `format.dequantize`; one launch."""
    fmt = formats.check_packed(codes, scales)
    if dtype not in _FLOATS:
        return formats.dequantize(codes, scales, global_scale, dtype)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    out = codes.new_empty(shape, dtype=dtype)
    used = global_scale.to(torch.float32).contiguous()
    blocks, blocks_per_scale = _runs(used, shape, fmt)
    launch(
        dequantize_kernels.dequantize, (cdiv(blocks * fmt.block_size, ELEMENTS),), out.device,
        codes.contiguous(), as_bytes(scales), used, out, blocks, blocks_per_scale, **_constants(fmt),
    )  # fmt: skip
    return out


def _constants(fmt: Format) -> dict[str, int | bool]:
    size = fmt.block_size
    return dict(B=size, BLOCKS=ELEMENTS // size, MX=fmt is MXFP4, num_warps=4, enable_fp_fusion=False)


def _runs(global_scale: Tensor, shape: tuple[int, ...], fmt: Format) -> tuple[int, int]:
    """(number of blocks, how many in a row share a global scale)."""
    blocks = math.prod(shape) // fmt.block_size
    per_expert = formats.scales_per_expert(global_scale, shape)
    return blocks, max(1, blocks // (shape[0] * per_expert) if per_expert and blocks else blocks)


def _inputs(x: Tensor, global_scale: Tensor | None, format: str) -> tuple[Format, Tensor, Tensor]:
    """The format, x in one piece, and the global scale: given, computed or (MXFP4) one."""
    fmt = formats.check_dense(x, global_scale, format)
    x = x.contiguous()
    if fmt is MXFP4:
        return fmt, x, x.new_ones(1, dtype=torch.float32)
    if global_scale is None:
        return fmt, x, _computed_global_scale(x)
    return fmt, x, formats.given_global_scale(global_scale, x, check_finite=False)


def _computed_global_scale(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.new_ones(1, dtype=torch.float32)
    programs = min(AMAX_PROGRAMS, cdiv(x.numel(), ELEMENTS))
    partial = x.new_empty(programs, dtype=torch.int32)
    scale = x.new_empty(1, dtype=torch.float32)
    launch(
        quantize_kernels.partial_amax, (programs,), x.device, x, partial, x.numel(), SIZE=ELEMENTS, num_warps=4
    )  # fmt: skip
    launch(
        quantize_kernels.computed_scale, (1,), x.device, partial, programs, scale,
        SIZE=AMAX_PROGRAMS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return scale


def _launch_quantize(
    x: Tensor, global_scale: Tensor, fmt: Format, codes: Tensor | None, scales: Tensor | None, out: Tensor | None
) -> None:
    blocks, blocks_per_scale = _runs(global_scale, x.shape, fmt)
    launch(
        quantize_kernels.quantize, (cdiv(x.numel(), ELEMENTS),), x.device,
        x, global_scale, codes, scales, out, blocks, blocks_per_scale, **_constants(fmt),
    )  # fmt: skip


CUDA_KERNELS = {"quantize": quantize, "fake_quantize": fake_quantize, "dequantize": dequantize}
