"""What generated code calls where a choice is not a template: products by the eager launchers.

Inductor passes tensors by position; `given` names them as the kernels do.
"""

from torch import Tensor

from . import multiply
from .rows import Rows
from .weight import Weight


def linear(*tensors: Tensor, given: str, path: str) -> Tensor:
    """y from rows in the column order that this path reads."""
    t: dict[str, Tensor] = dict(zip(given.split(), tensors, strict=True))
    x, weight = t["x"], Weight.of(t["codes"], t["scales"], t["global_scale"])
    u = t["u"] if "u" in t else x.new_empty(x.shape[0], 0)
    return multiply.linear(
        Rows(x), t["offsets"], weight, t.get("lora_b"), u, t.get("bias"), t.get("slots"), t.get("slot_weights"),
        multiply.Path[path],
    )  # fmt: skip


def dgrad(*tensors: Tensor, given: str) -> Tensor:
    """gx from gathered rows."""
    t: dict[str, Tensor] = dict(zip(given.split(), tensors, strict=True))
    gy, weight = t["gy"], Weight.of(t["codes"], t["scales"], t["global_scale"])
    v = t["v"] if "v" in t else gy.new_empty(gy.shape[0], 0)
    return multiply.dgrad(gy, t["offsets"], weight, t.get("lora_a"), v)
