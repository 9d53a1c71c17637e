"""The door to the Triton kernels: imported at the first call on a GPU, and closed unless somebody opens it.

They are right on every small size that the GPU tests draw, and give NaN at some large ones on an H200 (see
docs/performance.md). Until that is mended a CUDA tensor is refused in words, and work on the kernels calls `enable`.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

_HOMES = {"quantize": "pack", "fake_quantize": "pack", "dequantize": "pack"}
"""Modules of `torch_nvfp4.lowering` that hold the launcher of an op; all others are in `eager`."""

_enabled = False


def enable() -> None:
    """Let the ops run the unreleased Triton kernels on CUDA tensors, in this process, from now on."""
    global _enabled
    _enabled = True


def enabled() -> bool:
    return _enabled


@cache
def cuda_kernel(op: str) -> Callable[..., Any]:
    """The Triton implementation of an op, or of `combine`; RuntimeError where triton is not installed."""
    try:
        home = importlib.import_module(f"torch_nvfp4.lowering.{_HOMES.get(op, 'eager')}")
    except ModuleNotFoundError as e:
        raise RuntimeError(f"the CUDA kernels need triton, which is not installed ({e}): pip install triton") from e
    kernels: dict[str, Callable[..., Any]] = home.CUDA_KERNELS
    return kernels[op]


def launcher(op: str, otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The op's CUDA kernel for the dispatcher; while they are not enabled, `otherwise` or a refusal in words."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _enabled:
            return cuda_kernel(op)(*args, **kwargs)
        if otherwise is not None:
            return otherwise(*args, **kwargs)
        raise NotImplementedError(f"nvfp4::{op} has no CUDA kernel in this version; it runs on the CPU")

    return run
