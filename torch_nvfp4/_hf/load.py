"""Filling a model from a packed checkpoint: which of its modules are packed, and their weights, a layer at a time.

Plain tensors are transformers' to load. It meets the packed modules as ordinary ones that its files do not fill.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ..checkpoint import Checkpoint, ExpertsEntry, LinearEntry
from ..nn import PROJECTIONS, NVFP4Experts, NVFP4Linear
from .convert import PackedLayout
from .recognise import find_experts, plan_experts

_PACKED_NAMES = r"(codes|scales|global_scale)$"
_COMPANIONS = r"weight|weight_\w+|input_\w+"  # of a quantised layer's weight, whoever wrote it


@dataclass(frozen=True)
class Placement:
    """Names in the model -> names in the checkpoint, for modules and (FP8) for parameters."""

    experts: dict[str, str] = field(default_factory=dict)
    linears: dict[str, str] = field(default_factory=dict)
    fp8: dict[str, str] = field(default_factory=dict)


def place(model: PreTrainedModel, checkpoint: Checkpoint) -> Placement:
    """Put packed modules, without weights, where the checkpoint is packed; ValueError for what cannot hold them.

    A layer that the model does not have (a head, a further prediction layer) is left to transformers' report.
    """
    names, placement = _Names(model), Placement()
    for path in checkpoint.experts:
        if (found := names.module(path)) is not None:
            model.set_submodule(found, _empty_experts(found, model.get_submodule(found), checkpoint.experts[path]))
            placement.experts[found] = path
    for path in checkpoint.linears:
        if (found := names.module(path)) is not None:
            model.set_submodule(found, _empty_linear(found, model.get_submodule(found), checkpoint.linears[path]))
            placement.linears[found] = path
    for name in checkpoint.fp8:
        if (found := names.parameter(name)) is not None:
            placement.fp8[found] = name
        elif names.is_of_experts(name):
            raise ValueError(f"{name}: FP8 experts are not supported, {type(model).__name__} stacks them")
    _expect(model, placement)
    return placement


class _Names:
    """The checkpoint's names as transformers renames them for this model."""

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model)
        self._renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
        self._prefix = f"{model.base_model_prefix}."
        self._modules = {name for name, _ in model.named_modules()}
        self._parameters = {name for name, _ in model.named_parameters()}
        self._experts = [f"{path}." for path, _ in find_experts(model)]

    def module(self, path: str) -> str | None:
        return next((n for n in self._candidates(path) if n in self._modules), None)

    def parameter(self, name: str) -> str | None:
        stem, _, leaf = name.rpartition(".")
        return next((n for c in self._candidates(stem) if (n := f"{c}.{leaf}") in self._parameters), None)

    def is_of_experts(self, name: str) -> bool:
        return any(c.startswith(path) for c in self._candidates(name.rpartition(".")[0]) for path in self._experts)

    def _candidates(self, path: str) -> tuple[str, ...]:
        """The new name; it may begin with the base model's where this model's do not, or the other way round."""
        renamed = rename_source_key(f"{path}.weight", self._renamings, [])[0].removesuffix(".weight")
        return renamed, f"{self._prefix}{renamed}", renamed.removeprefix(self._prefix)


def _empty_experts(path: str, experts: nn.Module, entry: ExpertsEntry) -> NVFP4Experts:
    plan = plan_experts(path, experts, entry.format, loaded=False)
    down = experts.get_parameter(plan.layout.down_name)
    e, hidden, intermediate = (down.mT if plan.layout.transposed else down).shape
    has_bias = any(name.endswith("_bias") for name, _ in experts.named_parameters())
    model_says = (e, hidden, intermediate, bool(experts.has_gate), has_bias)
    checkpoint_says = (entry.num_experts, entry.hidden, entry.intermediate, entry.gated, entry.has_bias)
    if model_says != checkpoint_says:
        raise ValueError(
            f"{path}: the model's experts have (E, H, I, gate, bias) = {model_says}, the checkpoint's {checkpoint_says}"
        )
    packed = NVFP4Experts(
        e,
        hidden,
        intermediate,
        activation=plan.activation,
        limit=plan.limit,
        bias=has_bias,
        format=entry.format,
        device="meta",
    )
    packed.__dict__["stock_layout"] = PackedLayout(**vars(plan.layout), shell=experts)
    _adopt(packed, experts)
    return packed


def _empty_linear(path: str, linear: nn.Module, entry: LinearEntry) -> NVFP4Linear:
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise ValueError(f"{path}: the checkpoint packs this weight, but {type(linear).__name__} is no plain nn.Linear")
    if (linear.in_features, linear.out_features) != (entry.in_features, entry.out_features):
        raise ValueError(
            f"{path}: the model's weight is {[linear.out_features, linear.in_features]}, "
            f"the checkpoint's {[entry.out_features, entry.in_features]}"
        )
    bias = linear.bias is not None
    packed = NVFP4Linear(linear.in_features, linear.out_features, bias=bias, format=entry.format, device="meta")
    _adopt(packed, linear)
    return packed


def _adopt(packed: nn.Module, stock: nn.Module) -> None:
    packed.__dict__["_is_hf_initialized"] = True  # transformers must not initialise what its files do not fill
    packed.train(stock.training)


def _expect(model: PreTrainedModel, placement: Placement) -> None:
    """Packed parameters are not missing, nor are the tensors unexpected that fill them.

    One pattern stands for all layers, so that there are few.
    """
    missing = {f"{_pattern(path)}\\.\\w+_({_PACKED_NAMES}|bias$)" for path in placement.experts}
    missing |= {f"{_pattern(path)}\\.weight_{_PACKED_NAMES}" for path in placement.linears}
    unexpected = {rf"{_pattern(path)}(\.|$)" for path in placement.experts}
    quantised = [*placement.linears, *(name.rpartition(".")[0] for name in placement.fp8)]
    unexpected |= {rf"{_pattern(path)}\.({_COMPANIONS})$" for path in quantised}
    unexpected.add(r"\.[kv]_scale$")  # of a quantised cache, which is the server's
    model._keys_to_ignore_on_load_missing = set(model._keys_to_ignore_on_load_missing or ()) | missing
    model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | unexpected


def _pattern(path: str) -> str:
    return re.sub(r"\b\d+\b", lambda _: r"\d+", re.escape(path))


def fill(model: nn.Module, checkpoint: Checkpoint, placement: Placement) -> None:
    """Read each packed weight into its module, wherever that is; at most one layer is held twice."""
    with torch.no_grad():
        for path, source in placement.experts.items():
            _fill_experts(path, model.get_submodule(path), checkpoint.load_experts(source))
        for path, source in placement.linears.items():
            module = model.get_submodule(path)
            _fill_weight(path, module, "weight", checkpoint.load_linear(source))
            module.requires_grad_(False)
        for name, source in placement.fp8.items():
            _copy(name, model.get_parameter(name), checkpoint.load_plain(source))


def _fill_experts(path: str, module: nn.Module, packed: Any) -> None:
    for projection in PROJECTIONS:
        _fill_weight(path, module, projection, getattr(packed, projection))
        if (bias := getattr(packed, f"{projection}_bias")) is not None:
            _copy(path, module.get_parameter(f"{projection}_bias"), bias)
    module.requires_grad_(False)


def _fill_weight(path: str, module: nn.Module, prefix: str, weight: Any) -> None:
    for part, value in weight._asdict().items():
        parameter = module.get_parameter(f"{prefix}_{part}")
        _copy(path, parameter, value.view(parameter.dtype))


def _copy(path: str, parameter: Tensor, value: Tensor) -> None:
    if parameter.is_meta:
        raise ValueError(f"{path} is offloaded by device_map: packed weights must lie on the device that runs them")
    parameter.copy_(value)
