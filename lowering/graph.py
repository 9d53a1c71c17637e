"""What the grouped ops work on, as Inductor's graph has it: packed weights, and rows as the experts see them."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from . import configs, multiply
from .compat import TensorBox, as_bytes, device_of, guard_int, hint, hinted
from .kernels.decode import NVFP4_UNIT
from .launch import power_of_two
from .multiply import Path


def expert_sizes(e: int) -> dict[str, int]:
    return {"E": e, "E_POW2": power_of_two(e, 16)}


@dataclass(frozen=True)
class Weight:
    """A packed weight in the graph; its sizes are numbers, guarded on where the weight is a dynamic input."""

    codes: TensorBox
    scales: TensorBox
    global_scale: TensorBox
    e: int
    n: int
    c: int
    block: int
    halves: int

    @classmethod
    def of(cls, codes: TensorBox, scales: TensorBox, global_scale: TensorBox) -> "Weight":
        e, n, half_c = map(guard_int, codes.get_size())
        block = 2 * half_c // guard_int(scales.get_size()[2])
        return cls(
            codes, as_bytes(scales), global_scale, e, n, 2 * half_c, block, guard_int(global_scale.get_size()[1])
        )

    @property
    def tensors(self) -> dict[str, TensorBox]:
        return {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale}

    @property
    def constants(self) -> dict[str, Any]:
        unit = NVFP4_UNIT if self.block == 16 else 1.0
        return dict(N=self.n, C=self.c, B=self.block, S=self.halves, UNIT=unit, **expert_sizes(self.e))

    def packed_asm(self, dtype: torch.dtype, has_tma: bool) -> bool:
        weight: Any = SimpleNamespace(block=self.block)
        return multiply.packed_asm(weight, dtype, has_tma)

    def path(self, x: TensorBox, m: Any, *, transposed: bool = False) -> Path:
        """Which way eager takes for about as many rows, asked with stand-ins for the tensors that it looks at."""
        weight: Any = SimpleNamespace(
            sizes=(self.e, self.n, self.c), block=self.block, codes=SimpleNamespace(data_ptr=lambda: 0),
            scales=SimpleNamespace(data_ptr=lambda: 0),
            global_scale=SimpleNamespace(shape=(self.e, self.halves)),
        )  # fmt: skip
        rows: Any = SimpleNamespace(dtype=x.get_dtype(), is_cuda=True, device=device_of(x))
        return multiply.choose_path(rows, hint(m), weight, transposed=transposed)


@dataclass(frozen=True)
class Routed:
    """Rows of a tensor as the experts see them: row m of expert e is row `slots[m] // top_k`, or m without slots."""

    tensor: TensorBox
    slots: TensorBox | None
    offsets: TensorBox
    e: int
    top_k: int = 1

    @property
    def m(self) -> Any:
        return (self.tensor if self.slots is None else self.slots).get_size()[0]

    @property
    def width(self) -> int:
        return guard_int(self.tensor.get_size()[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.get_dtype()

    @property
    def device(self) -> torch.device:
        return device_of(self.tensor)

    @property
    def limits(self) -> tuple[int, bool]:
        """(shared memory a program may use, whether the card has a copy engine)."""
        return configs.device_limits(self.device.index)

    @property
    def per_expert(self) -> int:
        return configs.rows_per_expert(hint(self.m), self.e)


def timing_inputs(m: Any, e: int) -> dict[str, Callable[[Any], torch.Tensor]]:
    """Equally many rows for each expert, and every slot once."""
    return {
        "offsets": lambda node: (torch.arange(1, e + 1, device=node.get_device()) * hint(m) // e).int(),
        "slots": lambda node: torch.randperm(hint(m), device=node.get_device()).int(),
    }


def times(x: Routed) -> Any:
    """While choices are timed: sizes are taken to be those of the class that M / E falls in."""
    return hinted(x.m, x.e * configs.representative_rows(x.per_expert))
