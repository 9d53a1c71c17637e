"""FLOP formulas for `torch.utils.flop_counter`: two per multiply-add of the products, as if every slot were routed.

That module imports triton, which importing this library must not do. So the formulas are registered when somebody
imports the counter, which is before any counter can be made.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_OPS = torch.ops.nvfp4
_COUNTER = "torch.utils.flop_counter"


def _projection_flops(m: int, codes: Any, lora_a: Any) -> int:
    _, n, c_half = codes
    c = 2 * c_half
    r = 0 if lora_a is None else lora_a[1]
    return 2 * m * (n * c + r * (n + c))


def _linear(x: Any, rows: Any, offsets: Any, codes: Any, scales: Any, global_scale: Any,
            lora_a: Any = None, *args: Any, **kwargs: Any) -> int:  # fmt: skip
    return _projection_flops(x[0] if rows is None else rows[0], codes, lora_a)


def _dgrad(gy: Any, rows: Any, offsets: Any, codes: Any, scales: Any, global_scale: Any, lora_a: Any = None,
           lora_b: Any = None, v: Any = None, *, need_gx: bool = True, **kwargs: Any) -> int:  # fmt: skip
    m = gy[0] if rows is None else rows[0]
    known = 0 if v is None else _shrink_flops(m, lora_b)
    return (_projection_flops(m, codes, lora_a) if need_gx else _shrink_flops(m, lora_b)) - known


def _shrink_flops(m: int, lora_b: Any) -> int:
    return 0 if lora_b is None else 2 * m * lora_b[1] * lora_b[2]


def _wgrad(p: Any, p_rows: Any, q: Any, q_rows: Any, offsets: Any, **kwargs: Any) -> int:
    m = p[0] if p_rows is None else p_rows[0]
    return 2 * m * p[1] * q[1]


def _glu_linear(pre: Any, topk_weights: Any, rows: Any, offsets: Any, codes: Any, scales: Any, global_scale: Any,
                lora_a: Any = None, *args: Any, **kwargs: Any) -> int:  # fmt: skip
    return _projection_flops(pre[0], codes, lora_a)


def _glu_backward(pre: Any, topk_weights: Any, gh: Any, rows: Any, offsets: Any, gy: Any = None, gy_rows: Any = None,
                  bias: Any = None, lora_b: Any = None, **kwargs: Any) -> int:  # fmt: skip
    return _shrink_flops(pre[0], lora_b)


_FORMULAS: dict[Any, Callable[..., int]] = {
    _OPS.grouped_lora_linear: _linear,
    _OPS.grouped_lora_dgrad: _dgrad,
    _OPS.grouped_lora_wgrad: _wgrad,
    _OPS.glu_grouped_lora_linear: _glu_linear,
    _OPS.glu_backward: _glu_backward,
}


def of_call(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """FLOPs of one call of an op, from its arguments as they are; 0 for an op without products."""
    formula = next((f for packet, f in _FORMULAS.items() if packet.__name__ == op), None)

    def shape(value: Any) -> Any:
        return value.shape if isinstance(value, torch.Tensor) else value

    if formula is None:
        return 0
    return formula(*map(shape, args), **{name: shape(value) for name, value in kwargs.items()})


def _add_to(counter: ModuleType) -> None:
    for op, formula in _FORMULAS.items():
        counter.register_flop_formula(op)(formula)


class _AddOnImport(MetaPathFinder, Loader):
    """Finds the counter's module once, for its own loader, and adds the formulas after it has run."""

    _loader: Loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _add_to(module)


def register() -> None:
    """Register the formulas now if the counter is imported already, else when it is."""
    if _COUNTER in sys.modules:
        _add_to(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _AddOnImport())
