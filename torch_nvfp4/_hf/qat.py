"""Quantisation-aware training of transformers' models: their fused experts beside their linear layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..nn import NVFP4Experts
from ..qat import (
    FakeQuantized,
    FakeQuantizedLinear,
    Filter,
    check_numbers,
    fake_quantize_experts,
    fake_quantize_rows,
    find_linears,
    set_prepared,
)
from .capture import install_capturing
from .convert import pack, rows_to_canonical, rows_to_stock
from .recognise import ExpertsPlan, find_experts, plan_experts, refuse_shared


def prepare_qat(
    model: nn.Module, *, format: str = "nvfp4", weights: bool = True, activations: bool = False,
    modules: Filter | None = None,
) -> nn.Module:  # fmt: skip
    """`torch_nvfp4.prepare_qat` for the model's experts modules too; `torch_nvfp4.convert_qat` packs both.

    Experts are recognised, and refused in words, as by `quantize_experts`: each expert's gate, up and down has a global
    scale of its own. activations: of the inputs of both projections; the router's weight comes after, as in "w4a4".
    Prepared experts run transformers' "grouped_mm" where the model's implementation is "eager", which would quantise
    all of them once for each.
    """
    numbers = check_numbers(format, weights, activations)
    linears = find_linears(model, numbers, modules)
    plans = [
        plan_experts(model, path, module, format)
        for path, module in find_experts(model) if modules is None or modules(path, module)
    ]  # fmt: skip
    if not (linears or plans):
        raise ValueError(f"nothing to prepare in {type(model).__name__}: no layer or experts that `modules` selects")
    refuse_shared(model, [plan.path for plan in plans])
    for plan in plans:
        if plan.on_input and activations:
            raise ValueError(f"cannot prepare {plan.path}: activations of experts whose inputs the router weighs")
    for linear in linears:
        set_prepared(linear, FakeQuantizedLinear, numbers)
    for plan in plans:
        experts = model.get_submodule(plan.path)
        experts.__dict__["qat_plan"] = plan
        stock: Any = type(experts)
        set_prepared(experts, _prepared_class(stock), numbers)
    install_capturing(model)
    return model


class _Rounded:
    """An experts module as its implementations see it: other weights, everything else its own."""

    def __init__(self, experts: nn.Module, weights: dict[str, Tensor], after_gate: Callable[[Tensor], Tensor]) -> None:
        self._experts, self._weights, self._after_gate = experts, weights, after_gate

    def __getattr__(self, name: str) -> Any:
        return self._weights[name] if name in self._weights else getattr(self._experts, name)

    def _apply_gate(self, pre: Tensor) -> Tensor:
        gated: Any = self._experts._apply_gate
        return self._after_gate(gated(pre))

    def act_fn(self, pre: Tensor) -> Tensor:
        act_fn: Any = self._experts.act_fn
        # Gated experts call it inside of `_apply_gate`, which is the module's own.
        return act_fn(pre) if getattr(self._experts, "has_gate", True) else self._after_gate(act_fn(pre))


class FakeQuantizedExperts(FakeQuantized):
    """Beside the stock class in the bases of a prepared experts module."""

    qat_plan: ExpertsPlan
    stock_class: Any

    def forward(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        """As the stock module's."""
        rounded = fake_quantize_rows if self.numbers.activations else _as_it_is
        view = _Rounded(self, self.rounded_weights(), rounded)
        if self.qat_plan.on_input:
            result: Tensor = self.stock_class.forward(view, hidden_states, *routing)
            return result
        config: Any = self.config
        implementation = config._experts_implementation
        if implementation in (None, "eager", "nvfp4"):
            implementation = "grouped_mm"
        run: Any = ALL_EXPERTS_FUNCTIONS[implementation]
        routed: Tensor = run(view, rounded(hidden_states), *routing)
        return routed

    def rounded_weights(self) -> dict[str, Tensor]:
        plan, layout = self.qat_plan, self.qat_plan.layout
        if not self.numbers.weights:
            return {}
        weights = {}
        for name, gate_up in ((layout.gate_up_name, True), (layout.down_name, False)):
            weight: Any = getattr(self, name)
            canonical = weight.mT if layout.transposed else weight
            if gate_up:
                canonical = rows_to_canonical(canonical, layout)
            values = fake_quantize_experts(canonical, 2 if gate_up and plan.has_gate else 1, self.numbers.format)
            if gate_up:
                values = rows_to_stock(values, layout)
            weights[name] = values.mT if layout.transposed else values
        return weights

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by the stock class: the class that mixes the two has no module where it could be found."""
        return _new_prepared, (self.stock_class,), self.__dict__

    def put_packed(self, model: nn.Module, path: str) -> None:
        numbers, plan = self.numbers, dataclasses.replace(self.qat_plan, path=path)
        self.__class__ = self.stock_class
        del self.numbers, self.qat_plan
        pack(model, plan, numbers.format)
        packed = model.get_submodule(path)
        assert isinstance(packed, NVFP4Experts)
        packed.compute = "w4a4" if numbers.activations else "w4a16"


def _as_it_is(x: Tensor) -> Tensor:
    return x


@functools.cache
def _prepared_class(stock: Any) -> type[FakeQuantizedExperts]:
    return type(f"FakeQuantized{stock.__name__}", (FakeQuantizedExperts, stock), {"stock_class": stock})


def _new_prepared(stock: Any) -> FakeQuantizedExperts:
    """Without its attributes, which unpickling sets."""
    prepared = _prepared_class(stock)
    return prepared.__new__(prepared)
