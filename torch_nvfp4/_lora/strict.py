"""What an adapter file must be, whatever its layout: every key wanted and known, every tensor floating."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

from torch import Tensor


def is_rank(value: object) -> bool:
    """An integer of at least 1; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_finite_number(value: Any) -> bool:
    """Of any type that is a real number, except that True is none."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_pattern_of(of: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, dict) and all(_compiles(f"({key})") and of(found) for key, found in value.items())


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError):
        return False
    return True


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (is_rank, "an integer of at least 1"),
    "lora_alpha": (is_finite_number, "a finite number"),
    "rank_pattern": (lambda v: _is_pattern_of(is_rank, v), "a map of regular expressions to integers of at least 1"),
    "alpha_pattern": (
        lambda v: _is_pattern_of(is_finite_number, v),
        "a map of regular expressions to finite numbers",
    ),
    "target_modules": (
        lambda v: _compiles(v) if isinstance(v, str) else _are_names(v),
        "a list of names or one regular expression",
    ),
    "target_parameters": (_are_names, "a list of names"),
    "peft_version": (lambda v: isinstance(v, str), "a string"),
}
_NEEDED = ("r", "lora_alpha")


def check_fields(data: Mapping[str, Any]) -> None:
    """ValueError names a field of adapter_config.json that is not what it must be; None stands for one not given."""
    for name, (is_right, kind) in _FIELDS.items():
        value = data.get(name)
        if not (is_right(value) if value is not None else name not in _NEEDED):
            raise ValueError(f"adapter_config.json: {name} must be {kind}, got {value!r}")


def check_keys(state: Mapping[str, Tensor], expected: Collection[str]) -> None:
    """ValueError names keys that the file lacks, or has beyond those expected."""
    wanted = set(expected)
    for keys, text in ((wanted - state.keys(), "lacks"), (state.keys() - wanted, "has the unexpected")):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ValueError(f"adapter_model.safetensors {text} {', '.join(sorted(keys)[:3])}{more}")


def check_tensor(key: str, tensor: Tensor, shape: tuple[int, ...], sizes: str) -> None:
    """ValueError for another shape, which `sizes` explains, or a dtype that is not floating."""
    if tensor.shape != shape:
        raise ValueError(f"{key}: expected shape {list(shape)} for {sizes}, got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{key}: expected a floating dtype, got {tensor.dtype}")
