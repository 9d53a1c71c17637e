"""Which of a layer's experts a state dict holds, and whether a module may load it. Imports no torch.distributed.

A share has the names of the whole, so the state dict's metadata say what it is: keys and tensors stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

Held = tuple[int, int, int]
"""(first, count, E): experts `[first, first + count)` of E."""
KEY = "experts"
"""Of a module's entry in the metadata of a state dict."""


def note(destination: Any, prefix: str, held: Held) -> None:
    """Say in a state dict which experts a module's tensors in it are."""
    metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
    if metadata is not None:
        metadata[KEY] = held


def not_these(module: nn.Module, mine: Held, state_dict: Mapping[str, Any], prefix: str, saved: Held | None) -> str:
    """Why tensors of a state dict are other experts than those that the module holds, or "".

    saved: what was noted, None if nothing. A tensor of another length is whole, as `whole_adapters` has LoRA factors.
    """
    if saved is None or tuple(saved) == mine:
        return ""
    for name, parameter in module.named_parameters(recurse=False):
        tensor = state_dict.get(prefix + name)
        if tensor is not None and tensor.dim():
            there, here = _of(len(tensor), saved), _of(len(parameter), mine)
            if there != here and (there[1] < there[2] or here[1] < here[2]):
                return (
                    f"{prefix}{name}: the state dict has {_words(there)}, and this module holds {_words(here)}: "
                    "the state dict of split experts (parallelize_experts) loads on the same rank of the same layout"
                )
    return ""


def _of(length: int, held: Held) -> Held:
    return (held[0], held[1], held[2]) if length == held[1] else (0, held[2], held[2])


def _words(held: Held) -> str:
    first, count, e = held
    return f"all {e} experts" if count == e else f"experts {first} to {first + count - 1} of {e}"
