"""What every launcher needs: powers of two, strides, the layout of a factor, a TMA descriptor, the tensor's device."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_nvfp4.ops import observe

from . import configs

TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
COLUMN_PAD = 128
"""Rows of `split_columns` layout are padded to a multiple of this, so that a tile never straddles the two halves."""


# Triton's own cdiv and next_power_of_2 serve kernels too, and cost a launcher 3 µs a call.
def cdiv(n: int, divisor: int) -> int:
    return -(-n // divisor)


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


def padded_rank(r: int) -> int:
    """R as a tile's side: `tl.dot` wants a power of two of at least 16."""
    return power_of_two(r, 16) if r else 0


def padded_width(columns: int) -> int:
    return cdiv(columns, COLUMN_PAD) * COLUMN_PAD


def product_dtype(dtype: torch.dtype, block: int) -> torch.dtype:
    """In what rows of `dtype` meet a packed weight: fp32 where fp16 would have to hold MXFP4 (see `lifted_scale`)."""
    return torch.float32 if dtype == torch.float16 and block == 32 else dtype


def precision(dtype: torch.dtype, block: int = 16) -> str | None:
    """fp32 products must be fp32, not tf32; half precision has one way only.

    fp16 and MXFP4, widened to fp32, have 11 and 2 significant bits: tf32, which has 11, multiplies them exactly.
    """
    if product_dtype(dtype, block) != dtype:
        return "tf32"
    return "ieee" if dtype == torch.float32 else None


def check_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in TRITON_DTYPE:
        raise NotImplementedError(f"nvfp4::{op} has no CUDA kernel for {dtype}; use float32, bfloat16 or float16")


def with_unit_stride(x: Tensor) -> Tensor:
    """x with neighbouring columns next to each other; its rows may lie anywhere."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def row_tiles(m: int, e: int, rows: int) -> int:
    """Enough tiles for M rows of E experts, however they are spread (see `locate_tile`)."""
    return m // rows + e if m else 0


def as_bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8).contiguous()


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Run a kernel on the tensor's own device and that device's current stream; an empty grid is no launch.

    Tensors on "meta" make a dry run: the observer learns of the launch, and nothing runs.
    """
    if not all(grid):
        return
    if observe.current is not None:
        observe.current.launch(kernel, args, options)
    if device.type == "meta":
        return
    if device.index == torch.cuda.current_device():
        _run(kernel, grid, device.index, args, options)
    else:
        with torch.cuda.device(device):
            _run(kernel, grid, device.index, args, options)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _run(kernel: Any, grid: tuple[int, ...], device: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch what was compiled for such arguments; Triton's own look-up costs the host several times as much."""
    key = (id(kernel), device, *map(_kind, args), *options.values())
    known = _compiled.get(key)
    if known is not None:
        compiled, constants = known
        compiled[(*grid, 1, 1)](*args, *constants)
        return
    if "PDL" in kernel.arg_names:
        dependent = configs.family(device) >= 9
        options = options | ({"PDL": True, "launch_pdl": True} if dependent else {"PDL": False})
    compiled = kernel[grid](*args, **options)
    if isinstance(kernel, JITFunction):
        _compiled[key] = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])


def _kind(arg: Any) -> Any:
    """All that Triton compiles a kernel differently for, and no less."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() & 15 == 0
    if type(arg) is int:
        return arg == 1, arg & 15 == 0, arg >> 31
    if isinstance(arg, (TensorDescriptor, GluonDescriptor)):
        return tuple(arg.block_shape), arg.base.dtype
    return type(arg)


def tma_descriptor(x: Tensor, block: list[int], available: bool) -> TensorDescriptor | None:
    """A descriptor of a contiguous matrix, or None where the copy engine cannot read it."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    inner = block[-1] * x.element_size()
    if not available or x.numel() == 0 or not aligned or inner < 16 or max(block) > 256:
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
