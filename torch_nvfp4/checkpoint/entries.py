"""What a checkpoint holds, in the words of the canonical layout."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class PackedWeight(NamedTuple):
    """A packed weight: value = e2m1(code) * scale * global_scale.

    codes: uint8 `[..., N, C/2]`, the even column in the low nibble.
    scales: `[..., N, C/B]`, float8_e4m3fn (NVFP4, B = 16) or float8_e8m0fnu (MXFP4, B = 32).
    global_scale: fp32 multiplier; `[E, S]` for experts (S = 2 for gate and up, else 1), `[1]` for one matrix; ones
        for MXFP4.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor


class PackedExperts(NamedTuple):
    """gate_up `[E, 2I, H]` with rows `[gate; up]` (`[E, I, H]` if not gated) and down `[E, H, I]`, both packed along
    their last dim; biases `[E, N]` as stored."""

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class ExpertsEntry:
    """The packed experts of one layer. `tensors` names everything in the files that belongs to them."""

    path: str
    format: str
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    has_bias: bool
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class LinearEntry:
    """A packed dense layer. Its bias, if any, is a plain tensor."""

    path: str
    format: str
    out_features: int
    in_features: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Fp8Entry:
    """An FP8 weight; `weight` is the name that `Checkpoint.load_plain` decodes to bf16."""

    path: str
    weight: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
