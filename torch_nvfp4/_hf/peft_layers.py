"""PEFT's LoRA layers on packed weights: its parameters, keys and adapter handling, this library's products.

Both classes carry the names of the PEFT classes they replace, because PEFT recognises its layers by name.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from peft.tuners.lora import LoraConfig, layer
from torch import Tensor, nn

from .._lora.peft import is_interleaved, split_experts, unsupported_option
from .._lora.sites import Site, stock_layout_of
from ..nn import LoRAFactors, MixedLoRA, NVFP4Experts, NVFP4Linear, ProjectionName


class _PackedBase(nn.Module, layer.LoraLayer):
    """What both layers share: options are checked, merging is refused, active adapters become one pair of factors."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        option = unsupported_option(vars(config) | {"lora_dropout": 0})
        if option:
            raise ValueError(f"{option} is not supported on packed weights ({kwargs.get('target_name', 'LoRA')})")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        raise _no_merge()

    def unmerge(self) -> None:
        """Nothing is ever merged."""

    def _active(self) -> list[str]:
        return [] if self.disable_adapters else list(self.active_adapters)

    def _pairs(self, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor, float]]:
        """PEFT's A and B of each of these adapters that this layer has, and its scaling."""
        for name in names:
            if name in self.lora_A:
                yield (
                    self.lora_A[name].get_parameter("weight"),
                    self.lora_B[name].get_parameter("weight"),
                    self.scaling[name],
                )


def _no_merge() -> ValueError:
    return ValueError(
        "an adapter cannot be merged into packed weights in memory, which would have to be rounded again: save it, and "
        "merge it into the packed checkpoint (torch-nvfp4 merge), or merge it into the dense model with stock PEFT"
    )


def refuse_merge(model: nn.Module) -> None:
    """ValueError where a packed layer has adapters, before any other layer is merged."""
    if any(isinstance(module, _PackedBase) for module in model.modules()):
        raise _no_merge()


def _joined(parts: list[LoRAFactors]) -> LoRAFactors:
    """The sum of several adapters as one whose rank is the sum of theirs."""
    if len(parts) == 1:
        return parts[0]
    return LoRAFactors(
        torch.cat([part.a for part in parts], -2), torch.cat([part.b * part.scaling for part in parts], -1), 1.0
    )


class ParamWrapper(_PackedBase, layer.ParamWrapper):
    """One adapted projection of packed experts, or the weight of a packed linear layer.

    Wrappers of one experts module nest; the outermost collects the factors of all and calls the module once.
    """

    projection: ProjectionName | None

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """Sets what PEFT keeps beside the sizes, too; it swaps the two for a 3-D parameter."""
        base = self.get_base_layer()
        if isinstance(base, NVFP4Linear):
            self.projection, self.num_experts, self._param_ndim = None, 1, 2
            return base.in_features, base.out_features
        is_gate_up = self.parameter_name == stock_layout_of(base).gate_up_name
        self.projection = "gate_up" if is_gate_up else "down"
        site = Site("", base, self.projection)
        self.num_experts, self._param_ndim, self.interleaved = site.num_experts, 3, is_interleaved(site)
        self.transposed = stock_layout_of(base).untold
        return site.out_in[::-1] if self.transposed else site.out_in

    def get_param(self) -> nn.Parameter:
        """The codes: PEFT asks for device and dtype, and keeps an adapter's own dtype beside integers."""
        prefix = "weight" if self.projection is None else self.projection
        return getattr(self.get_base_layer(), f"{prefix}_codes")

    def _factors(self, names: Sequence[str]) -> LoRAFactors | None:
        parts = list(self._pairs(names))
        if self.projection is not None:
            parts = [
                (*split_experts(a, b, self.num_experts, self.interleaved, transposed=self.transposed), scaling)
                for a, b, scaling in parts
            ]
        return _joined([LoRAFactors(*part) for part in parts]) if parts else None

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        if self.projection is None:
            self._check_forward_args(x, *args, adapter_names=adapter_names, **kwargs)
            return self.base_layer(x, lora=self._factors(self._active()))
        wrappers: list[ParamWrapper] = []
        module: nn.Module = self
        while isinstance(module, ParamWrapper):
            wrappers.append(module)
            module = module.base_layer
        if adapter_names is None or self.disable_adapters:
            return module(x, *args, lora=_by_projection(wrappers, self._active()), **kwargs)
        return module(x, *args, lora=_mixed(wrappers, adapter_names, x), **kwargs)


def _by_projection(wrappers: Sequence["ParamWrapper"], names: Sequence[str]) -> dict[ProjectionName, LoRAFactors]:
    """The factors of these adapters, summed, of all wrappers of one experts module."""
    found = {wrapper.projection: wrapper._factors(names) for wrapper in wrappers}
    return {projection: factors for projection, factors in found.items() if projection and factors is not None}


def _mixed(wrappers: Sequence["ParamWrapper"], adapter_names: Sequence[str], x: Tensor) -> MixedLoRA:
    """Each token's adapter, from its sample's; the rows of x are the samples' tokens, one sample after another."""
    if x.dim() != 2 or x.shape[0] % len(adapter_names):
        raise ValueError(
            f"adapter_names names {len(adapter_names)} samples, of which the experts' input {list(x.shape)} cannot be"
        )
    names = sorted(set(adapter_names) - {"__base__"})
    of_sample = torch.tensor([names.index(name) if name in names else -1 for name in adapter_names], device=x.device)
    ids = of_sample.repeat_interleave(x.shape[0] // len(adapter_names))
    return MixedLoRA([_by_projection(wrappers, [name]) for name in names], ids)


class _PlainParamWrapper(layer.ParamWrapper):
    """A plain matrix beside packed weights, such as a router's: PEFT's formula, without the parametrisation that it
    registers in each forward and that no compiler can trace.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not active:
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        weight = self.get_param()
        for name in active:
            weight = weight + self.get_delta_weight(name)
        return torch.func.functional_call(self.base_layer, {self.parameter_name: weight}, (x, *args), kwargs)


_PlainParamWrapper.__name__ = _PlainParamWrapper.__qualname__ = layer.ParamWrapper.__name__


class Linear(_PackedBase, layer.Linear):
    """A packed linear layer with adapters: one product for base and adapters, unless an adapter drops inputs out.

    Samples that name their adapters (`adapter_names`) have a product for each adapter.
    """

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        base: Any = self.get_base_layer()
        return base.in_features, base.out_features

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, adapter_names=adapter_names, **kwargs)
        names = [] if self.disable_adapters else adapter_names or self._active()
        if any(self._drops(name) for name in names if name in self.lora_A):
            if self.base_layer.merge_aware:
                raise ValueError(
                    "lora_dropout drops inputs of the adapter alone, and merge_aware computes with one weight for base "
                    "and adapter: set lora_dropout=0, or set_numerics(model, merge_aware=False)"
                )
            return super().forward(x, *args, adapter_names=adapter_names, **kwargs)
        if not adapter_names or self.disable_adapters:
            return self._with(self._active(), x)
        # One call for each adapter, and not one of the base and a sum: a merged weight is another for each.
        samples = {name: [i for i, of in enumerate(adapter_names) if of == name] for name in adapter_names}
        y = torch.cat([self._with([name], x[of_name]) for name, of_name in samples.items()])
        order = [i for of_name in samples.values() for i in of_name]
        return y[sorted(range(len(order)), key=order.__getitem__)]

    def _with(self, names: Sequence[str], x: Tensor) -> Tensor:
        parts = [LoRAFactors(*part) for part in self._pairs(names)]
        y: Tensor = self.base_layer(x, lora=_joined(parts) if parts else None)
        return y

    def _drops(self, name: str) -> bool:
        return self.training and isinstance(self.lora_dropout[name], nn.Dropout)


def wrap_plain(target: nn.Module, adapter_name: str, *, config: LoraConfig, **kwargs: Any) -> nn.Module | None:
    """The LoRA layer for a plain matrix that is named by its parameter, or None where PEFT's own will do."""
    name = kwargs.get("parameter_name")
    if name is None or isinstance(target, layer.LoraLayer) or target.get_parameter(name).ndim != 2:
        return None
    return _PlainParamWrapper(target, adapter_name, config=config, **kwargs)


def wrap(target: nn.Module, adapter_name: str, *, config: LoraConfig, **kwargs: Any) -> nn.Module:
    """The LoRA layer for a packed module, or for PEFT's wrapper of one; ValueError says what cannot be adapted."""
    base = target.get_base_layer() if isinstance(target, layer.LoraLayer) else target
    name, parameter = kwargs["target_name"], kwargs.pop("parameter_name", None)
    if parameter is not None:
        return ParamWrapper(target, adapter_name, parameter_name=parameter, config=config, **kwargs)
    if isinstance(base, NVFP4Experts):
        layout = stock_layout_of(base)
        raise ValueError(
            f"{name} holds packed experts: name them in target_parameters, "
            f"as '{name.rpartition('.')[2]}.{layout.gate_up_name}' and '{name.rpartition('.')[2]}.{layout.down_name}'"
        )
    return Linear(target, adapter_name, config=config, **kwargs)
