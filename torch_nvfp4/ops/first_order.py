"""Autograd Functions of first order: every way to a second derivative is refused in words, none gives a silent 0.

Ways there are many: autograd.grad through create_graph, a backward towards some inputs alone, functorch's levels one in
the other or over plain autograd, forward mode over reverse. A gradient refuses as a `Refusal`, whose place in the graph
is that of all which the gradient depends on, at each level; so nothing is refused that nobody asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

_FRONT = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
_FIRST_ORDER_ONLY = "has a first derivative only, but a gradient through its gradient was asked for"


class SingleLevelFunction(_SingleLevelFunction):
    """An autograd Function of one level: functorch's layering is over when an op's Autograd kernel runs."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[misc]
        allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
        torch._C._functorch.set_single_level_autograd_function_allowed(True)
        try:
            return super().apply(*args)  # type: ignore[misc]
        finally:
            torch._C._functorch.set_single_level_autograd_function_allowed(allowed)

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        return (ctx._autograd_function_id,)  # as torch.autograd.Function has it, for compiled autograd


class Refusal(torch.autograd.Function):
    """x as it is, hung on the sources so that any derivative towards one of them is an error: only using it fails.

    Unlike the ops' Functions it goes through functorch's levels by itself, and so refuses at each of them.
    """

    @classmethod
    def apply(cls, message: str, x: Tensor, *sources: Tensor | None) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            # An op's Autograd kernel runs below the front of functorch's levels, and they are entered there.
            excluded = torch._C._dispatch_tls_local_exclude_set().remove(_FRONT)
            with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
                return super().apply(message, x, *sources)
        # What super() does, less a reading of the signature that takes longer than all the rest.
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers((message, x, *sources)))  # type: ignore[misc]

    @staticmethod
    def forward(message: str, x: Tensor, *sources: Tensor | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int | None]:
        return Refusal.apply(*args), in_dims[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(ctx.message)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NotImplementedError(ctx.message)


class FirstOrderFunction(SingleLevelFunction):
    """A Function whose gradients refuse to be differentiated again, in words; its backward ends with `grads`.

    They depend on the incoming gradient, on what was saved, and on inputs that were not: those whose place an
    intermediate has taken. The forward names these to `hide`, which keeps an empty tensor that hangs on them.
    """

    @staticmethod
    def hide(ctx: Any, op: str, x: Tensor) -> None:
        with torch.enable_grad():
            ctx.hidden = Refusal.apply(f"nvfp4::{op} {_FIRST_ORDER_ONLY}", torch.empty(0), x)

    @staticmethod
    def grads(
        ctx: Any, op: str, compute: Callable[[], Sequence[Tensor | None]], gy: Tensor, saved: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return tuple(compute())
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
            grads = compute()
        message, hidden = f"nvfp4::{op} {_FIRST_ORDER_ONLY}", getattr(ctx, "hidden", None)
        return tuple(None if g is None else Refusal.apply(message, g, gy, *saved, hidden) for g in grads)


def wants_grad(op: str, tensors: Sequence[Tensor | None]) -> bool:
    """Whether any of them asks for a gradient in reverse mode; forward mode is refused in words."""
    given = [t for t in tensors if t is not None]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in given):
        raise NotImplementedError(f"nvfp4::{op} has no forward-mode derivative; use reverse mode")
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


@contextmanager
def next_level() -> Iterator[None]:
    """Below autograd, in a Function's forward: functorch's further levels record there as they did before it."""
    further = torch._C._are_functorch_transforms_active()
    with (
        torch.set_grad_enabled(further),
        forward_ad._set_fwd_grad_enabled(further),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield
