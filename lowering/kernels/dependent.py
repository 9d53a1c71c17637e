"""Programmatic dependent launch (PDL): a kernel is launched while the one before it still ends.

A kernel that takes part has a constexpr PDL and begins with `wait_for_previous`; `launch.py` sets it and launches so on
cards from Hopper on. Elsewhere, in the interpreter and in Inductor's templates it is not set.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until all kernels before have ended: nothing that they write is read before, and nothing that they read written.

    Every program calls this, also one that has nothing to do, so that the end of a kernel is the end of all before it.
    """
    if PDL:
        gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    """Let the programs of the next kernel come, to wait on processors that have room for them; after the wait.

    That pays where a kernel leaves most of the card idle. Else those that wait are in the way (docs/performance.md).
    """
    if PDL:
        gdc_launch_dependents()
