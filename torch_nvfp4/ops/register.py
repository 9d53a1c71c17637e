"""Wires every op of `schemas.py` to its kernels: one table, one loop, every kernel behind the same checker."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .. import format as formats
from . import autocast, autograd, cpu, cuda, direct, fake, layer, merge, observe, routing, validation
from .schemas import LIBRARY, NAMESPACE, SCHEMAS

_GROUPED = (
    "grouped_lora_linear",
    "grouped_lora_dgrad",
    "grouped_lora_wgrad",
    "glu_grouped_lora_linear",
    "glu_backward",
)
_UNSUPPORTED = ("MPS", "XPU")


def _checked(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    overload = getattr(getattr(torch.ops, NAMESPACE), op).default
    names = [argument.name for argument in overload._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        validation.check(op, dict(zip(names, args, strict=False)) | kwargs)
        return kernel(*args, **kwargs)

    return run


def _fake(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    checked = _checked(op, kernel)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Only a graph that is being compiled needs the lowerings, and they need Inductor, which is slow to import.
        if torch._guards.TracingContext.try_get() is not None:
            importlib.import_module("torch_nvfp4.lowering").ensure_registered()
        return checked(*args, **kwargs)

    return run


def _quantizer(run: Callable[..., Any], check_finite: bool) -> Callable[..., Any]:
    """`format.quantize` or `format.fake_quantize` as a kernel; looking for non-finite values would stall a GPU."""

    def kernel(x: torch.Tensor, global_scale: torch.Tensor | None = None, *, format: str = "nvfp4") -> Any:
        return run(x, global_scale, format, check_finite=check_finite)

    return kernel


def _dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    return formats.dequantize(codes, scales, global_scale, dtype)


def _implement(op: str, kernel: Callable[..., Any], *keys: str) -> None:
    run = _checked(op, kernel)
    for key in keys:
        LIBRARY.impl(op, run if op == "moe_lora" else observe.watched(op, run), key)  # a macro's ops are watched


def register() -> None:
    """Register all kernels; called once, when `torch_nvfp4.ops` is imported."""
    for op in SCHEMAS:
        if op != "moe_lora":  # a macro has no fake kernel: it is traced through
            torch.library.register_fake(f"{NAMESPACE}::{op}", _fake(op, getattr(fake, op)), lib=LIBRARY)

    for op, run in (("quantize", formats.quantize), ("fake_quantize", formats.fake_quantize)):
        _implement(op, _quantizer(run, check_finite=True), "CPU")
        _implement(op, cuda.launcher(op, _quantizer(run, check_finite=False)), "CUDA")
    _implement("dequantize", _dequantize, "CPU")
    _implement("dequantize", cuda.launcher("dequantize", _dequantize), "CUDA")
    _implement("merge_lora", merge.merge_lora, "CPU")
    _implement("merge_lora", cuda.launcher("merge_lora", merge.merge_lora), "CUDA")
    kernels = {op: (getattr(cpu, op), cuda.launcher(op)) for op in _GROUPED}
    kernels["moe_route"] = (routing.moe_route, cuda.launcher("moe_route", routing.moe_route))
    for op, on_devices in kernels.items():
        for key, kernel in zip(("CPU", "CUDA"), on_devices, strict=True):
            _implement(op, kernel, key)
            direct.add(op, key.lower(), kernel)
    _implement("moe_lora", layer.moe_lora, "CompositeImplicitAutograd")
    for op in SCHEMAS:
        if op != "moe_lora":
            for device in _UNSUPPORTED:
                LIBRARY.impl(op, cuda.refusal(op, device), device)

    for op in ("grouped_lora_linear", "glu_grouped_lora_linear", "fake_quantize"):
        LIBRARY.impl(op, getattr(autograd, op), "Autograd")
    for op in ("dequantize", "grouped_lora_dgrad", "grouped_lora_wgrad", "glu_backward"):
        LIBRARY.impl(op, autograd.without_derivative(op), "Autograd")
    for op in ("quantize", "merge_lora", "moe_route"):
        LIBRARY.impl(op, autograd.detached(op), "Autograd")
    for op in SCHEMAS:
        LIBRARY.impl(op, autocast.kernel(op, "cpu"), "AutocastCPU")
        LIBRARY.impl(op, autocast.kernel(op, "cuda"), "AutocastCUDA")
