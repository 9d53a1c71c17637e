"""What an experts module of transformers says of itself: flags and activation, or those of a class without flags."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_LLAMA4 = "transformers.models.llama4.modeling_llama4"


@dataclass(frozen=True)
class ExpertsInterface:
    """The flags of transformers' experts interface, and what is computed between the two products.

    activation: pre-activations `[S, 2I]` (as the module's weights order them; `[S, I]` without a gate) -> `[S, I]`.
    code: its name, for messages.
    on_input: the router's weight multiplies the experts' input instead of their output.
    """

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    has_post_expert_norm: bool
    activation: Callable[[Tensor], Tensor]
    code: str
    on_input: bool = False


def interface_of(parent: nn.Module, experts: nn.Module) -> ExpertsInterface | None:
    """The interface of an experts module that `parent` runs; None for one that does not tell."""
    stated: Any = experts
    if is_llama4(parent, experts):
        return ExpertsInterface(
            has_gate=True, has_bias=False, is_transposed=True, is_concatenated=True, has_post_expert_norm=False,
            activation=lambda rows: _gated(stated.act_fn, rows), code=type(experts).__qualname__, on_input=True,
        )  # fmt: skip
    if not all(hasattr(experts, flag) for flag in FLAGS):
        return None
    gated = bool(stated.has_gate)
    return ExpertsInterface(
        has_gate=gated,
        has_bias=bool(stated.has_bias),
        is_transposed=bool(stated.is_transposed),
        is_concatenated=bool(stated.is_concatenated),
        has_post_expert_norm=bool(getattr(experts, "has_post_expert_norm", False)),  # new after 5.17
        activation=stated._apply_gate if gated else stated.act_fn,
        code=type(stated)._apply_gate.__qualname__ if gated else "act_fn",
    )


def is_llama4(parent: nn.Module, experts: nn.Module) -> bool:
    """Exactly transformers' own classes, whose code is known; a subclass may compute something else."""
    stock = sys.modules.get(_LLAMA4)  # a model of these classes has loaded it
    return stock is not None and type(parent) is stock.Llama4TextMoe and type(experts) is stock.Llama4TextExperts


def _gated(act_fn: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return up * act_fn(gate)
