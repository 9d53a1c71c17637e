"""Sharding rules of DTensor for the small ops: which splits of their arguments give which split of their results.

A rule is right for the numbers of the op's reference or it is not here. Where none fits, DTensor gathers the arguments:
right, and dear. What it would gather by mistake, experts split over ranks, is refused in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from ..ops.schemas import SCHEMAS
from ..ops.validation import is_gated

Split = tuple[Sequence[Placement], Mapping[str, Placement]]
"""Placements of the results, and those of arguments that are not replicated."""
_Rule = Callable[[Mapping[str, Any]], Iterator[Split]]

_REPLICATED = Replicate()
_WEIGHT_N: dict[str, Placement] = {"codes": Shard(1), "scales": Shard(1)}
_WEIGHT_C: dict[str, Placement] = {"codes": Shard(2), "scales": Shard(2)}
_GROUPED = ("grouped_lora_linear", "grouped_lora_dgrad", "glu_grouped_lora_linear")


def _one_scale(a: Mapping[str, Any]) -> bool:
    """Whether all N rows of an expert share a global scale: where halves have their own, a share of N has no halves."""
    return a["global_scale"].shape[-1] == 1


def _whole_blocks(spec: Any, blocks: int) -> bool:
    """Whether every mesh dim can split the blocks along the contraction evenly."""
    return blocks % math.prod(spec.mesh.shape) == 0


def _linear(a: Mapping[str, Any], x: str = "x", row: bool = True) -> Iterator[Split]:
    if _one_scale(a):
        yield [Shard(1), _REPLICATED], {**_WEIGHT_N, "lora_b": Shard(1), "bias": Shard(1)}
    # A bias would be added once a rank; w4a4's scale of a row is that of all its columns.
    if row and a.get("bias") is None and a.get("compute", "w4a16") == "w4a16" and _blocks_split(a):
        yield [Partial(), Partial()], {x: Shard(1), **_WEIGHT_C, "lora_a": Shard(2)}


def _blocks_split(a: Mapping[str, Any]) -> bool:
    return _whole_blocks(a["scales"], a["scales"].shape[-1])


def _dgrad(a: Mapping[str, Any]) -> Iterator[Split]:
    if _one_scale(a):
        yield [Partial(), Partial()], {"gy": Shard(1), **_WEIGHT_N, "lora_b": Shard(1), "v": Partial()}
    if _blocks_split(a):
        yield [Shard(1), _REPLICATED], {**_WEIGHT_C, "lora_a": Shard(2)}


def _wgrad(a: Mapping[str, Any]) -> Iterator[Split]:
    yield [Shard(1)], {"p": Shard(1)}
    yield [Shard(2)], {"q": Shard(1)}
    yield [Partial()], {"p": Partial()}
    yield [Partial()], {"q": Partial()}


def _glu(a: Mapping[str, Any]) -> Iterator[Split]:
    # Columns of [gate; up] in one tensor: a share of them has gates without their ups.
    yield from _linear(a, "pre", row=not is_gated(a.get("activation", "silu")))


def _glu_backward(a: Mapping[str, Any]) -> Iterator[Split]:
    if not is_gated(a.get("activation", "silu")) and a.get("bias") is None:
        yield [Shard(1), Shard(1), Partial(), Partial()], {"pre": Shard(1), "gh": Shard(1), "lora_b": Shard(1)}


def _merge_lora(a: Mapping[str, Any]) -> Iterator[Split]:
    by_expert = ("codes", "scales", "global_scale", "a", "b")
    yield [Shard(0), Shard(0)], dict.fromkeys(by_expert, Shard(0))
    if _one_scale(a):
        yield [Shard(1), Shard(1)], {**_WEIGHT_N, "b": Shard(1)}
    if _blocks_split(a):
        yield [Shard(2), Shard(2)], {**_WEIGHT_C, "a": Shard(2)}


def _elementwise(lead: str, results: int, a: Mapping[str, Any]) -> Iterator[Split]:
    """Quantising and decoding, block by block: every dim, if the global scale is given and goes along."""
    spec, scale = a[lead], a.get("global_scale")
    if scale is None:
        return  # it is computed from all values
    stacked = len(scale.shape) == 2
    last = len(spec.shape) - 1
    for dim in range(last + 1):
        if dim == last and not _last_splits(a, spec):
            continue
        if stacked and dim == 1 and last == 2 and scale.shape[1] != 1:
            continue
        along: Placement = Shard(0) if stacked and dim == 0 else _REPLICATED
        split = {"x": Shard(dim), "codes": Shard(dim), "scales": Shard(dim), "global_scale": along}
        yield [Shard(dim), Shard(dim), along][:results], split


def _last_splits(a: Mapping[str, Any], spec: Any) -> bool:
    if "scales" in a:
        return _blocks_split(a)
    return spec.shape[-1] % 32 == 0 and _whole_blocks(spec, spec.shape[-1] // 32)  # 32: the larger block


def _never(a: Mapping[str, Any]) -> Iterator[Split]:
    yield from ()


_RULES: dict[str, _Rule] = {
    "quantize": partial(_elementwise, "x", 3),
    "dequantize": partial(_elementwise, "codes", 1),
    "fake_quantize": partial(_elementwise, "x", 1),
    "merge_lora": _merge_lora,
    "moe_route": _never,  # rows and offsets are those of all slots
    "grouped_lora_linear": _linear,
    "grouped_lora_dgrad": _dgrad,
    "grouped_lora_wgrad": _wgrad,
    "glu_grouped_lora_linear": _glu,
    "glu_backward": _glu_backward,
}


def _refuse_experts(op: str, a: Mapping[str, Any]) -> None:
    for name in ("codes", "offsets"):
        if any(placement == Shard(0) for placement in a[name].placements):
            raise ValueError(
                f"{op}: {name} is sharded over experts (dim 0), but offsets are ends among the rows of all experts: "
                "split experts with torch_nvfp4.distributed.parallelize_experts"
            )


def _register(op: str) -> None:
    overload = getattr(torch.ops.nvfp4, op).default
    arguments = overload._schema.arguments
    results = len(overload._schema.returns)

    def shardings(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        positional = [argument.name for argument in arguments[: len(args)]]
        given = {**dict(zip(positional, args, strict=True)), **kwargs}
        if op in _GROUPED:
            _refuse_experts(op, given)
        tensors = {name: hasattr(given[name], "placements") for name in positional}
        by_keyword = [_REPLICATED for value in kwargs.values() if hasattr(value, "placements")]  # input scales
        whole: Split = ([_REPLICATED] * results, {})
        return [
            (list(out), [split.get(name, _REPLICATED) if tensors[name] else None for name in positional] + by_keyword)
            for out, split in (whole, *_RULES[op](given))
        ]

    register_sharding(overload)(shardings)
    # DTensor remembers what fits by the tensors alone, and would apply a rule of one `compute` to another.
    options = [argument.name for argument in arguments if argument.kwarg_only]
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=options, needs_pytree=True)
    propagator.register_op_strategy(overload, propagator.op_strategy_funcs[overload], info)


for _op in SCHEMAS:
    if _op in _RULES:  # moe_lora is made of them
        _register(_op)
