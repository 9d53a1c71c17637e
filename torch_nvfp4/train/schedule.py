"""The learning rate as a function of the step alone, so that there is no scheduler state to restore."""

from __future__ import annotations

import math


def learning_rate(step: int, peak: float, warmup: int, steps: int) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine down to 0 at `steps`.

    Args:
        step: optimiser steps done before this one, 0 … steps − 1. The first step already has a rate above 0.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
