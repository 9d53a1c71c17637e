"""The mark of an adapter that was trained merge-aware: which quantiser its forward looked through.

It stands in adapter_config.json under a key of this library's own, which PEFT passes over with a warning:

    "torch_nvfp4": {"merge_aware": true, "quantizer": "nvfp4-merge-1", "format": "nvfp4", "base": "0f3a..."}
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..format import FORMATS
from ..nn import NVFP4Experts, NVFP4Linear
from .fingerprint import fingerprint

KEY = "torch_nvfp4"
QUANTIZER = "nvfp4-merge-1"
"""What `ops.merge` computes. Another rounding, order of sums or choice of scales is another name."""
_MARK = "adapter_is_merge_aware"


@dataclass(frozen=True)
class Stamp:
    """quantizer: by its name. format: of the packed weights, "nvfp4" or "mxfp4". base: their fingerprint, if known."""

    format: str
    quantizer: str = QUANTIZER
    base: str | None = None

    def to_json(self) -> dict[str, Any]:
        base = {} if self.base is None else {"base": self.base}
        return {"merge_aware": True, "quantizer": self.quantizer, "format": self.format} | base

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Stamp | None":
        """From adapter_config.json; None for an adapter that is not merge-aware. ValueError for a broken one."""
        found = data.get(KEY)
        if found is None:
            return None
        if not isinstance(found, Mapping) or not isinstance(found.get("merge_aware"), bool):
            raise ValueError(f"adapter_config.json: {KEY} is {found!r}, it must say whether the adapter is merge_aware")
        if not found["merge_aware"]:
            return None
        quantizer, format = found.get("quantizer"), found.get("format")
        if not isinstance(quantizer, str) or not isinstance(format, str):
            raise ValueError(f"adapter_config.json: {KEY} is {found!r}, a merge-aware one names quantizer and format")
        base = found.get("base")
        if base is not None and not isinstance(base, str):
            raise ValueError(f"adapter_config.json: {KEY} is {found!r}, base must be a string")
        return cls(format, quantizer, base)

    def mismatch(self, format: str) -> str | None:
        """Why merging into weights of a format gives other numbers than those it was trained with, or None."""
        if self.quantizer != QUANTIZER:
            return f"it was trained through the quantiser {self.quantizer!r}, and this library merges by {QUANTIZER!r}"
        if self.format != format:
            trained = self.format if self.format in FORMATS else repr(self.format)
            return f"it was trained through {trained}, and the weights are {format}"
        return None


def packed_modules(modules: Iterable[nn.Module]) -> list[NVFP4Experts | NVFP4Linear]:
    return [module for module in modules if isinstance(module, NVFP4Experts | NVFP4Linear)]


def stamp_of(adapted: Iterable[nn.Module]) -> Stamp | None:
    """Of the adapters on these modules: one of them is merge-aware, or its adapter was loaded from a stamped file."""
    modules = packed_modules(adapted)
    found = [module for module in modules if module.merge_aware or module.__dict__.get(_MARK, False)]
    return Stamp(found[0].format, base=fingerprint(modules)) if found else None


def mark(adapted: Iterable[nn.Module], stamped: bool) -> None:
    """Remember at packed modules whether their adapter's file was stamped, so that saving stamps it again."""
    for module in packed_modules(adapted):
        module.__dict__[_MARK] = stamped


def heed(stamp: Stamp | None, adapted: Iterable[nn.Module], stacklevel: int) -> None:
    """ValueError where a stamped adapter is loaded on another base than its own.

    And a warning where its forward is not the one that it was trained with.
    """
    modules = packed_modules(adapted)
    if stamp is not None and stamp.base is not None and stamp.base != (fingerprint(modules) or stamp.base):
        raise ValueError(
            "this adapter was trained merge-aware on other 4-bit weights than this model's, whose rounding it fits; "
            f"load it on its own base (or, to load it anyway, take `base` out of {KEY} in its adapter_config.json)"
        )
    if stamp is not None and not all(module.merge_aware for module in modules):
        warnings.warn(
            "this adapter was trained merge-aware: it is right once merged into 4 bits; beside the base it is another "
            "model, which may be worse than the base alone. Merge it (torch-nvfp4 merge), or call "
            "torch_nvfp4.nn.set_numerics(model, merge_aware=True) before it is loaded",
            stacklevel=stacklevel + 1,
        )
