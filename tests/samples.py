"""Sample inputs for every op of the namespace: what test_gate.py runs its checks on.

An op without samples fails the gate. No dim of a sample is 1 where it need not be, no two letters share a size by
accident, and one slot in some is not routed, so that wrong strides, mixed-up sizes and rows that nobody wrote show.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from strategies import Layer, make_layer
from torch import Tensor

from torch_nvfp4.ops import routing

T, K, E, H, I, N_GATE_UP = 6, 3, 4, 48, 32, 64

ROW_RESULTS = {
    "grouped_lora_linear": (0, 1),
    "grouped_lora_dgrad": (0, 1),
    "glu_grouped_lora_linear": (0, 1),
    "glu_backward": (0, 1, 3),
}
"""op -> which of its results have a row for each routed slot."""
ROW_ARGUMENTS = {"x": "rows", "gy": "gy_rows", "p": "p_rows", "q": "q_rows", "pre": None, "gh": None, "v": None}
"""Arguments with a row for each routed slot, unless the named row indices are given."""


@dataclass(frozen=True)
class Sample:
    """One call of an op by argument name."""

    op: str
    name: str
    arguments: dict[str, Any]
    differentiable: tuple[str, ...] = ()
    token_side: tuple[str, ...] = ()
    """Arguments whose first dim follows the number of tokens."""

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.nvfp4, self.op).default

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    def replaced(self, arguments: dict[str, Any]) -> "Sample":
        merged = {**self.arguments, **arguments}
        return Sample(self.op, self.name, merged, self.differentiable, self.token_side)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sample":
        return self.replaced({name: function(tensor) for name, tensor in self.tensors.items()})

    def leaves(self, names: tuple[str, ...] | None = None) -> "Sample":
        """A copy in which the named differentiable arguments (None: all) are leaves that require a gradient."""
        wanted = self.differentiable if names is None else names
        return self.replaced({name: self.arguments[name].detach().requires_grad_() for name in wanted})

    def split(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) as the schema wants them."""
        args, kwargs = [], {}
        for argument in self.overload._schema.arguments:
            if argument.kwarg_only:
                if argument.name in self.arguments:
                    kwargs[argument.name] = self.arguments[argument.name]
            else:
                args.append(self.arguments.get(argument.name))
        return tuple(args), kwargs

    def function(self) -> Callable[[dict[str, Tensor]], tuple[Tensor, ...]]:
        """The call as a function of its tensors alone, plain enough for any tracer."""
        overload, fixed = self.overload, self.arguments
        positional = [a.name for a in overload._schema.arguments if not a.kwarg_only]
        keywords = [a.name for a in overload._schema.arguments if a.kwarg_only and a.name in fixed]

        def run(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
            arguments = {**fixed, **tensors}
            result = overload(*[arguments.get(n) for n in positional], **{n: arguments[n] for n in keywords})
            return as_tuple(result)

        return run

    def run(self) -> tuple[Tensor, ...]:
        args, kwargs = self.split()
        return as_tuple(self.overload(*args, **kwargs))

    def defined(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results without the rows that the op leaves unspecified, those from `offsets[-1]` on."""
        if self.op not in ROW_RESULTS:
            return results
        end = int(self.arguments["offsets"][-1])
        return tuple(r[:end] if at in ROW_RESULTS[self.op] else r for at, r in enumerate(results))

    def with_nan_where_not_routed(self) -> "Sample":
        """NaN in every element of the arguments that belongs to no routed slot."""
        damaged = {}
        if "offsets" in self.arguments:
            end = int(self.arguments["offsets"][-1])
            for name, indices in ROW_ARGUMENTS.items():
                indices = "rows" if self.op == "grouped_lora_dgrad" and name == "gy" else indices
                if name in self.tensors and indices not in self.tensors:
                    damaged[name] = self.arguments[name].clone()
                    damaged[name][end:] = torch.nan
            unrouted = self.arguments["rows"][end:].long() if "rows" in self.tensors else None
        else:
            ids = self.arguments["topk_ids"].flatten() if self.op == "moe_lora" else torch.zeros(0)
            unrouted = ((ids < 0) | (ids >= E)).nonzero().flatten()
        if "topk_weights" in self.arguments:
            damaged["topk_weights"] = self.arguments["topk_weights"].clone()
            damaged["topk_weights"].view(-1)[unrouted] = torch.nan
        return self.replaced(damaged)


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@dataclass(frozen=True)
class Case:
    """What all samples of one set share."""

    t: int
    pattern: str

    def layer(self, **options: Any) -> Layer:
        sizes = dict(t=self.t, k=K, e=E, h=H, i=I, ranks=(3, 5), pattern=self.pattern)
        return make_layer(**{**sizes, **options})


def _normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(layer: Layer, projection: str, lora: bool = True) -> dict[str, Tensor | None]:
    parts = ("codes", "scales", "global_scale", *(("lora_a", "lora_b") if lora else ()))
    return {part: layer.tensors[f"{projection}_{part}"] for part in parts}


def _routing(layer: Layer) -> dict[str, Tensor]:
    rows, _, offsets = routing.moe_route(layer.topk_ids, E)
    return {"rows": rows, "offsets": offsets}


def _quantize(op: str, case: Case) -> list[Sample]:
    differentiable = ("x",) if op == "fake_quantize" else ()
    experts = torch.tensor([[0.002, 0.001], [0.003, 0.002], [0.001, 0.004]])
    cases = {
        "computed": {"x": _normal(case.t, H)},
        "half": {"x": _normal(case.t, H, dtype=torch.bfloat16), "global_scale": torch.tensor(1e-3)},
        "experts": {"x": _normal(3, case.t, H), "global_scale": experts},
        "mxfp4": {"x": _normal(case.t, 64), "format": "mxfp4"},
    }
    return [
        Sample(op, name, arguments, differentiable, () if name == "experts" else ("x",))
        for name, arguments in cases.items()
        if name != "experts" or case.t % 2 == 0  # N rows in two halves
    ]


def _dequantize(case: Case) -> list[Sample]:
    samples = []
    for fmt in ("nvfp4", "mxfp4"):
        weight = _weight(case.layer(fmt=fmt, h=64, e=max(case.t, 1)), "gate_up", lora=False)
        arguments = {name: part[: case.t] for name, part in weight.items()}
        samples.append(Sample("dequantize", fmt, {**arguments, "dtype": torch.float32}, (), tuple(weight)))
    return samples


def _merge_lora(case: Case) -> list[Sample]:
    samples = []
    for fmt, dtype in (("nvfp4", torch.float32), ("mxfp4", torch.bfloat16)):
        weight = _weight(case.layer(fmt=fmt, h=64, e=max(case.t, 1)), "gate_up")
        arguments: dict[str, Any] = {name.removeprefix("lora_"): part[: case.t] for name, part in weight.items()}
        arguments |= {name: arguments[name].to(dtype) for name in "ab"} | {"scaling": 0.5}
        samples.append(Sample("merge_lora", fmt, arguments, (), (*weight, "a", "b")))
    return samples


NUMBERS = {"compute": "w4a4", "merge_aware": True}


def _input_scale() -> Tensor:
    """Of 4-bit activations, so small that some of these samples' saturate."""
    return torch.tensor(0.0005)


def _moe_route(case: Case) -> list[Sample]:
    return [Sample("moe_route", "ids", {"topk_ids": case.layer().topk_ids, "num_experts": E}, (), ("topk_ids",))]


def _grouped_lora_linear(case: Case) -> list[Sample]:
    layer = case.layer(bias=True)
    gathered = {"x": layer.x, **_routing(layer), **_weight(layer, "gate_up"), "bias": layer.gate_up_bias}
    half = case.layer(dtype=torch.bfloat16)
    plain = {"x": _normal(case.t * K, I, dtype=torch.bfloat16), "offsets": _routing(half)["offsets"]}
    plain |= _weight(half, "down", lora=False)
    return [
        Sample("grouped_lora_linear", "gathered", {**gathered, "scaling": 2.0, "top_k": K},
               ("x", "lora_a", "lora_b", "bias"), ("x", "rows")),
        Sample("grouped_lora_linear", "in_order", plain, ("x",), ("x",)),
        Sample("grouped_lora_linear", "merged_w4a4", {**gathered, "scaling": 2.0, "top_k": K, **NUMBERS},
               ("x", "lora_a", "lora_b", "bias"), ("x", "rows")),
        Sample("grouped_lora_linear", "calibrated",
               {**gathered, "scaling": 2.0, "top_k": K, "compute": "w4a4", "input_scale": _input_scale()},
               ("x", "lora_a", "lora_b", "bias"), ("x", "rows")),
    ]  # fmt: skip


def _grouped_lora_dgrad(case: Case) -> list[Sample]:
    layer = case.layer()
    routed = _routing(layer)
    options = {"scaling": 0.5}
    gathered = {"gy": _normal(case.t, H), **routed, **_weight(layer, "down"), **options, "top_k": K}
    in_order = {
        "gy": _normal(case.t * K, N_GATE_UP),
        "offsets": routed["offsets"],
        **_weight(layer, "gate_up"),
        **options,
    }
    return [
        Sample("grouped_lora_dgrad", "gathered", gathered, (), ("gy", "rows")),
        Sample("grouped_lora_dgrad", "in_order", in_order, (), ("gy",)),
        Sample("grouped_lora_dgrad", "merged", {**gathered, "merge_aware": True}, (), ("gy", "rows")),
        Sample("grouped_lora_dgrad", "v_only", {**in_order, "need_gx": False}, (), ("gy",)),
        Sample("grouped_lora_dgrad", "known_v", {**in_order, "v": _normal(case.t * K, 3)}, (), ("gy", "v")),
        Sample("grouped_lora_dgrad", "merged_known_v",
               {**gathered, "v": _normal(case.t * K, 5), "merge_aware": True}, (), ("gy", "rows", "v")),
    ]  # fmt: skip


def _grouped_lora_wgrad(case: Case) -> list[Sample]:
    routed = _routing(case.layer())
    p, q = _normal(case.t * K, 5), _normal(case.t, H, seed=2)
    gathered = {"p": p, "q": q, "q_rows": routed["rows"], "offsets": routed["offsets"], "top_k": K}
    in_order = {"p": p.bfloat16(), "q": _normal(case.t * K, 7).bfloat16(), "offsets": routed["offsets"]}
    return [
        Sample("grouped_lora_wgrad", "gathered", {**gathered, "dtype": torch.float32}, (), ("p", "q", "q_rows")),
        Sample("grouped_lora_wgrad", "in_order", {**in_order, "dtype": torch.bfloat16}, (), ("p", "q")),
    ]


def _glu_grouped_lora_linear(case: Case) -> list[Sample]:
    samples = []
    for name, activation, limit, bias, numbers in (
        ("silu", "silu", None, False, {}),
        ("swiglu_oai", "swiglu_oai", 0.7, True, {}),
        ("relu2", "relu2", None, False, {}),
        ("merged_w4a4", "silu", None, True, NUMBERS),
        ("calibrated", "silu", None, True, {"compute": "w4a4", "input_scale": _input_scale()}),
    ):
        layer = case.layer(bias=bias)
        arguments = {
            "pre": _normal(case.t * K, I if activation == "relu2" else 2 * I),
            "topk_weights": layer.topk_weights,
        }
        arguments |= _routing(layer) | _weight(layer, "down") | {"bias": layer.down_bias}
        arguments |= {"scaling": 0.5, "activation": activation, "limit": limit, **numbers}
        differentiable = ("pre", "topk_weights", "lora_a", "lora_b", *(("bias",) if bias else ()))
        token_side = ("pre", "topk_weights", "rows")
        samples.append(Sample("glu_grouped_lora_linear", name, arguments, differentiable, token_side))
    return samples


def _glu_backward(case: Case) -> list[Sample]:
    layer = case.layer(bias=True)
    routed = _routing(layer)
    common = {"pre": _normal(case.t * K, 2 * I), "topk_weights": layer.topk_weights, **routed}
    token_side = ("pre", "topk_weights", "rows", "gh")
    everything = {
        **common,
        "gh": _normal(case.t * K, I, seed=2),
        "gy": _normal(case.t, H, seed=3),
        "gy_rows": routed["rows"],
    }
    relu2 = {**common, "pre": _normal(case.t * K, I), "gh": everything["gh"], "activation": "relu2", "need_gw": False}
    relu2["lora_b"] = case.layer(activation="relu2").gate_up_lora_b
    only_h = {**common, "need_gpre": False, "need_gw": False}
    return [
        Sample(
            "glu_backward",
            "biased",
            {**everything, "bias": layer.down_bias},
            (),
            (*token_side, "gy", "gy_rows"),
        ),
        Sample(
            "glu_backward",
            "shrunk",
            {**everything, "bias": layer.down_bias, "lora_b": layer.gate_up_lora_b, "scaling": 2.0},
            (),
            (*token_side, "gy", "gy_rows"),
        ),
        Sample("glu_backward", "shrunk_relu2", relu2, (), token_side),
        Sample("glu_backward", "only_h", only_h, (), token_side[:3]),
    ]


def _moe_lora(case: Case) -> list[Sample]:
    samples = []
    for name, options in {
        "silu": {},
        "swiglu_oai": dict(activation="swiglu_oai", limit=0.7, bias=True, dtype=torch.bfloat16),
        "relu2_mxfp4": dict(activation="relu2", fmt="mxfp4", h=64, ranks=(None, 5)),
        "merged_w4a4": {},
        "calibrated": {},
    }.items():
        layer = case.layer(**options)
        arguments = {k: v for k, v in (layer.tensors | layer.options).items() if v is not None}
        arguments |= NUMBERS if name == "merged_w4a4" else {}
        if name == "calibrated":
            scales = {f"{projection}_input_scale": _input_scale() for projection in ("gate_up", "down")}
            arguments |= {"compute": "w4a4", **scales}
        token_side = ("x", "topk_ids", "topk_weights")
        samples.append(Sample("moe_lora", name, arguments, tuple(layer.differentiable), token_side))
    return samples


MAKERS: dict[str, Callable[[Case], list[Sample]]] = {
    "quantize": partial(_quantize, "quantize"),
    "dequantize": _dequantize,
    "fake_quantize": partial(_quantize, "fake_quantize"),
    "merge_lora": _merge_lora,
    "moe_route": _moe_route,
    "grouped_lora_linear": _grouped_lora_linear,
    "grouped_lora_dgrad": _grouped_lora_dgrad,
    "grouped_lora_wgrad": _grouped_lora_wgrad,
    "glu_grouped_lora_linear": _glu_grouped_lora_linear,
    "glu_backward": _glu_backward,
    "moe_lora": _moe_lora,
}


def samples(t: int = T, pattern: str = "minus_one", ops: Iterable[str] = tuple(MAKERS)) -> list[Sample]:
    """The samples of some ops, with t tokens and router ids of a pattern of `strategies.ID_PATTERNS`."""
    return [sample for op in ops for sample in MAKERS[op](Case(t, pattern))]


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def assert_same_bits(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for at, (g, w) in enumerate(zip(got, wanted, strict=True)):
        assert g.dtype == w.dtype and g.shape == w.shape, f"{at}: {g.dtype} {g.shape}, not {w.dtype} {w.shape}"
        assert torch.equal(raw(g), raw(w)), f"{at} differs"


def loss(sample: Sample, results: tuple[Tensor, ...]) -> Tensor:
    """A scalar that weights every element of the differentiable, defined results differently."""
    parts = [r.double().flatten() for r in sample.defined(results) if r.requires_grad]
    return torch.stack([(p * torch.linspace(0.5, 1.5, p.numel(), dtype=p.dtype)).sum() for p in parts]).sum()


def gradients(sample: Sample, names: tuple[str, ...] | None = None) -> tuple[Tensor, ...]:
    """Gradients of `loss` by fresh leaves of the named arguments (None: all differentiable ones)."""
    names = sample.differentiable if names is None else names
    leaves = sample.leaves(names)
    return torch.autograd.grad(loss(leaves, leaves.run()), [leaves.arguments[name] for name in names])
