"""Recognising transformers' experts modules: by the flags they carry and by what their activation computes.

Nothing is looked up by class name and no layout is guessed from a shape. What cannot be told for sure is
refused in words, naming class and module path.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._lora.sites import StockLayout
from ..format import get_format
from ..nn import NVFP4Experts
from ..ops.activation import activate
from .interface import FLAGS, ExpertsInterface, interface_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExpertsPlan:
    """How to pack one experts module: where it is, how it stores its weights, which activation it has.

    `on_input`: its parent weighs the experts' inputs, not their outputs, and must be switched when it is packed.
    """

    path: str
    layout: StockLayout
    activation: str
    limit: float | None
    has_gate: bool
    has_bias: bool
    on_input: bool


def plan_all(model: nn.Module, format: str) -> list[ExpertsPlan]:
    """A plan for every experts module, or a ValueError that says which one cannot be packed and why."""
    plans = [plan_experts(model, path, module, format) for path, module in find_experts(model)]
    if not plans:
        packed = any(isinstance(module, NVFP4Experts) for module in model.modules())
        state = "its experts are packed already" if packed else "no module holds stacked expert weights"
        raise ValueError(f"nothing to quantize in {type(model).__name__}: {state}")
    refuse_shared(model, [plan.path for plan in plans])
    return plans


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own stacked expert weights: 3-D parameters `down_proj` and `gate_up_proj` or `up_proj`."""
    for path, module in model.named_modules():
        stacked = {name for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
        if "down_proj" in stacked and stacked & {"gate_up_proj", "up_proj"}:
            yield path, module


def plan_experts(model: nn.Module, path: str, experts: nn.Module, format: str, *, loaded: bool = True) -> ExpertsPlan:
    """How to pack one module, or a ValueError that says why it cannot be. `loaded`: it must hold its weights."""

    def refusal(reason: str) -> ValueError:
        return ValueError(f"cannot pack {type(experts).__name__} at {path or 'the root'}: {reason}")

    parent = model.get_submodule(path.rpartition(".")[0])
    interface = interface_of(parent, experts)
    if interface is None:
        missing = [flag for flag in FLAGS if not hasattr(experts, flag)]
        raise refusal(f"it does not carry the flags of transformers' experts interface ({', '.join(missing)})")
    layout = StockLayout(
        gate_up_name="gate_up_proj" if interface.has_gate else "up_proj",
        transposed=interface.is_transposed,
        interleaved=interface.has_gate and not interface.is_concatenated,
        untold=interface.is_transposed and not getattr(experts, "is_transposed", False),
    )
    reason = _module_reason(path, experts, interface, layout) or _shape_reason(experts, interface, layout, format)
    if not reason and loaded:
        reason = _weights_reason(experts)
    if reason:
        raise refusal(reason)
    found = _recognise_activation(experts, interface, layout)
    if found is None:
        act_fn = getattr(experts, "act_fn", None)
        name = getattr(act_fn, "__name__", type(act_fn).__name__)
        raise refusal(f"its activation ({interface.code}, act_fn {name}) is none that NVFP4Experts computes")
    return ExpertsPlan(path, layout, *found, interface.has_gate, interface.has_bias, interface.on_input)


def _module_reason(path: str, experts: nn.Module, interface: ExpertsInterface, layout: StockLayout) -> str | None:
    """Why the module cannot be replaced, or None."""
    if not path:
        return "it is the model itself and can be replaced only inside a parent"
    if path.rpartition(".")[2] == "base_layer":
        return "it is wrapped by an adapter; pack the model before adapters are added"
    if experts._forward_hooks or experts._forward_pre_hooks or hasattr(experts, "_hf_hook"):
        return "it has forward hooks, which replacing it would drop (load the model on one device)"
    if interface.has_post_expert_norm:
        return "it normalises the experts' outputs (has_post_expert_norm)"
    names = [layout.gate_up_name, layout.down_name]
    promised = names + [f"{name}_bias" for name in names if interface.has_bias]
    held = [name for name, _ in (*experts.named_parameters(), *experts.named_buffers())]
    if sorted(held) != sorted(promised):
        return f"its flags promise the parameters {', '.join(promised)}, it holds {', '.join(held)}"
    return None


def _weights_reason(experts: nn.Module) -> str | None:
    """Why the weights' values cannot be packed, or None."""
    for name, weight in experts.named_parameters():
        if weight.is_meta:
            return f"{name} is on the meta device; load the weights first"
        if weight.dtype not in _DTYPES:
            return f"{name} has dtype {weight.dtype}, expected float32, bfloat16 or float16"
    return None


def _shape_reason(experts: nn.Module, interface: ExpertsInterface, layout: StockLayout, format: str) -> str | None:
    """Why weights of these shapes cannot be packed, or None."""
    gate_up, down = experts.get_parameter(layout.gate_up_name), experts.get_parameter(layout.down_name)
    e, hidden, intermediate = (down.mT if layout.transposed else down).shape
    rows = 2 * intermediate if interface.has_gate else intermediate
    if (gate_up.mT if layout.transposed else gate_up).shape != (e, rows, hidden):
        shapes = f"{list(gate_up.shape)} and {list(down.shape)}"
        return f"the weights' shapes {shapes} do not fit is_transposed={layout.transposed}"
    block = get_format(format).block_size
    if hidden % block or intermediate % block:
        return f"H = {hidden} and I = {intermediate} must be multiples of B = {block} ({format})"
    return None


def _recognise_activation(
    experts: nn.Module, interface: ExpertsInterface, layout: StockLayout
) -> tuple[str, float | None] | None:
    """The (activation, limit) that computes what the module's own code computes, found by running both."""
    limits = [float(v) for name, v in vars(experts).items() if "limit" in name and isinstance(v, int | float)]
    intermediate = experts.get_parameter("down_proj").shape[1 if layout.transposed else 2]
    candidates: list[tuple[str, float | None]] = [("relu2", None)]
    with torch.no_grad(), torch.device("cpu"):  # a model that is being loaded is made on the meta device
        probe = _probe(limits, intermediate, gated=interface.has_gate)
        if interface.has_gate:
            candidates = [("silu", None), ("gelu_tanh", None), ("gelu", None)]
            candidates += [(name, limit) for limit in limits for name in ("silu", "swiglu_oai")]
        in_rows = probe.unflatten(1, (2, -1)).mT.flatten(1) if layout.interleaved else probe
        actual = interface.activation(in_rows)
    for activation, limit in candidates:
        expected = activate(probe, activation, limit)
        if actual.shape == expected.shape and torch.allclose(actual.float(), expected, rtol=1e-5, atol=1e-5):
            return activation, limit
    return None


def _probe(limits: list[float], intermediate: int, *, gated: bool) -> Tensor:
    """Pre-activations `[S, 2I]` (columns `[gate; up]`) or `[S, I]`: every pair of values that are small,
    large or about a limit, so that a clamp, another slope or another offset shows.
    """
    near = [factor * limit for limit in limits for factor in (-1.1, -0.9, 0.9, 1.1)]
    fixed = [-500.0, -11, -4, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 4, 11, 500]
    values = torch.tensor([*fixed, *near], dtype=torch.float32)
    columns = torch.cartesian_prod(values, values).T if gated else values[None]
    rows = -(-columns.shape[1] // intermediate)
    padded = F.pad(columns, (0, rows * intermediate - columns.shape[1]))
    return padded.unflatten(1, (rows, intermediate)).transpose(0, 1).flatten(1)


def refuse_shared(model: nn.Module, paths: list[str]) -> None:
    """Expert weights that something else of the model uses too cannot be replaced."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta and parameter.numel():
            owners.setdefault(parameter.data_ptr(), []).append(name)
    for names in owners.values():
        if len(names) > 1 and any(name.rpartition(".")[0] in paths for name in names):
            raise ValueError(f"cannot pack expert weights that are shared: {', '.join(names)} are one tensor")
