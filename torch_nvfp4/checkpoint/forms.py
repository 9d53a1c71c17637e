"""How packed weights stand in a checkpoint, apart from codes and block scales: names, order of rows, and the numbers
that a file keeps for a whole weight. A form is had from a checkpoint or made up for a model, and turned into that of
another layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .errors import CheckpointError
from .files import Reader, TensorInfo
from .layouts import COMPRESSED, FUSED, GPT_OSS, MODELOPT, Names, Packed
from .scalars import Numbers
from .stacks import INTERLEAVED, Stack, model_types

LAYOUTS = ("modelopt", "compressed-tensors", "mxfp4")
_GATED, _UNGATED = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


@dataclass(frozen=True)
class Form:
    """The form of a layer's experts, or of one packed matrix (E = P = 1, no roles).

    names: of a weight's parts; they tell the layout. roles: an expert's projections, gate, up and down or up and down
        (P of them); for experts in one tensor they only count.
    interleaved: rows of gate and up alternate.
    global_scales: `[E, P]`; None for MXFP4, and for weights that no file had.
    input_scales: `[E, P]`, those of the activations, NaN where the file has none; None where it has none at all.
    repeat: blocks that share a scale in the file, 1 or 2.
    takes_8_bits: the input scales are those of 8-bit activations.
    """

    names: Names
    roles: tuple[str, ...] = ()
    interleaved: bool = False
    global_scales: Numbers | None = None
    input_scales: Numbers | None = None
    repeat: int = 1
    takes_8_bits: bool = False

    @property
    def numbered(self) -> bool:
        return self.names.layout == "rows"

    def stems(self, path: str, count: int) -> list[str]:
        """What the weights are called, without the endings of their parts; `count` is E."""
        if not self.roles:
            return [path]
        if not self.numbered:
            return [f"{path}.gate_up_proj", f"{path}.down_proj"]
        return [f"{path}.{e}.{role}" for e in range(count) for role in self.roles]

    def under(self, names: Names) -> "Form":
        """The same under other names."""
        global_scales, input_scales = (
            numbers and numbers.turned(names.divisor) for numbers in (self.global_scales, self.input_scales)
        )
        return replace(self, names=names, global_scales=global_scales, input_scales=input_scales)

    @property
    def inexact(self) -> int:
        """How many of its numbers will be read as another multiplier than they stand for."""
        return sum(numbers.inexact for numbers in (self.global_scales, self.input_scales) if numbers is not None)


def numbered_form(roles: tuple[str, ...]) -> Form:
    """Of experts that no file has yet, or (no roles) of a matrix: numbered, as compressed-tensors has all models.

    roles: what gate, up and down are called in the files of the dense model.
    """
    return Form(COMPRESSED, roles)


def default_roles(gated: bool) -> tuple[str, ...]:
    """The names that most models have."""
    return _GATED if gated else _UNGATED


def form_of_experts(reader: Reader, stack: Stack) -> Form:
    gate_up, down = stack.gate_up, stack.down
    halves = 2 if stack.entry.gated else 1
    weights = [
        (*(first if len(first) == halves else first * halves), last)
        for first, (last,) in zip(gate_up.weights, down.weights, strict=True)
    ]
    numbered = weights[0][0].experts is None
    roles = tuple(weight.stem.rpartition(".")[2] for weight in weights[0]) if numbered else _GATED
    first = weights[0][0]
    return Form(first.names, roles, gate_up.interleaved, *_numbers(reader, weights), repeat=first.repeat)


def form_of_linear(reader: Reader, weight: Packed) -> Form:
    return Form(weight.names, (), False, *_numbers(reader, [(weight,)]), repeat=weight.repeat)


def _numbers(reader: Reader, weights: list[tuple[Packed, ...]]) -> tuple[Numbers | None, Numbers | None]:
    divisor = weights[0][0].names.divisor
    global_scales = torch.tensor([[_number(reader, weight.global_scale) for weight in each] for each in weights])
    input_scales = torch.tensor([[_number(reader, weight.input_scale) for weight in each] for each in weights])
    found = (None if bool(t.isnan().all()) else Numbers.read(t, divisor) for t in (global_scales, input_scales))
    return next(found), next(found)


def _number(reader: Reader, info: TensorInfo | None) -> float:
    return float("nan") if info is None else reader.number(info)


def retarget(path: str, form: Form, layout: str, format: str, config: Mapping[str, Any]) -> Form:
    """The form that `layout` has for weights of `format`, "nvfp4" or "mxfp4"; the given one where it is of that layout.

    config: the model's; it tells whose experts ModelOpt keeps in one tensor. CheckpointError for a layout that does not
    have such weights, or that is read only.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"{path}: layout {layout!r} cannot be written; known: {', '.join(LAYOUTS)}")
    if form.names.convention == layout:
        return form
    form = replace(form, repeat=1)
    if form.takes_8_bits:  # what is written declares static scales as those of 4-bit activations
        form = replace(form, input_scales=None, takes_8_bits=False)
    kinds = [kind for kind in model_types(config) if isinstance(kind, str) and kind in INTERLEAVED]
    interleaved = INTERLEAVED[kinds[0]] if kinds else None
    if layout == "mxfp4":
        if format != "mxfp4" or not interleaved or not form.roles:
            raise CheckpointError(f"{path}: layout mxfp4 is that of gpt-oss's MXFP4 experts; these weights are not")
        return replace(form.under(GPT_OSS), roles=_GATED, interleaved=True)
    if layout == "modelopt" and format == "nvfp4" and interleaved is not None and form.roles:
        return replace(form.under(FUSED), roles=_GATED, interleaved=interleaved)
    return replace(form.under(COMPRESSED if layout == "compressed-tensors" else MODELOPT), interleaved=False)
