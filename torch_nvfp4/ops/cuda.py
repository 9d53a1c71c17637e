"""The door to the Triton kernels: imported at the first call on a GPU, and a refusal in words where they cannot run."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

OLDEST = (8, 0)
"""The oldest compute capability that the kernels are built for: bf16 products and asynchronous copies."""
_HOMES = {"quantize": "pack", "fake_quantize": "pack", "dequantize": "pack", "merge_lora": "merge"}
"""Modules of `torch_nvfp4.lowering` that hold the launcher of an op; all others are in `eager`."""


@cache
def cuda_kernel(op: str) -> Callable[..., Any]:
    """The Triton implementation of an op, or of `combine`; RuntimeError where triton is not installed."""
    try:
        home = importlib.import_module(f"torch_nvfp4.lowering.{_HOMES.get(op, 'eager')}")
    except ModuleNotFoundError as e:
        raise RuntimeError(f"the CUDA kernels need triton, which is not installed ({e}): pip install triton") from e
    kernels: dict[str, Callable[..., Any]] = home.CUDA_KERNELS
    return kernels[op]


@cache
def unsupported(device: int | None) -> str | None:
    """Why this CUDA device cannot run the kernels, in words; None where it can."""
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs and do not run on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name, oldest = torch.cuda.get_device_name(device), "sm_{}{}".format(*OLDEST)
        return f"the kernels need {oldest} (Ampere) or later, and {name} is sm_{capability[0]}{capability[1]}"
    return None


def launcher(op: str, otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The op's CUDA kernel for the dispatcher; where it cannot run, `otherwise` or a refusal in words."""

    def run(*args: Any, **kwargs: Any) -> Any:
        why = unsupported(args[0].device.index)
        if why is None:
            return cuda_kernel(op)(*args, **kwargs)
        if otherwise is not None:
            return otherwise(*args, **kwargs)
        raise NotImplementedError(f"nvfp4::{op}: {why}; it runs on the CPU")

    return run


def refusal(op: str, device: str) -> Callable[..., Any]:
    """A kernel for a kind of device that has none, instead of the dispatcher's page of text."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"nvfp4::{op}: there is no kernel for {device}; it runs on the CPU and on NVIDIA GPUs"
        )

    return refuse
