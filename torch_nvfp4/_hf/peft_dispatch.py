"""Where PEFT meets packed modules: it finds their stock parameters by name, and wraps them with our layers.

PEFT has a registry for foreign modules, but one on each config object, which a plain `LoraConfig(...)` and one read
from a file lack. So two methods of its `LoraModel` are wrapped once, and two that merge, so that a refusal changes
nothing; a model without packed modules passes through.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .._lora.sites import Site, adapted_sites, stock_layout_of
from ..nn import PROJECTIONS, NVFP4Experts, NVFP4Linear
from .peft_layers import refuse_merge, wrap, wrap_plain
from .peft_targets import check_targets

# Whether the model that PEFT is adapting has packed modules; its hook for one layer does not see the model.
_beside_packed: ContextVar[bool] = ContextVar("beside_packed", default=False)


def install() -> None:
    """Make `get_peft_model` and `PeftModel.from_pretrained` adapt packed modules."""
    inject, create = LoraModel.inject_adapter, LoraModel._create_new_module
    merge, unload = LoraModel.merge_adapter, LoraModel._unload_and_optionally_merge

    @functools.wraps(inject)
    def inject_adapter(self: LoraModel, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        _check_adapters(model, adapter_name)
        _check_config(config, model)
        with _stock_parameters(model) as any_packed:
            if any_packed:
                check_targets(config, model)
            token = _beside_packed.set(any_packed)
            try:
                inject(self, model, adapter_name, *args, **kwargs)
            finally:
                _beside_packed.reset(token)

    @functools.wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, NVFP4Experts | NVFP4Linear):
            return wrap(target, adapter_name, config=lora_config, **kwargs)
        plain = wrap_plain(target, adapter_name, config=lora_config, **kwargs) if _beside_packed.get() else None
        return plain or create(lora_config, adapter_name, target, **kwargs)

    @functools.wraps(merge)
    def merge_adapter(self: LoraModel, *args: Any, **kwargs: Any) -> None:
        refuse_merge(self)
        merge(self, *args, **kwargs)

    @functools.wraps(unload)
    def unload_and_optionally_merge(self: LoraModel, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            refuse_merge(self)
        return unload(self, merge, *args, **kwargs)

    patched: Any = LoraModel
    patched.merge_adapter, patched._unload_and_optionally_merge = merge_adapter, unload_and_optionally_merge
    patched.inject_adapter, patched._create_new_module = inject_adapter, staticmethod(create_new_module)


def _check_adapters(model: nn.Module, adapter_name: str) -> None:
    """Adapters on the model beside which PEFT would put its own wrongly, or say that it has a bug."""
    for site in adapted_sites(model):
        raise ValueError(
            f"{site.name} has an adapter of add_lora: save_adapter, then remove_adapters, or use that alone"
        )
    if not _packed_types(model):
        return
    for module in model.modules():
        if isinstance(module, LoraLayer) and adapter_name in module.lora_A:
            raise ValueError(
                f"the model has an adapter {adapter_name!r} of PEFT's already: take it off with unload() first; a "
                "further one is added by add_adapter, under another name"
            )


def _packed_types(model: nn.Module) -> set[type[nn.Module]]:
    return {type(module) for module in model.modules() if isinstance(module, NVFP4Experts | NVFP4Linear)}


def _check_config(config: Any, model: nn.Module) -> None:
    """What would pass over packed modules in silence, or touch them otherwise than by an adapter."""
    packed = _packed_types(model)
    if packed and config.bias != "none":
        raise ValueError(f"bias={config.bias!r} is not supported on packed weights: their biases are frozen")
    if NVFP4Linear in packed and config.target_modules == "all-linear":
        raise ValueError("target_modules='all-linear' does not see packed linear layers: name the layers")


@contextmanager
def _stock_parameters(model: nn.Module) -> Iterator[bool]:
    """Inside the block packed modules show parameters by their stock names and in their dense shapes, without data.

    Gives whether there are any.
    """
    shown: list[tuple[nn.Module, str]] = []
    try:
        for module in model.modules():
            for name, shape, codes in _stock_shapes(module):
                empty = torch.zeros((), dtype=torch.float32, device=codes.device).expand(shape)
                module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
                shown.append((module, name))
        yield bool(shown)
    finally:
        for module, name in shown:
            delattr(module, name)


def _stock_shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    if isinstance(module, NVFP4Linear):
        yield "weight", (module.out_features, module.in_features), module.weight_codes
    elif isinstance(module, NVFP4Experts):
        layout = stock_layout_of(module)
        for projection, name in zip(PROJECTIONS, (layout.gate_up_name, layout.down_name), strict=True):
            shape = (module.num_experts, *Site("", module, projection).out_in)
            yield name, shape, getattr(module, f"{projection}_codes")
