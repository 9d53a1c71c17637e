"""Autocast: activations are cast to the autocast dtype, and nothing else.

Codes, scales, global scales, LoRA factors and router weights keep their dtypes: the ops take them as they are. Below
every op autocast is off, in a backward too, or it would cast the operands of the products inside a CPU kernel.
"""

from collections.abc import Callable
from typing import Any

import torch

# The activation is their first argument.
_CASTING = ("moe_lora", "grouped_lora_linear", "glu_grouped_lora_linear")


def kernel(op: str, device_type: str) -> Callable[..., Any]:
    """The Autocast kernel of `op` on `device_type` ("cpu" or "cuda")."""
    overload = getattr(torch.ops.nvfp4, op).default
    key = torch._C.DispatchKey.AutocastCPU if device_type == "cpu" else torch._C.DispatchKey.AutocastCUDA
    below = torch._C.DispatchKeySet(key)

    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # As for torch's own ops, float64 is left alone.
        if op in _CASTING and first.dtype != torch.float64:
            first = first.to(torch.get_autocast_dtype(device_type))
        with torch._C._ExcludeDispatchKeyGuard(below):
            return overload(first, *args, **kwargs)

    return run
