"""Packing a model's experts and writing them back, one layer at a time."""

import copy
import importlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._lora.sites import StockLayout, adapted_sites
from ..nn import PROJECTIONS, NVFP4Experts
from ..qat import refuse_prepared
from .capture import install_capturing
from .recognise import ExpertsPlan, plan_all


@dataclass(frozen=True)
class PackedLayout(StockLayout):
    """The stock layout, and the stock module with meta tensors in place of its weights."""

    shell: nn.Module | None = None
    on_input: bool = False


def put_packed(model: nn.Module, plan: ExpertsPlan, packed: NVFP4Experts, stock: nn.Module) -> None:
    """Put packed experts in the place of the stock ones, and have the block around them call them as it must."""
    packed.__dict__["stock_layout"] = PackedLayout(**vars(plan.layout), shell=stock, on_input=plan.on_input)
    model.set_submodule(plan.path, packed)
    if plan.on_input:
        llama4 = importlib.import_module(f"{__package__}.llama4")  # takes a second to import; few need it
        llama4.switch(model.get_submodule(plan.path.rpartition(".")[0]))


def _put_stock(model: nn.Module, path: str, packed: NVFP4Experts) -> None:
    layout: PackedLayout = packed.__dict__["stock_layout"]
    model.set_submodule(path, _unpack(packed, layout))
    if layout.on_input:
        llama4 = importlib.import_module(f"{__package__}.llama4")
        llama4.switch_back(model.get_submodule(path.rpartition(".")[0]))


def quantize_experts(model: nn.Module, format: str = "nvfp4") -> nn.Module:
    """Replace the model's dense experts by `NVFP4Experts`, in place, and return the model.

    Works on the experts modules of transformers 5 that carry its experts flags (Qwen2/3-MoE, Mixtral, OLMoE,
    DeepSeek-V3, gpt-oss, ...) and have an activation that `NVFP4Experts` computes. One layer at a time: a
    layer's dense weights are freed before the next is packed, so that memory stays within about a layer of
    the dense model's.

    format: "nvfp4" or "mxfp4".
    Raises ValueError, before anything is changed, for a model without dense experts and for an experts
    module that it cannot pack; the text names class, module path and reason.
    """
    refuse_prepared(model)
    for plan in plan_all(model, format):
        pack(model, plan, format)
    install_capturing(model)
    return model


def pack(model: nn.Module, plan: ExpertsPlan, format: str) -> None:
    """Put `NVFP4Experts` in the place of the dense experts of a plan, whose weights are freed."""
    experts, layout = model.get_submodule(plan.path), plan.layout
    dense = {name: parameter.detach() for name, parameter in experts.named_parameters()}
    gate_up, down = dense[layout.gate_up_name], dense[layout.down_name]
    if layout.transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    gate_up_bias, down_bias = (dense.get(f"{name}_bias") for name in (layout.gate_up_name, layout.down_name))
    packed = NVFP4Experts.from_dense(
        rows_to_canonical(gate_up, layout),
        down,
        gate_up_bias=None if gate_up_bias is None else rows_to_canonical(gate_up_bias, layout),
        down_bias=down_bias,
        activation=plan.activation,
        limit=plan.limit,
        format=format,
    ).train(experts.training)
    for name, parameter in experts.named_parameters():
        hollow = torch.empty_like(parameter, device="meta")
        experts.register_parameter(name, nn.Parameter(hollow, requires_grad=parameter.requires_grad))
    put_packed(model, plan, packed, experts)


def dequantize_experts(model: nn.Module) -> nn.Module:
    """Put the stock dense experts back, in place, with the dequantised weights in their old dtype.

    Adapters are not merged: ValueError while experts carry any (save them, then call `remove_adapters`).
    ValueError too where there are no experts that `quantize_experts` packed.
    """
    packed = [(path, module) for path, module in model.named_modules() if isinstance(module, NVFP4Experts)]
    if not packed:
        raise ValueError(f"{type(model).__name__} has no packed experts")
    for path, module in packed:
        if not isinstance(module.__dict__.get("stock_layout"), PackedLayout):
            raise ValueError(f"{path}: was not packed by quantize_experts, its dense form is not known")
    for site in adapted_sites(model):
        if site.is_experts:
            raise ValueError(f"{site.name} has an adapter, which would be lost: save_adapter, then remove_adapters")
    for path, module in packed:
        _put_stock(model, path, module)
    if isinstance(model, PreTrainedModel) and model.config._experts_implementation == "nvfp4":
        model.set_experts_implementation("grouped_mm")  # transformers' default: "nvfp4" refuses dense experts
    return model


def _unpack(packed: NVFP4Experts, layout: PackedLayout) -> nn.Module:
    assert layout.shell is not None
    experts = copy.copy(layout.shell)  # not a deep copy: the config must stay the model's own
    experts._parameters = dict(experts._parameters)
    stock_names = {"gate_up": layout.gate_up_name, "down": layout.down_name}
    for projection in PROJECTIONS:
        name = stock_names[projection]
        weight = packed.dequantize(projection, dtype=experts.get_parameter(name).dtype)
        values = {name: weight, f"{name}_bias": getattr(packed, f"{projection}_bias")}
        for key, value in values.items():
            if value is None:
                continue
            hollow = experts.get_parameter(key)
            dense = value.detach().to(hollow.dtype, copy=True)
            dense = rows_to_stock(dense, layout) if projection == "gate_up" else dense
            dense = dense.mT.contiguous() if layout.transposed and key == name else dense
            experts.register_parameter(key, nn.Parameter(dense, requires_grad=hollow.requires_grad))
    return experts.train(packed.training)


def rows_to_canonical(tensor: Tensor, layout: StockLayout) -> Tensor:
    """`[E, N, ...]`: rows gate 0, up 0, gate 1, ... -> `[gate; up]`, where the stock layout interleaves."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if layout.interleaved else tensor


def rows_to_stock(tensor: Tensor, layout: StockLayout) -> Tensor:
    """The inverse of `rows_to_canonical`."""
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if layout.interleaved else tensor
