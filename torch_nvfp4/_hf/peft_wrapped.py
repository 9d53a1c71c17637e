"""PEFT's saving where layers are wrapped by what recomputes or compiles them.

PEFT 0.21 picks an adapter's tensors by the names of the model's modules. A `CheckpointWrapper` (Accelerate's
`activation_checkpointing` under FSDP) adds to these what it takes out of a state dict's keys, and the adapter that is
saved has no tensors, without a word.
"""

import functools
from typing import Any

from peft.tuners import tuners_utils
from torch import nn

_ADDED = ("_checkpoint_wrapped_module.", "_orig_mod.")


def install() -> None:
    """Make PEFT know an adapter's tensors by the keys of state dicts, too."""
    utils: Any = tuners_utils
    find = getattr(utils, "_get_tuner_state_dict_key_prefixes", None)
    if find is None:  # before 0.21 keys are matched as text
        return

    @functools.wraps(find)
    def prefixes(model: nn.Module, *args: Any, **kwargs: Any) -> set[str]:
        found: set[str] = find(model, *args, **kwargs)
        return found | {_plain(prefix) for prefix in found}

    utils._get_tuner_state_dict_key_prefixes = prefixes


def _plain(name: str) -> str:
    for part in _ADDED:
        name = name.replace(part, "")
    return name
