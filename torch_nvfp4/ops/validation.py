"""The one checker of op arguments: `check(op, arguments)` runs before every kernel and every fake kernel.

Each op's rule is a table: argument -> (dtype class, shape in letters). A letter is bound by the first argument that
shows it and must agree everywhere after, so an error can say which two arguments disagree.
Shapes may be symbolic: only equalities are asked, which Dynamo answers without a guard when both sides are the same
expression.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..format import FORMATS

GATED_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "swiglu_oai")
ACTIVATIONS = (*GATED_ACTIVATIONS, "relu2")
LIMITED_ACTIVATIONS = ("silu", "swiglu_oai")
COMPUTE_MODES = ("w4a16", "w4a4")

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float": _FLOATS,
    "int": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    "int32": (torch.int32,),
    "uint8": (torch.uint8,),
    "scale": tuple(f.scale_dtype for f in FORMATS.values()),
    "float32": (torch.float32,),
}
_BLOCK = {f.scale_dtype: f.block_size for f in FORMATS.values()}


class Size(NamedTuple):
    """One dim of a shape: a letter alone, or twice it, a half of it, or a block's share of it ("2I", "C/2", "C/B")."""

    text: str
    letter: str
    part: str

    @classmethod
    def parse(cls, text: str) -> "Size":
        if text[-2:] in ("/2", "/B"):
            return cls(text, text[:-2], text[-2:])
        return cls(text, text[1:], "2") if text.startswith("2") else cls(text, text, "")


class Rule:
    """What one argument must be: a key of `_DTYPES`, and its shape as space-separated letters."""

    def __init__(self, kind: str, shape: str) -> None:
        self.dtypes = _DTYPES[kind]
        self.sizes = tuple(map(Size.parse, shape.split()))
        self.letters = f"[{', '.join(shape.split())}]"


def _weight(prefix: str, n: str, c: str) -> dict[str, Rule]:
    return {
        f"{prefix}codes": Rule("uint8", f"E {n} {c}/2"),
        f"{prefix}scales": Rule("scale", f"E {n} {c}/B"),
        f"{prefix}global_scale": Rule("float32", "E S"),
    }


def _factors(prefix: str, n: str, c: str, r: str) -> dict[str, Rule]:
    return {
        f"{prefix}lora_a": Rule("float", f"E {r} {c}"),
        f"{prefix}lora_b": Rule("float", f"E {n} {r}"),
    }


def _moe_rules(gate_up_n: str) -> dict[str, Rule]:
    return {
        "x": Rule("float", "T H"),
        "topk_ids": Rule("int", "T K"),
        "topk_weights": Rule("float", "T K"),
        **_weight("gate_up_", gate_up_n, "H"),
        **_weight("down_", "H", "I"),
        **_factors("gate_up_", gate_up_n, "H", "R_gate_up"),
        **_factors("down_", "H", "I", "R_down"),
        "gate_up_bias": Rule("float", f"E {gate_up_n}"),
        "down_bias": Rule("float", "E H"),
        "gate_up_input_scale": Rule("float32", ""),
        "down_input_scale": Rule("float32", ""),
    }


_ROUTING = {"rows": Rule("int32", "M"), "offsets": Rule("int32", "E")}
_GLU = {"topk_weights": Rule("float", "T K"), **_ROUTING}

RULES: dict[str, dict[str, Rule]] = {
    "merge_lora": {**_weight("", "N", "C"), "a": Rule("float", "E R C"), "b": Rule("float", "E N R")},
    "moe_route": {"topk_ids": Rule("int", "T K")},
    "grouped_lora_linear": {
        "x": Rule("float", "X C"),
        **_ROUTING,
        **_weight("", "N", "C"),
        **_factors("", "N", "C", "R"),
        "bias": Rule("float", "E N"),
        "input_scale": Rule("float32", ""),
    },
    "grouped_lora_dgrad": {
        "gy": Rule("float", "X N"),
        **_ROUTING,
        **_weight("", "N", "C"),
        **_factors("", "N", "C", "R"),
        "v": Rule("float", "M R"),
    },
    "grouped_lora_wgrad": {
        "p": Rule("float", "P_rows P"),
        "q": Rule("float", "Q_rows Q"),
        "p_rows": Rule("int32", "M"),
        "q_rows": Rule("int32", "M"),
        "offsets": Rule("int32", "E"),
    },
    **{
        f"glu_grouped_lora_linear{suffix}": {
            "pre": Rule("float", f"M {n}"),
            **_GLU,
            **_weight("", "N", "I"),
            **_factors("", "N", "I", "R"),
            "bias": Rule("float", "E N"),
            "input_scale": Rule("float32", ""),
        }
        for suffix, n in (("", "2I"), (":plain", "I"))
    },
    **{
        f"glu_backward{suffix}": {
            "pre": Rule("float", f"M {n}"),
            **_GLU,
            "gh": Rule("float", "M I"),
            "gy": Rule("float", "X N"),
            "gy_rows": Rule("int32", "M"),
            "bias": Rule("float", "E N"),
            "lora_b": Rule("float", f"E {n} R"),
        }
        for suffix, n in (("", "2I"), (":plain", "I"))
    },
    "moe_lora": _moe_rules("2I"),
    "moe_lora:plain": _moe_rules("I"),
}


# op -> (token-side tensor, its row indices): the tensor has M / top_k rows where the indices are given ("": never).
_TOKEN_SIDE: dict[str, tuple[tuple[str, str], ...]] = {
    "grouped_lora_linear": (("x", "rows"),),
    "grouped_lora_dgrad": (("gy", "rows"), ("v", "")),
    "grouped_lora_wgrad": (("p", "p_rows"), ("q", "q_rows")),
    "glu_grouped_lora_linear": (("topk_weights", "rows"),),
    "glu_backward": (("topk_weights", "rows"), ("gy", "gy_rows")),
}

_INPUT_SCALES = ("input_scale", "gate_up_input_scale", "down_input_scale")
_NO_RULES: dict[str, Rule] = {}


def _pairs(last: str, other: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """op -> its arguments that end in `last`, each with the one that ends in `other` instead."""
    return {
        op: tuple((name, name.removesuffix(last) + other) for name in rules if name.endswith(last))
        for op, rules in RULES.items()
    }


_FACTOR_PAIRS = _pairs("lora_a", "lora_b")
_WEIGHTS = _pairs("global_scale", "codes")


def is_gated(activation: str) -> bool:
    """Whether the first projection has gate and up halves (every activation but relu2)."""
    return activation in GATED_ACTIVATIONS


def check(op: str, arguments: Mapping[str, Any]) -> None:
    """Check an op's arguments by name (those left at their defaults may be missing).

    Raises TypeError for a wrong dtype; ValueError for a wrong shape, device, option, or a lone LoRA factor. The text
    names the argument, what was expected in the letters above, and what was given.
    """
    activation = arguments.get("activation", "silu")
    _check_options(op, arguments, activation)
    sizes: dict[str, int] = {}
    bound_by: dict[str, str] = {}
    first: tuple[str, torch.device] | None = None
    for name, rule in RULES.get(op if is_gated(activation) else f"{op}:plain", _NO_RULES).items():
        tensor = arguments.get(name)
        if tensor is None:
            continue
        if tensor.dtype not in rule.dtypes:
            raise TypeError(f"{op}: {name} must be {_names(rule.dtypes)}, got {_names((tensor.dtype,))}")
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ValueError(f"{op}: {name} is on {tensor.device}, but {first[0]} is on {first[1]}")
        _bind_shape(op, name, tensor, rule, sizes, bound_by)
    _check_pairs(op, arguments)
    _check_routing(op, arguments, sizes)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_options(op: str, arguments: Mapping[str, Any], activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got '{activation}'")
    limit = arguments.get("limit")
    if limit is not None and activation not in LIMITED_ACTIVATIONS:
        raise ValueError(f"{op}: limit applies to {' and '.join(LIMITED_ACTIVATIONS)}, not to '{activation}'")
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: limit must be positive, got {limit}")
    compute = arguments.get("compute", COMPUTE_MODES[0])
    if compute not in COMPUTE_MODES:
        raise ValueError(f"{op}: compute must be one of {', '.join(COMPUTE_MODES)}, got '{compute}'")
    for name in _INPUT_SCALES:
        if compute != "w4a4" and arguments.get(name) is not None:
            raise ValueError(f"{op}: {name} is that of 4-bit activations (compute 'w4a4'), got compute '{compute}'")
    if op == "glu_backward" and arguments["gh"] is None:
        if arguments.get("need_gpre", True) or arguments.get("need_gw", True):
            raise ValueError(f"{op}: gh may be None only where need_gpre and need_gw are False")
    if op == "glu_backward" and arguments.get("lora_b") is not None and not arguments.get("need_gpre", True):
        raise ValueError(f"{op}: lora_b may be given only where need_gpre is True, as v is that of gpre")
    if arguments.get("num_experts", 1) < 1:
        raise ValueError(f"{op}: num_experts must be at least 1, got {arguments['num_experts']}")


def _bind_shape(
    op: str, name: str, tensor: Tensor, rule: Rule, sizes: dict[str, int], bound_by: dict[str, str]
) -> None:
    shape = tensor.shape
    if len(shape) != len(rule.sizes):
        raise ValueError(f"{op}: {name} must be {rule.letters}, got {list(shape)}")
    for (text, letter, part), size in zip(rule.sizes, shape, strict=True):
        if part == "/2":
            size = size * 2
        elif part == "/B":
            size = size * _BLOCK[tensor.dtype]
        elif part == "2":
            if size % 2 != 0:
                raise ValueError(f"{op}: {name} must have an even {text} (gate and up), got {size}")
            size = size // 2
        elif letter == "S":  # gate_up and down may differ in S, so it is checked but not bound
            if size != 1 and size != 2:
                raise ValueError(f"{op}: {name} must be {rule.letters} with S = 1 or 2, got S = {size}")
            continue
        if letter not in sizes:
            sizes[letter] = size
            bound_by[letter] = name
        elif sizes[letter] != size:
            raise ValueError(
                f"{op}: {name} has {letter} = {size}, but {bound_by[letter]} has {letter} = {sizes[letter]} "
                f"({name} must be {rule.letters}, got {list(shape)})"
            )


def _check_pairs(op: str, arguments: Mapping[str, Any]) -> None:
    """LoRA factors come in pairs, and v with them; a global scale per half needs two halves."""
    for name, partner in _FACTOR_PAIRS.get(op, ()):
        given = arguments.get(name) is not None
        if given != (arguments.get(partner) is not None):
            lone, missing = (name, partner) if given else (partner, name)
            raise ValueError(f"{op}: {lone} is given without {missing}; LoRA needs both factors")
    v = arguments.get("v")
    if v is not None and arguments.get("lora_b") is None:
        raise ValueError(f"{op}: v is given without lora_a and lora_b")
    if v is not None and v.dtype != arguments["gy"].dtype:
        raise TypeError(f"{op}: v must be {_names((arguments['gy'].dtype,))} as gy is, got {_names((v.dtype,))}")
    for name, codes in _WEIGHTS.get(op, ()):
        if arguments[name].shape[1] == 2:
            n = arguments[codes].shape[1]
            if n % 2 != 0:
                raise ValueError(f"{op}: {name} has S = 2, but N = {n} cannot be halved")


def _check_routing(op: str, arguments: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Every row of a token-side tensor has top_k routed rows; without `rows` the tensor's rows are the routed ones."""
    if "K" in sizes and sizes["K"] < 1:
        raise ValueError(f"{op}: K (experts per token) must be at least 1, got 0")
    top_k = arguments.get("top_k", sizes.get("K", 1))
    if top_k < 1:
        raise ValueError(f"{op}: top_k must be at least 1, got {top_k}")
    routed: tuple[str, int] | None = None
    for name, rows_name in _TOKEN_SIDE.get(op, ()):
        rows, tensor = arguments.get(rows_name), arguments.get(name)
        if tensor is None:
            continue
        if rows is not None and rows.shape[0] != tensor.shape[0] * top_k:
            raise ValueError(
                f"{op}: {rows_name} has M = {rows.shape[0]}, but {name} has {tensor.shape[0]} rows "
                f"of {top_k} slots each"
            )
        here = (name, tensor.shape[0]) if rows is None else (rows_name, rows.shape[0])
        if routed is not None and here[1] != routed[1]:
            raise ValueError(f"{op}: {here[0]} has M = {here[1]}, but {routed[0]} has M = {routed[1]}")
        routed = here
