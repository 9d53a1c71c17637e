"""The only door to Inductor's internals: what the lowerings use of them, and where torch versions differ.

A name that moves in a new torch is mended here. Importing this imports Inductor.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import config
from torch._inductor.ir import ExternKernel, FixedLayout, IRNode, Pointwise, Reduction, ReinterpretView, TensorBox
from torch._inductor.lowering import empty_strided, fallback_handler, lowerings, register_lowering
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.select_algorithm import (
    AlgorithmSelectorCache,
    ExternKernelChoice,
    SymbolicGridFn,
    TritonTemplate,
    TritonTemplateKernel,
    autotune_select_algorithm,
    extern_kernels,
    realize_inputs,
)
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

__all__ = [
    "Extern",
    "FloorDiv",
    "ModularIndexing",
    "Pointwise",
    "PointerTemplate",
    "SymbolicGridFn",
    "TensorBox",
    "as_bytes",
    "byte_loader",
    "calls_python",
    "contiguous_input",
    "device_of",
    "empty",
    "exact_division",
    "fallback_handler",
    "guard_int",
    "hint",
    "hinted",
    "is_known_to_be",
    "is_symbolic",
    "largest",
    "lowerings",
    "ops",
    "register_lowering",
    "select",
    "tunes",
]

Layout = tuple[torch.device, torch.dtype, Sequence[Any]]
"""Device, dtype and sizes of a contiguous result."""
Loader = Callable[[Sequence[Any]], Any]
"""From an index expression for each dim to the element there."""


def is_known_to_be(size: Any, value: int) -> bool:
    """Whether a size, symbolic or not, equals `value` without adding a guard to find out."""
    return bool(V.graph.sizevars.statically_known_equals(size, value))


def guard_int(size: Any) -> int:
    """The number a size is, guarded on where it is symbolic: the graph then serves this number only."""
    return int(V.graph.sizevars.guard_int(size))


def is_symbolic(size: Any) -> bool:
    return isinstance(size, sympy.Expr) and not size.is_number


def hint(size: Any) -> int:
    """A likely number for a size, to choose by and to allocate with while tuning; it guards nothing."""
    return int(V.graph.sizevars.optimization_hint(size))


@contextlib.contextmanager
def hinted(size: Any, value: int) -> Iterator[None]:
    """While active, sizes that follow from the symbol in `size` are taken to be what they are where it is `value`.

    What a tuning run measures, and the key under which its result is kept, then say nothing of the size at hand.
    """
    symbols = size.free_symbols if is_symbolic(size) else set()
    if len(symbols) != 1:
        yield
        return
    (symbol,) = symbols
    sizevars: Any = V.graph.sizevars
    plain = sizevars.optimization_hint
    scaled = max(2, round(value * plain(symbol) / max(1, plain(size))))

    def of(expression: Any, *args: Any, **kwargs: Any) -> int:
        if isinstance(expression, sympy.Expr):
            expression = expression.subs(symbol, scaled)
        return int(plain(expression, *args, **kwargs))

    sizevars.optimization_hint = of
    try:
        yield
    finally:
        del sizevars.optimization_hint  # the method of the class shows again


def tunes() -> bool:
    """Whether the user asked for choices to be timed."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def device_of(x: TensorBox) -> torch.device:
    device = x.get_device()
    assert device is not None
    return device


def calls_python() -> bool:
    """Whether generated code can call a Python function; that of the C++ wrapper and of AOTInductor cannot."""
    return not V.graph.cpp_wrapper


def empty(sizes: Sequence[Any], dtype: torch.dtype, device: torch.device) -> TensorBox:
    """Memory for a result that a template writes beside its own."""
    return empty_strided(list(sizes), None, dtype=dtype, device=device)


def contiguous_input(x: TensorBox) -> Any:
    """The tensor as a template takes it: in memory and contiguous (copied only where it is not)."""
    return realize_inputs(ExternKernel.require_contiguous(x))


def exact_division(device: torch.device) -> Callable[[Any, Any], Any]:
    """How to divide fp32 there with IEEE 754's rounding; Triton's own `/` is an approximate one."""
    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn
    if device.type == "cpu":
        return ops.truediv
    return lambda a, b: ops.inline_asm_elementwise(  # torch 2.11
        a, b, asm="div.rn.f32 $0, $1, $2;", constraints="=r,r,r", dtype=torch.float32, is_pure=True, pack=1
    )


def largest(
    element: Callable[[Sequence[Any], Sequence[Any]], Any], device: torch.device, sizes: Sequence[Any],
    over: Sequence[Any],
) -> TensorBox:  # fmt: skip
    """fp32 of `sizes`, in memory: the largest of element(index, inner index), inner sizes `over`; NaN wins."""
    result = Reduction.create(
        device=device, dst_dtype=torch.float32, src_dtype=torch.float32, inner_fn=element, ranges=list(sizes),
        reduction_ranges=list(over), reduction_type="max",
    )  # fmt: skip
    result.realize()
    return result


_RETURN_CHOICE = "return_choice" in inspect.signature(AlgorithmSelectorCache.__call__).parameters  # torch 2.11


class _PointerKernel(TritonTemplateKernel):
    """A template's kernel that can name the pointer of its output, for a body that stores by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._register_extra_template_env_fns(self.output_pointer)

    def output_pointer(self) -> str:
        return str(self.args.output(self.output_node.get_name()))


class PointerTemplate(TritonTemplate):
    """A template whose body stores its results itself; nothing is ever fused into it."""

    kernel_type = _PointerKernel

    def append_choice(
        self, choices: list[Any], nodes: Sequence[Any], layout: Layout, *, m: Any, warps: int, stages: int,
        mutated: Sequence[Any], constants: dict[str, Any],
    ) -> None:  # fmt: skip
        error = self.maybe_append_choice(
            choices, input_nodes=tuple(nodes), layout=_layout(layout), num_stages=stages, num_warps=warps,
            mutated_inputs=list(mutated) or None, call_sizes=[m], **constants,
        )  # fmt: skip
        if error is not None:
            raise error


class Extern:
    """A Python function, allocating its result, as a choice beside templates. Made once for each name."""

    def __init__(self, function: Callable[..., torch.Tensor], name: str) -> None:
        if hasattr(extern_kernels, name):
            delattr(extern_kernels, name)  # the module was loaded again
        self._choice = ExternKernelChoice(function, name=name, has_out_variant=False)

    def append_choice(self, choices: list[Any], nodes: Sequence[Any], layout: Layout, options: dict[str, Any]) -> None:
        choices.append(self._choice.bind(list(nodes), _layout(layout), **options))


def _layout(layout: Layout) -> FixedLayout:
    device, dtype, sizes = layout
    return FixedLayout(device, dtype, list(sizes))


def select(
    name: str, choices: list[Any], nodes: Sequence[Any], layout: Layout,
    generators: dict[int, Callable[[Any], torch.Tensor]],
) -> tuple[TensorBox, int]:  # fmt: skip
    """(the result of the fastest choice, its number), found by running them if there are several.

    Where the user wants compilation to be deterministic, the first is taken.
    """
    if config.deterministic:
        choices = choices[:1]
    options: dict[str, Any] = {"input_gen_fns": generators}
    if _RETURN_CHOICE:
        options["return_choice"] = True
    selected = autotune_select_algorithm(name, choices, list(nodes), _layout(layout), **options)
    node, choice = (
        selected if isinstance(selected, tuple) else (selected, choices[0])
    )  # of one choice 2.11 says nothing
    V.graph.no_fuse_buffer_names.add(node.get_name())
    return node, choices.index(choice)


def as_bytes(x: TensorBox) -> TensorBox:
    """The bytes (uint8) of a tensor with a one-byte dtype.

    No kernel then has a float8 argument: Triton refuses e4m3 below sm_89, and the C++ backend does not know
    e8m0. A uint8 tensor viewed as float8 is read as what it is; storage that is float8 itself is viewed as
    uint8 (an alias, nothing is copied) by the code around the kernel.
    """
    viewed = lowerings[torch.ops.aten.view.dtype](x, torch.uint8)
    if not _stored_as(viewed.data, torch.uint8):
        viewed = fallback_handler(torch.ops.aten.view.dtype, add_to_fallback_set=False)(x, torch.uint8)
    return viewed


def byte_loader(x: TensorBox) -> Loader:
    """A loader of the bytes of a tensor with a one-byte dtype, of whatever layout."""
    return as_bytes(x).make_loader()


def _stored_as(node: IRNode, dtype: torch.dtype) -> bool:
    return isinstance(node, ReinterpretView) and node.data.get_dtype() == dtype
