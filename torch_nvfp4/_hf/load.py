"""Filling a model from a packed checkpoint: which of its modules are packed, and their weights, a layer at a time.

Plain tensors are transformers' to load. It meets the packed modules as ordinary ones that its files do not fill.
"""

import copy
import importlib
import logging
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
from .convert import put_packed
from .recognise import find_experts, plan_experts

_READ_DIRECTLY = re.compile(r"(.*\.)?indexer\.weights_proj")
"""Layers whose model asks for `.weight.dtype`, which a packed layer has not: the heads' weights of sparse attention."""
_logger = logging.getLogger(__name__)
_PACKED_NAMES = r"(codes|scales|global_scale)$"
_COMPANIONS = r"weight|weight_\w+|input_\w+|scale"  # of a quantised layer's weight, whoever wrote it


@dataclass(frozen=True)
class Placement:
    """Names in the model -> names in the checkpoint, for modules and (FP8) for parameters.

    `decoded`: modules that cannot be packed, but are in the checkpoint. They are packed only while transformers loads.
    """

    experts: dict[str, str] = field(default_factory=dict)
    linears: dict[str, str] = field(default_factory=dict)
    decoded: dict[str, str] = field(default_factory=dict)
    fp8: dict[str, str] = field(default_factory=dict)


def place(model: PreTrainedModel, checkpoint: Checkpoint) -> Placement:
    """Put packed modules, without weights, where the checkpoint is packed; ValueError for what cannot hold them.

    A layer that the model does not have (a head, a further prediction layer, a vision tower) is left to transformers'
    report. One that the model has, but not by this name, is refused: its weights would be random numbers.
    """
    names, placement = Names(model), Placement()
    for path in checkpoint.experts:
        if (found := names.module(path)) is not None:
            _put_experts(model, found, checkpoint.experts[path])
            placement.experts[found] = path
        else:
            names.refuse_misplaced(path)
    for path in checkpoint.linears:
        if (found := names.module(path)) is None:
            names.refuse_misplaced(path)
        else:
            stock = model.get_submodule(found)
            model.set_submodule(found, _empty_linear(found, stock, checkpoint.linears[path]))
            (placement.decoded if _needs_weight(found, stock) else placement.linears)[found] = path
    for name in checkpoint.fp8:
        if (found := names.parameter(name)) is not None:
            placement.fp8[found] = name
        elif names.is_of_experts(name):
            raise ValueError(f"{name}: FP8 experts are not supported, {type(model).__name__} stacks them")
        else:
            names.refuse_misplaced(name.removesuffix(".weight"))
    _expect(model, placement)
    return placement


class Names:
    """The checkpoint's names as transformers renames them for this model."""

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model)
        self._renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
        self._class = type(model).__name__
        self._ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self._prefix = f"{model.base_model_prefix}."
        self._modules = {name for name, _ in model.named_modules()}
        self._parameters = {name for name, _ in model.named_parameters()}
        self._experts = [f"{path}." for path, _ in find_experts(model)]
        self._tops = {name for name in self._modules if not re.search(r"\.\d+(\.|$)", name)}  # outside all layers

    def module(self, path: str) -> str | None:
        return next((n for n in self._candidates(path) if n in self._modules), None)

    def parameter(self, name: str) -> str | None:
        stem, _, leaf = name.rpartition(".")
        return next((n for c in self._candidates(stem) if (n := f"{c}.{leaf}") in self._parameters), None)

    def refuse_misplaced(self, path: str) -> None:
        """ValueError for a quantised layer whose surroundings the model has, unless it says that it ignores it."""
        if any(pattern.search(f"{path}.weight") for pattern in self._ignored):
            return
        for candidate in self._candidates(path):
            if (parent := candidate.rpartition(".")[0]) in self._modules and parent not in ("", *self._tops):
                raise ValueError(
                    f"{path}: the checkpoint quantises it, {self._class} has {parent}, but nothing called "
                    f"{candidate.rpartition('.')[2]!r} there"
                )

    def is_of_experts(self, name: str) -> bool:
        return any(c.startswith(path) for c in self._candidates(name.rpartition(".")[0]) for path in self._experts)

    def _candidates(self, path: str) -> tuple[str, ...]:
        """The new name; it may begin with the base model's where this model's do not, or the other way round."""
        renamed = rename_source_key(f"{path}.weight", self._renamings, [])[0].removesuffix(".weight")
        return renamed, f"{self._prefix}{renamed}", renamed.removeprefix(self._prefix)


def _put_experts(model: nn.Module, path: str, entry: ExpertsEntry) -> None:
    experts = model.get_submodule(path)
    plan = plan_experts(model, path, experts, entry.format, loaded=False)
    down = experts.get_parameter(plan.layout.down_name)
    e, hidden, intermediate = (down.mT if plan.layout.transposed else down).shape
    model_says = (e, hidden, intermediate, plan.has_gate, plan.has_bias)
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
        bias=plan.has_bias,
        format=entry.format,
        device="meta",
    )
    _adopt(packed, experts)
    put_packed(model, plan, packed, experts)


def _needs_weight(path: str, stock: nn.Module) -> bool:
    return type(stock).forward is nn.Embedding.forward or _READ_DIRECTLY.fullmatch(path) is not None


def _empty_linear(path: str, stock: nn.Module, entry: LinearEntry) -> NVFP4Linear:
    if type(stock).forward not in (nn.Linear.forward, nn.Embedding.forward):
        raise ValueError(f"{path}: the checkpoint packs this weight, but {type(stock).__name__} is no plain nn.Linear")
    weight = stock.get_parameter("weight")
    if weight.shape != (entry.out_features, entry.in_features):
        raise ValueError(
            f"{path}: the model's weight is {list(weight.shape)}, "
            f"the checkpoint's {[entry.out_features, entry.in_features]}"
        )
    bias = getattr(stock, "bias", None) is not None
    packed = NVFP4Linear(entry.in_features, entry.out_features, bias=bias, format=entry.format, device="meta")
    packed.__dict__["stock_module"] = stock
    _adopt(packed, stock)
    return packed


def _adopt(packed: nn.Module, stock: nn.Module) -> None:
    packed.__dict__["_is_hf_initialized"] = True  # transformers must not initialise what its files do not fill
    packed.train(stock.training)


def _expect(model: PreTrainedModel, placement: Placement) -> None:
    """Packed parameters are not missing, nor are the tensors unexpected that fill them.

    One pattern stands for all layers, so that there are few.
    """
    missing = {f"{_pattern(path)}\\.\\w+_({_PACKED_NAMES}|bias$)" for path in placement.experts}
    packed = (*placement.linears, *placement.decoded)
    missing |= {f"{_pattern(path)}\\.weight_{_PACKED_NAMES}" for path in packed}
    unexpected = {rf"{_pattern(path)}(\.|$)" for path in placement.experts}
    quantised = [*packed, *(name.rpartition(".")[0] for name in placement.fp8)]
    unexpected |= {rf"{_pattern(path)}\.({_COMPANIONS})$" for path in quantised}
    unexpected.add(r"\.[kv]_scale$")  # of a quantised cache, which is the server's
    model._keys_to_ignore_on_load_missing = set(model._keys_to_ignore_on_load_missing or ()) | missing
    model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | unexpected


def _pattern(path: str) -> str:
    return re.sub(r"\b\d+\b", lambda _: r"\d+", re.escape(path))


def fill(model: PreTrainedModel, checkpoint: Checkpoint, placement: Placement) -> None:
    """Read each packed weight into its module, wherever that is; at most one layer is held twice."""
    with torch.no_grad():
        for path, source in placement.experts.items():
            _fill_experts(path, model.get_submodule(path), checkpoint.load_experts(source))
        for path, source in (placement.linears | placement.decoded).items():
            module = model.get_submodule(path)
            _fill_weight(path, module, "weight", checkpoint.load_linear(source))
            module.requires_grad_(False)
        for name, source in placement.fp8.items():
            _copy(name, model.get_parameter(name), checkpoint.load_plain(source))
    for path in placement.decoded:
        packed: Any = model.get_submodule(path)
        stock = stock_linear(packed, model.dtype)
        if hasattr(packed, "_hf_hook"):  # of a model spread over devices, which moves the inputs
            importlib.import_module("accelerate.hooks").add_hook_to_module(stock, packed._hf_hook)
        model.set_submodule(path, stock)
    if placement.fp8:
        _logger.warning("%d FP8 weights were decoded to %s", len(placement.fp8), model.dtype)
    if placement.decoded:
        where = ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in placement.decoded))
        _logger.warning("%d 4-bit weights were decoded to %s: %s", len(placement.decoded), model.dtype, where)


def stock_linear(packed: NVFP4Linear, dtype: torch.dtype) -> nn.Module:
    """The stock module that a packed linear layer stands for, with the dequantised weight."""
    stock: nn.Module = copy.copy(packed.__dict__["stock_module"])
    stock._parameters = dict(stock._parameters)
    stock.register_parameter("weight", nn.Parameter(packed.dequantize(dtype), requires_grad=False))
    if packed.bias is not None:
        stock.register_parameter("bias", packed.bias)
    return stock.train(packed.training)


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
