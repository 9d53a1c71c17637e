"""A packed weight as the kernels take it."""

from typing import Any, NamedTuple

from torch import Tensor

from .kernels.decode import NVFP4_UNIT
from .launch import as_bytes, power_of_two


class Weight(NamedTuple):
    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    block: int

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, global_scale: Tensor) -> "Weight":
        block = codes.shape[2] * 2 // scales.shape[2]
        return cls(codes.contiguous(), as_bytes(scales), global_scale.contiguous(), block)

    @property
    def sizes(self) -> tuple[int, int, int]:
        e, n, half_c = self.codes.shape
        return e, n, half_c * 2

    @property
    def constants(self) -> dict[str, Any]:
        e, _, c = self.sizes
        unit = NVFP4_UNIT if self.block == 16 else 1.0
        return dict(E=e, E_POW2=power_of_two(e, 16), C=c, B=self.block, S=self.global_scale.shape[1], UNIT=unit)
