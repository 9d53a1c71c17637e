"""Targets that PEFT would pass over in silence, or take for others, in a model with packed modules.

PEFT reads the names of transformers 4 (`gate_proj`, `w1`, `gate`, ...) as those of routed experts and of the router,
wherever they stand in a target; what such a target also names is left without an adapter.
"""

import copy
import warnings
from typing import Any

from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from .._lora.peft import TAKEN_FOR_EXPERTS, has_suffix
from ..nn import NVFP4Linear


def check_targets(config: Any, model: nn.Module) -> None:
    """ValueError for a target that matches nothing or that PEFT takes for another; a warning where it drops a part.

    model: its packed modules must show their stock parameters.
    """
    modules = {_stock_name(name): module for name, module in model.named_modules()}
    parameters = {_stock_name(name) for name, _ in model.named_parameters()}
    for target in sorted(config.target_parameters or ()):
        if not any(has_suffix(name, target) for name in parameters):
            raise _no_match("target_parameters", target, model)
    if not isinstance(config.target_modules, list | set | tuple):
        return
    kept = _as_converted(config, model)
    for target in sorted(config.target_modules):
        parent, _, leaf = target.rpartition(".")
        if leaf in TAKEN_FOR_EXPERTS:
            matched = [name for name in modules if has_suffix(name, target)]
            linear = [name for name in matched if isinstance(modules[name], nn.Linear | NVFP4Linear)]
            is_of_experts = target not in kept and (not parent or has_suffix(parent, "experts"))
            if not matched and not is_of_experts:
                raise _no_match("target_modules", target, model)
            if linear and target not in kept:
                _tell_of_mistaken(target, linear, is_of_experts)


def _stock_name(name: str) -> str:
    """The name without what wrappers of an earlier adapter put into it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _as_converted(config: Any, model: nn.Module) -> set[str]:
    """The target modules that PEFT keeps as such; it refuses gate without up, in its own words."""
    converted = copy.copy(config)
    for name in ("rank_pattern", "alpha_pattern"):  # added to in place
        setattr(converted, name, dict(getattr(config, name) or {}))
    if isinstance(model, PreTrainedModel):
        convert_peft_config_for_transformers(converted, model, get_model_conversion_mapping(model))
    return set(converted.target_modules or ())


def _tell_of_mistaken(target: str, linear: list[str], is_of_experts: bool) -> None:
    instead = ".".join(linear[0].split(".")[-3:])
    if not is_of_experts:
        raise ValueError(
            f"target_modules: PEFT takes {target!r} for the routed experts' projection; name the layer in "
            f"target_parameters, as '{instead}.weight'"
        )
    warnings.warn(
        f"target_modules: PEFT takes {target!r} for the routed experts' projection alone. {len(linear)} layers of that "
        f"name get no adapter; to adapt them, name them in target_parameters, as '{instead}.weight'",
        stacklevel=2,
    )


def _no_match(field: str, target: str, model: nn.Module) -> ValueError:
    hint = ""
    if target.rpartition(".")[2] in TAKEN_FOR_EXPERTS:
        hint = ": experts are named in target_parameters, by 'experts.gate_up_proj' (gate and up are one) and "
        hint += "'experts.down_proj'"
    return ValueError(f"{field}: {target!r} matches nothing in {type(model).__name__}{hint}")
