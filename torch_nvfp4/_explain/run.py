"""`explain`: run a function, watch it, and say which path each op took and what that cost."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..ops import observe
from . import card as cards
from .report import Explanation
from .sort import observed_ops, plain_ops
from .watch import PlainOps, Watch


def explain(fn: Callable[..., Any], *inputs: Any, card: cards.Card | None = None, **kwargs: Any) -> Explanation:
    """Run `fn(*inputs, **kwargs)` and report which path each nvfp4 op took, its launches, bytes and FLOPs.

    The function runs a few times: to compile and warm up, to be watched, and to be timed (on a GPU). A backward runs
    too where its outputs require a gradient, with ones; no `.grad` is touched, and inputs are detached first.

    Args:
        fn: a module or function, compiled by `torch.compile` or not. Compiled code is found where `fn` itself is what
            `torch.compile` returned, or where it is compiled during this call.
        card: the card's rates; measured where it is None and `fn` runs on a GPU.

    Returns an `Explanation`; `print` it.

    Raises TypeError for what cannot be called, RuntimeError inside of tracing, of a CUDA graph's capture or of another
    `explain`, and ValueError where no nvfp4 op ran.
    """
    _refuse(fn)
    session = _Session(fn, inputs, kwargs)
    first, sources = session.watched()
    compiled = bool(sources) or _is_compiled(fn)
    if not first.runs and not first.loose and not any("nvfp4." in s for s in sources) and not compiled:
        raise ValueError(f"no nvfp4 op ran in {_name(fn)}: explain needs one, on tensors with data (not meta or fake)")
    sizes, plain = session.eager(compiled)
    if not sizes.runs:
        raise ValueError(f"no nvfp4 op ran in {_name(fn)}")
    on_gpu = any(run.device == "cuda" for run in sizes.runs)
    watch, measured = first, None
    kernels: dict[str, int] = {}
    notes = []
    if on_gpu or sources:  # the first run compiled and tuned, and launched what later ones do not
        watch, kernels = session.profiled() if on_gpu else (session.watched()[0], kernels)
    generated = [launch for source in sources for launch in _generated().launches(source)]
    if on_gpu:
        card = card or cards.measure(torch.cuda.current_device())
        measured = cards.median_ms(session.run, 3)
        if not kernels:
            notes.append("the profiler saw no kernels; launches are the library's own and those in generated source")
    kernels = kernels or dict(Counter([x.kernel for x in _all_launches(watch)] + [g.kernel for g in generated]))
    if compiled and not sources:
        notes.append("it was compiled before, so its generated code was not seen: call torch.compiler.reset() first")
    ops = observed_ops(watch, sizes, generated, compiled) + plain_ops(watch, plain, compiled)
    return Explanation(
        device=torch.cuda.get_device_name() if on_gpu else "CPU", compiled=compiled, backward=session.has_backward,
        layers=max(1, sum(run.op == "moe_route" for run in sizes.runs)), ops=tuple(ops), kernels=kernels, card=card,
        measured_ms=measured, notes=tuple(notes),
    )  # fmt: skip


def _refuse(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"explain needs a module or function, got {type(fn).__name__}")
    doing = None
    if torch.compiler.is_compiling():
        doing = "while torch.compile traces"
    elif torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        doing = "under a dispatch mode or a functorch transform"
    elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        doing = "while a CUDA graph is captured"
    elif observe.current is not None:
        doing = "while something else observes the ops"
    if doing:
        raise RuntimeError(f"explain runs its function several times, which cannot be done {doing}")


@dataclass
class _Session:
    """The function with its inputs, run in several ways."""

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_backward: bool = False
    grads: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Forward, and backward to every leaf that the outputs depend on."""
        inputs, kwargs = tree_map(_detached, (self.inputs, self.kwargs))
        outputs = tree_leaves(self.fn(*inputs, **kwargs))
        outputs = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        leaves = list(_leaves(outputs))
        self.has_backward = bool(leaves)
        if leaves:
            if [t.shape for t in self.grads] != [out.shape for out in outputs]:
                self.grads = [torch.ones_like(out) for out in outputs]  # once, as it is not the function's own launch
            torch.autograd.grad(outputs, leaves, self.grads, allow_unused=True)

    def watched(self) -> tuple[Watch, list[str]]:
        """What ran, and the source of what was compiled for it."""
        watch = Watch()
        # Without Dynamo nothing was compiled, and Inductor is slow to import.
        maybe: AbstractContextManager[list[str]] = nullcontext([])
        if "torch._dynamo" in sys.modules:
            maybe = _generated().generated_sources()
        with maybe as sources, observe.observing(watch):
            self.run()
        return watch, sources

    def eager(self, compiled: bool) -> tuple[Watch, PlainOps]:
        """The ops of the function as written, with their sizes; plain torch too on a CPU.

        On a GPU no mode: under one, the library's kernels for parts of a layer that are not ops give way to torch.
        """
        watch, plain = Watch(), PlainOps()
        stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        on_cpu = not compiled and not any(t.is_cuda for t in self._tensors())
        with stance, observe.observing(watch), plain if on_cpu else nullcontext():
            self.run()
        return watch, plain

    def profiled(self) -> tuple[Watch, dict[str, int]]:
        """What ran, and every kernel that the card ran for it."""
        watch = Watch()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler, observe.observing(watch):
            self.run()
            torch.cuda.synchronize()
        on_card = (
            event.name for event in profiler.events()
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        )  # fmt: skip
        return watch, dict(Counter(on_card).most_common())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (x for x in tree_leaves((self.inputs, self.kwargs)) if isinstance(x, Tensor))
        if isinstance(self.fn, nn.Module):
            yield from self.fn.parameters()


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _leaves(outputs: list[Tensor]) -> Iterator[Tensor]:
    """Every leaf of the graph behind the outputs."""
    todo = [out.grad_fn for out in outputs if out.grad_fn is not None]
    yield from (out for out in outputs if out.grad_fn is None)
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def _is_compiled(fn: Any) -> bool:
    modules = fn.modules() if isinstance(fn, nn.Module) else [fn]
    return any(
        hasattr(part, "_torchdynamo_orig_callable") or hasattr(part, "_orig_mod")
        or getattr(part, "_compiled_call_impl", None) is not None
        for part in modules
    )  # fmt: skip


def _generated() -> Any:
    return importlib.import_module("torch_nvfp4.lowering.generated")


def _all_launches(watch: Watch) -> Iterator[Any]:
    for run in watch.runs:
        yield from run.launches
    yield from watch.loose


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)
