"""Compile every kernel that a layer will need, before the first step needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..ops import observe
from .keys import Key, LayerSizes, key
from .watch import Launch, Watch


def warm(sizes: LayerSizes, tokens: Sequence[int], say: Callable[[str], None], *, compile: bool = True) -> set[Key]:
    """Run the layer forward and backward for each token count on the current card, eager and compiled.

    Compiled with a symbolic T, so that one graph serves all counts. Says each kernel variant as it is compiled, and
    returns all of them. A count for which memory does not suffice is said and left out.
    """
    experts = sizes.experts("cuda")
    seen: set[Key] = set()
    fitting = []
    for t in tokens:
        launches = launches_of(experts, sizes, t)
        if launches is None:
            say(f"T = {t}: left out, as the card's memory does not suffice")
            continue
        fitting.append(t)
        new = {key(launch) for launch in launches} - seen
        seen |= new
        for kernel, constants in sorted(new):
            say(f"T = {t}: {kernel} {_short(constants)}".rstrip())
    if compile:
        started = time.perf_counter()
        step = torch.compile(experts, fullgraph=True, dynamic=True)
        for t in fitting:
            if t > 1:  # 0 and 1 are numbers of their own to a compiler
                launches_of(step, sizes, t)
        say(f"compiled graph, forward and backward: {time.perf_counter() - started:.1f} s")
    torch.cuda.synchronize()
    say(f"{len(seen)} kernel variants")
    return seen


def launches_of(layer: Callable[..., torch.Tensor], sizes: LayerSizes, tokens: int) -> list[Launch] | None:
    """What one forward and backward launch; None where memory does not suffice."""
    watch = Watch()
    try:
        with observe.observing(watch):
            x, ids, weights = sizes.inputs(tokens, "cuda")
            out = layer(x, ids, weights)
            out.backward(torch.ones_like(out))
    except torch.OutOfMemoryError:
        return None
    return [launch for run in watch.runs for launch in run.launches] + watch.loose


def _short(constants: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"{name}={value}" for name, value in constants if name.isupper() or name.startswith("num_"))
