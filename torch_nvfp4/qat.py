"""Quantisation-aware training of dense layers: `prepare_qat`, train as ever, `convert_qat`.

A prepared layer computes with the values that its packed form will stand for, and its gradients pass straight through
the rounding to the full-precision weights, which stay its parameters under their own names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._lora.sites import replace_module
from .format import get_format, global_scales
from .nn import NVFP4Linear

Filter = Callable[[str, nn.Module], bool]
"""Whether the module at a path is to be prepared."""


@dataclass(frozen=True)
class Numbers:
    """What a prepared module rounds: weights to `format`, activations to NVFP4 rows with an fp32 scale each."""

    format: str
    weights: bool
    activations: bool


class _StraightThrough(torch.autograd.Function):
    """`fake_quantize` under scales that follow from x, so that nothing saturates and every gradient passes.

    (The op's own gradient is 0 where |x| exceeds 2688 global scales, as it can by one rounding where x has the amax.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, global_scale: Tensor | None, format: str) -> Tensor:
        return torch.ops.nvfp4.fake_quantize(x, global_scale, format=format)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Backward needs nothing; torch.func needs this method."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        return grads[0], None, None


def fake_quantize_rows(x: Tensor) -> Tensor:
    """4-bit activations: x `[..., C]` -> the same, each row in NVFP4 under a scale of its own; straight-through.

    The codes and scales are those of compute "w4a4"; the values are rounded to x's dtype. C is a multiple of 16.
    """
    rows = x.reshape(-1, 1, x.shape[-1])
    magnitudes = rows.detach().to(torch.float32).abs()
    amax = torch.where(magnitudes.isfinite(), magnitudes, 0.0).amax(-1)
    values: Tensor = _StraightThrough.apply(rows, global_scales(amax), "nvfp4")
    return values.view(x.shape)


def fake_quantize_experts(weight_ENC: Tensor, halves: int, format: str) -> Tensor:
    """`[E, N, C]` as `NVFP4Experts.from_dense` packs it: in NVFP4, each expert and half of its rows has a global scale.

    Straight-through, in the weight's dtype.
    """
    scales = None
    if format == "nvfp4":
        e = weight_ENC.shape[0]
        scales = global_scales(weight_ENC.detach().reshape(e, halves, -1).abs().amax(-1))
    values: Tensor = _StraightThrough.apply(weight_ENC, scales, format)
    return values


class FakeQuantized(nn.Module):
    """What `prepare_qat` makes of a module: the same object, with a class that rounds in its forward."""

    numbers: Numbers

    def put_packed(self, model: nn.Module, path: str) -> None:
        """Put the packed module in the place of this one."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        kinds = [kind for kind in ("weights", "activations") if getattr(self.numbers, kind)]
        stock = super().extra_repr()
        return f"{stock}{', ' if stock else ''}qat={self.numbers.format} {' and '.join(kinds)}"


class FakeQuantizedLinear(FakeQuantized, nn.Linear):
    """An `nn.Linear` that computes with fake-quantised weights, activations or both; its state_dict is the same."""

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., C]` -> `[..., N]`."""
        weight = self.weight
        if self.numbers.weights:
            weight = torch.ops.nvfp4.fake_quantize(weight, format=self.numbers.format)
        return F.linear(fake_quantize_rows(x) if self.numbers.activations else x, weight, self.bias)

    def put_packed(self, model: nn.Module, path: str) -> None:
        packed = NVFP4Linear.from_dense(self, self.numbers.format).train(self.training)
        packed.compute = "w4a4" if self.numbers.activations else "w4a16"
        replace_module(model, self, packed)


def prepare_qat(
    model: nn.Module, *, format: str = "nvfp4", weights: bool = True, activations: bool = False,
    modules: Filter | None = None,
) -> nn.Module:  # fmt: skip
    """Have the model's `nn.Linear` layers compute as their packed forms will, in place, and return the model.

    Args:
        format: "nvfp4" or "mxfp4", of the weights. NVFP4's global scale is computed anew in each forward.
        weights: whether weights are fake-quantised.
        activations: whether the layers' inputs are: NVFP4 per 16 under a scale for each row, as in compute "w4a4".
        modules: of (path, module), which layers; None for all.

    Parameters, their names, optimiser state, hooks and biases stay; what trains is the full-precision weight.
    ValueError, before anything changes, where there is nothing to prepare, and for a layer that is prepared already,
    has a width that is no multiple of the block size, shares its weight, computes it (weight_norm, pruning), or is the
    base of an adapter.

    Experts of transformers' models: `torch_nvfp4.hf.prepare_qat`.
    """
    numbers = check_numbers(format, weights, activations)
    linears = find_linears(model, numbers, modules)
    if not linears:
        raise ValueError(f"nothing to prepare in {type(model).__name__}: it has no nn.Linear that `modules` selects")
    for linear in linears:
        set_prepared(linear, FakeQuantizedLinear, numbers)
    return model


def convert_qat(model: nn.Module) -> nn.Module:
    """Replace every prepared module by its packed form, in place, and return the model.

    The packed weights dequantise, bit for bit, to what the prepared module computed with. Layers whose activations were
    fake-quantised compute as "w4a4" (`set_numerics` changes that, and sets it again on a model that was loaded).
    ValueError where nothing is prepared, where weights were not fake-quantised, and for sharded weights.
    """
    prepared = [(path, module) for path, module in model.named_modules() if isinstance(module, FakeQuantized)]
    if not prepared:
        raise ValueError(f"nothing to convert in {type(model).__name__}: call prepare_qat first")
    for path, module in prepared:
        if not module.numbers.weights:
            raise ValueError(f"{path} was prepared with weights=False: training did not see its packed weights")
        if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
            raise ValueError(f"{path} is sharded over devices: gather the model on one first")
    for path, module in prepared:
        module.put_packed(model, path)
    return model


def check_numbers(format: str, weights: bool, activations: bool) -> Numbers:
    """ValueError for an unknown format, and where nothing is to be rounded."""
    get_format(format)
    if not (weights or activations):
        raise ValueError("weights and activations are both False: there is nothing to fake-quantise")
    return Numbers(format, weights, activations)


def set_prepared(module: nn.Module, prepared_class: type[FakeQuantized], numbers: Numbers) -> None:
    """The object stays the same, so that whatever refers to it, or hooks into it, does too."""
    module.__class__ = prepared_class
    module.numbers = numbers  # type: ignore[assignment]


def find_linears(model: nn.Module, numbers: Numbers, modules: Filter | None) -> list[nn.Linear]:
    """The layers to prepare, checked; ValueError as `prepare_qat`."""
    refuse_prepared(model)
    found = [
        (path, module) for path, module in model.named_modules()
        if type(module) is nn.Linear and (modules is None or modules(path, module))
    ]  # fmt: skip
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for path, linear in found:
        _check_linear(path, linear, numbers)
        if _is_shared(model, linear, owners[id(linear.weight)]):
            names = ", ".join(owners[id(linear.weight)])
            raise ValueError(f"cannot prepare {path}: its weight is shared ({names}); leave it out with `modules`")
    return [linear for _, linear in found]


def refuse_prepared(model: nn.Module) -> None:
    """ValueError for a model that holds a prepared module."""
    for path, module in model.named_modules():
        if isinstance(module, FakeQuantized):
            raise ValueError(f"{path} is prepared already; convert_qat comes next")


def _check_linear(path: str, linear: nn.Linear, numbers: Numbers) -> None:
    if not path:
        raise ValueError("cannot prepare the model itself: it can be replaced only inside a parent")
    if path.rpartition(".")[2] == "base_layer":
        raise ValueError(f"cannot prepare {path}: it is the base of an adapter, which trains in its stead")
    if "weight" not in linear._parameters:
        raise ValueError(
            f"cannot prepare {path}: its weight is computed from other parameters (weight_norm, pruning); make it one "
            "(remove_weight_norm, prune.remove), or leave it out with `modules`"
        )
    blocks = [get_format(numbers.format).block_size] * numbers.weights + [16] * numbers.activations
    if linear.in_features % max(blocks):
        raise ValueError(
            f"cannot prepare {path}: its width C = {linear.in_features} is no multiple of B = {max(blocks)}; "
            "leave it out with `modules`"
        )


def _is_shared(model: nn.Module, linear: nn.Linear, names: list[str]) -> bool:
    """Whether another module holds the weight too (the layer itself may be in several places)."""
    return any(model.get_submodule(name.rpartition(".")[0]) is not linear for name in names)
