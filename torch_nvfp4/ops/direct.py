"""The small ops as the macro calls them: the kernels themselves where nobody watches, the dispatcher everywhere else.

The macro has checked its arguments, so what it passes on needs no second check, and a kernel called straight away also
skips two turns through the dispatcher. Tracers, dispatch and function modes, functorch, tensor subclasses, autocast,
profilers and observers must see every small op: with any of them about, it is called as anybody calls it.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from . import observe

KERNELS: dict[str, SimpleNamespace] = {"cpu": SimpleNamespace(), "cuda": SimpleNamespace()}
"""Device type -> the kernel of each small op, unchecked; `register.py` fills it."""

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def add(op: str, device_type: str, kernel: Callable[..., Any]) -> None:
    setattr(KERNELS[device_type], op, kernel)


def small_ops(tensors: Iterable[Tensor | None]) -> Any:
    """A namespace with every small op, for calls whose arguments come from these (checked) tensors."""
    device_type = None
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES:
            return torch.ops.nvfp4
        device_type = device_type or tensor.device.type
    if device_type not in KERNELS or is_watched(device_type):
        return torch.ops.nvfp4
    return KERNELS[device_type]


def is_watched(device_type: str) -> bool:
    """Whether this thread has anything about that must see each op that is called on tensors of this device type."""
    return (
        observe.current is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or _profiler_enabled()
        or (torch._C._is_any_autocast_enabled() and not _is_autocast_off(device_type))
    )


def _is_autocast_off(device_type: str) -> bool:
    """Whether the Autocast kernel of the macro has run, below which nothing is cast."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST_KEYS[device_type])
