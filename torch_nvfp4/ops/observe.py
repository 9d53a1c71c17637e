"""Who watches the ops and their launches: nobody, which costs a comparison, or one observer for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Observer(Protocol):
    def op(self, name: str, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An op's kernel for a device is called: call it and return what it returns."""

    def launch(self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """A Triton kernel is launched, in an op or outside of all."""

    def reason(self, why: str) -> None:
        """Why the kernel that every card has is launched next, and none of the card's own."""


current: Observer | None = None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` see what this process runs. Backward runs on threads of its own, so this is for all of them."""
    global current
    if current is not None:
        raise RuntimeError("something observes the nvfp4 ops already; one observer at a time")
    current = observer
    try:
        yield
    finally:
        current = None


def watched(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, seen by the observer if there is one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if current is None:
            return kernel(*args, **kwargs)
        return current.op(op, kernel, args, kwargs)

    return run
