"""Sees what runs: nvfp4 ops with their sizes and launches (an observer), and plain torch (a dispatch mode)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ops import flops

_TILES = (
    "TOKENS", "OUTPUTS", "BYTES", "DEPTH", "STAGES", "ROWS", "COLUMNS", "NARROW", "WIDE", "SPLITS", "BLOCK",
    "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages",
)  # fmt: skip


def tile_sizes(constants: Mapping[str, str]) -> str:
    """Those of a kernel's constants that are tile sizes, for people."""
    return " ".join(f"{name}={constants[name]}" for name in _TILES if name in constants)


_STACKED = ("codes", "scales", "global_scale", "lora_a", "lora_b", "bias")


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel by the library.

    constants: the values and dtypes that a variant is compiled for.
    integers: of each other integer what Triton specialises on too: "1", a multiple of "16", or neither.
    """

    kernel: str
    module: str
    constants: tuple[tuple[str, str], ...]
    integers: tuple[tuple[str, str], ...]
    nbytes: int = field(compare=False)

    @property
    def config(self) -> str:
        return tile_sizes(dict(self.constants))

    @property
    def decodes_to_scratch(self) -> bool:
        return self.module.endswith("kernels.scratch")

    @property
    def is_block_scaled(self) -> bool:
        return self.module.endswith("kernels.block_scaled")

    @classmethod
    def of(cls, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Launch:
        given = dict(zip(kernel.arg_names, args, strict=False)) | dict(options)
        parameters = {p.name: p for p in getattr(kernel, "params", ())}
        constants, integers = {}, {}
        for name, value in given.items():
            parameter = parameters.get(name)
            if isinstance(value, Tensor):
                constants[name] = str(value.dtype)
            elif isinstance(getattr(value, "base", None), Tensor):  # a TMA descriptor
                constants[name] = f"{value.base.dtype} {value.block_shape}"
            elif parameter is None or parameter.is_constexpr or not isinstance(value, int):
                constants[name] = type(value).__name__ if isinstance(value, float) else str(value)
            elif not parameter.do_not_specialize:
                integers[name] = "1" if value == 1 else "16" if value % 16 == 0 else ""
        return cls(
            kernel.fn.__name__, kernel.fn.__module__, tuple(sorted(constants.items())), tuple(sorted(integers.items())),
            nbytes(given.values()),
        )  # fmt: skip


@dataclass
class OpRun:
    """One call of an op's kernel."""

    op: str
    device: str
    flops: int
    nbytes: int
    launches: list[Launch] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def nbytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


class Watch:
    """An observer that keeps what it sees."""

    def __init__(self) -> None:
        self.runs: list[OpRun] = []
        self.loose: list[Launch] = []
        self._open: list[OpRun] = []

    def op(self, name: str, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        schema = getattr(torch.ops.nvfp4, name).default._schema
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
        device = next(value.device.type for value in named.values() if isinstance(value, Tensor))
        run = OpRun(name, device, flops.of_call(name, args, kwargs), _bytes_read(named))
        self.runs.append(run)
        self._open.append(run)
        try:
            result = kernel(*args, **kwargs)
        finally:
            self._open.pop()
        run.nbytes += nbytes(tree_leaves(result))
        return result

    def launch(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        (self._open[-1].launches if self._open else self.loose).append(Launch.of(kernel, args, options))

    def reason(self, why: str) -> None:
        if self._open:  # else it is asked while code is generated, which then says itself what it is
            self._open[-1].reasons.append(why)


def _bytes_read(named: Mapping[str, Any]) -> int:
    """Every argument once; of what is stacked by expert no more than M of the E experts, as M rows choose."""
    total = nbytes(named.values())
    offsets = named.get("offsets")
    if offsets is None:
        return total
    rows = next(value for value in (named.get("rows"), *named.values()) if isinstance(value, Tensor))
    unread = max(0.0, 1 - rows.shape[0] / offsets.shape[0])
    return round(total - unread * nbytes(named.get(name) for name in _STACKED))


@dataclass
class PlainOp:
    """A plain torch operator: how often it ran, and the bytes of its arguments and results."""

    calls: int = 0
    nbytes: int = 0


class PlainOps(TorchDispatchMode):
    """Counts operators that are not the library's; views move nothing and are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, PlainOp] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "nvfp4" and not func.is_view and func is not torch.ops.aten.detach.default:
            seen = self.ops.setdefault(str(func).removesuffix(".default"), PlainOp())
            seen.calls += 1
            seen.nbytes += nbytes(tree_leaves((args, kwargs, result)))
        return result
