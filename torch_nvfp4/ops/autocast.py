"""Autocast: activations are cast to the autocast dtype, and nothing else.

Codes, scales, global scales, LoRA factors and router weights keep their dtypes: the ops take them as they are.
"""

from collections.abc import Callable
from typing import Any

import torch

AUTOCAST_OPS = (
    "moe_lora",
    "grouped_lora_linear",
    "glu_grouped_lora_linear",
)  # the activation is their first argument


def kernel(op: str, device_type: str) -> Callable[..., Any]:
    """The Autocast kernel of `op` on `device_type` ("cpu" or "cuda")."""
    overload = getattr(torch.ops.nvfp4, op).default
    key = torch._C.DispatchKey.AutocastCPU if device_type == "cpu" else torch._C.DispatchKey.AutocastCUDA
    below = torch._C.DispatchKeySet(key)

    def cast_activation(activation: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        # As for torch's own ops, float64 is left alone.
        if activation.dtype != torch.float64:
            activation = activation.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(below):
            return overload(activation, *args, **kwargs)

    return cast_activation
