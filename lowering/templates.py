"""Inductor templates made of the Triton kernels that eager launches: `launch` is the eager launcher's twin in a graph.

A template's text is one call of the kernel's body. Everything that is no tensor is a constexpr of the generated
kernel, but M, which is a size of a tensor: one generated kernel serves every number of tokens.

Nothing is fused into a template. A kernel visits routed rows only, and writes them itself: an epilogue fused with it
(say the `where` that clears the rows of no expert) would never run on the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from . import cache_tag
from .compat import Extern, FloorDiv, PointerTemplate, SymbolicGridFn, TensorBox, contiguous_input, is_symbolic, select

TRITON_NAMES = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
OUTPUT = "the output"  # the value that stands for a template's own output among a launch's tensors


@dataclass(frozen=True)
class Grid:
    """Programs: (M // rows + extra) · columns, along axis 0, and fixed numbers along the other two."""

    rows: int = 1
    extra: int = 0
    columns: int = 1
    y: int = 1
    z: int = 1
    per_row: bool = True

    @property
    def constants(self) -> dict[str, int]:
        return {f"GRID_{name.upper()}": int(value) for name, value in vars(self).items()}


@SymbolicGridFn
def grid(m: Any, meta: Mapping[str, Any]) -> tuple[Any, int, int]:
    """The sizes of a `Grid` that came as `constants`, for M rows."""
    tiles = FloorDiv(m, meta["GRID_ROWS"]) if is_symbolic(m) else m // meta["GRID_ROWS"]
    along_x = (tiles * meta["GRID_PER_ROW"] + meta["GRID_EXTRA"]) * meta["GRID_COLUMNS"]
    return along_x, meta["GRID_Y"], meta["GRID_Z"]


@dataclass(frozen=True)
class Variant:
    """One way to run a kernel: tile sizes and the like, the grid that follows, warps and stages."""

    constants: Mapping[str, Any]
    grid: Grid
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Rival:
    """A Python function that does what the template does, on the same tensors: a choice for autotuning."""

    extern: Extern
    options: Mapping[str, Any] = field(default_factory=dict)


@cache
def _template(kernel: Any, given: tuple[str, ...], output: str, constants: tuple[str, ...]) -> Any:
    """The template that calls `kernel` with these tensors; an argument that is in none of the lists is None."""
    module, name = kernel.fn.__module__, kernel.fn.__name__
    arguments = []
    for argument in kernel.arg_names:
        value = "None"
        if argument == output:
            value = "{{output_pointer()}}"
        elif argument == "M":
            value = '{{size("slots", 0)}}'
        elif argument in given or argument in constants:
            value = argument
        arguments.append(f"{argument}={value}")
    source = (
        f"from {module} import {name} as body  # {cache_tag()}\n"
        f"{{{{def_kernel({', '.join(repr(g) for g in given)})}}}}\n"
        f"    body({', '.join(arguments)})\n"
    )
    return PointerTemplate(name=f"nvfp4_{name}_{_template.cache_info().misses}", grid=grid, source=source)


@dataclass(frozen=True)
class Launch:
    """One launch, with all ways to do it.

    `tensors` are the kernel's arguments by name, None for one that is not there, OUTPUT for the one whose tensor is
    the result; those in `written` are further results. `generators` make inputs to time on, where random ones would
    lead out of bounds.
    """

    kernel: Any
    tensors: Mapping[str, Any]
    constants: Mapping[str, Any]
    m: Any
    sizes: Sequence[Any]
    dtype: torch.dtype
    written: Sequence[str] = ()
    generators: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def run(self, *ways: Variant | Rival) -> TensorBox:
        """The result, by the fastest of these ways; a single one is taken untimed."""
        return self._select(ways)[0]

    def fastest(self, *ways: Variant | Rival) -> Variant | Rival:
        """The fastest of these ways. (What it made is used by nobody, so no code is generated for it.)"""
        return ways[self._select(ways)[1]]

    def _select(self, ways: Sequence[Variant | Rival]) -> tuple[TensorBox, int]:
        (output,) = (name for name, tensor in self.tensors.items() if tensor is OUTPUT)
        given = tuple(name for name, tensor in self.tensors.items() if tensor is not None and tensor is not OUTPUT)
        nodes = [contiguous_input(self.tensors[name]) for name in given]
        layout = nodes[0].get_device(), self.dtype, self.sizes
        mutated = [nodes[given.index(name)] for name in self.written]
        choices: list[Any] = []
        for way in ways:
            if isinstance(way, Rival):
                way.extern.append_choice(choices, nodes, layout, {"given": " ".join(given), **way.options})
                continue
            values = {**self.constants, **way.constants}
            literals = {name: _literal(value) for name, value in values.items()}
            _template(self.kernel, given, output, tuple(literals)).append_choice(
                choices, nodes, layout, m=self.m, warps=way.warps, stages=way.stages, mutated=mutated,
                constants=literals | way.grid.constants,
            )  # fmt: skip
        gens = {given.index(name): make for name, make in self.generators.items() if name in given}
        return select(f"nvfp4_{self.kernel.fn.__name__}", choices, nodes, layout, gens)


def _literal(value: Any) -> Any:
    """The value as source text: what a template's constants become."""
    if isinstance(value, torch.dtype):
        return TRITON_NAMES[value]
    return repr(value) if isinstance(value, str) else value
