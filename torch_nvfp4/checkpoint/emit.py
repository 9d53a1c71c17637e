"""Packed weights -> the named tensors of a layout: the one place that knows how each layout keeps them.

Bytes move, as in `read`, whose inverse this is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..format import MXFP4
from .entries import PackedExperts, PackedWeight
from .errors import CheckpointError
from .forms import Form
from .layouts import Names
from .scalars import Numbers, check_storable

Named = Iterator[tuple[str, Tensor]]


def weight_entries(
    stem: str, names: Names, codes: Tensor, scales: Tensor, global_scale: Tensor | None,
    input_scale: Tensor | None = None, repeat: int = 1,
) -> Named:  # fmt: skip
    """The parts of a packed weight under their names.

    codes, scales: `[N, C/2]` and `[N, C/B]`; with the experts before, for layouts that keep all in one tensor.
    global_scale, input_scale: 0-d fp32 as they are to be stored (a divisor where `names` say so); None to leave out, as
        for the global scale of MXFP4.
    repeat: blocks that get one scale together; CheckpointError where theirs differ.
    """
    raw = _shared(stem, scales.view(torch.uint8), repeat)
    if names.layout == "columns":
        codes, raw = codes.mT, raw.mT
    elif names.layout == "blocks":
        codes = codes.unflatten(-1, (-1, MXFP4.block_size // 2))
    raw = raw.contiguous()
    yield stem + names.codes, codes.contiguous()
    yield stem + names.scales, raw if scales.dtype == MXFP4.scale_dtype else raw.view(scales.dtype)
    for suffix, value in ((names.global_scale, global_scale), (names.input_scale, input_scale)):
        if value is not None and suffix is not None:
            yield stem + suffix, value.reshape((1,) if names.divisor else ())


def expert_entries(path: str, form: Form, pieces: Iterable[PackedExperts]) -> Named:
    """The tensors of a layer's experts, which come in pieces along E: one by one, or all as one piece.

    Experts that the layout numbers are passed on piece by piece; for those in one tensor all pieces are held.
    CheckpointError for global scales that the layout cannot hold.
    """
    if not form.numbered:
        yield from _fused_entries(path, form, _joined(list(pieces)))
        return
    first = 0
    for piece in pieces:
        count, stored = len(piece.down.codes), stored_scales(form, multipliers_of(piece), first)
        matrices = _matrices(piece)
        for e in range(count):
            for p, (role, (codes, scales, bias)) in enumerate(zip(form.roles, matrices, strict=True)):
                stem = f"{path}.{first + e}.{role}"
                global_scale = None if stored is None else _checked(stem, form.names, stored[e, p])
                input_scale = _input_scale(form, first + e, p)
                yield from weight_entries(stem, form.names, codes[e], scales[e], global_scale, input_scale, form.repeat)
                if bias is not None:
                    yield f"{stem}.bias", bias[e].contiguous()
        first += count


def linear_entries(path: str, form: Form, weight: PackedWeight) -> Named:
    """The tensors of a packed dense layer; its bias is not among them."""
    if not form.numbered:
        raise CheckpointError(f"{path}: layout {form.names.convention} has no packed dense layers")
    stored = stored_scales(form, multipliers_of(weight))
    global_scale = None if stored is None else _checked(path, form.names, stored[0, 0])
    input_scale = _input_scale(form, 0, 0)
    yield from weight_entries(path, form.names, weight.codes, weight.scales, global_scale, input_scale, form.repeat)


class DenseExperts(NamedTuple):
    """`PackedExperts` as dense weights: gate_up `[E, 2I, H]` (`[E, I, H]` if not gated), down `[E, H, I]`, biases."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class Stacked:
    """How a dense model keeps all experts in one tensor: `[E, N, C]`, or `[E, C, N]`, rows of gate and up in turns."""

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    transposed: bool = False
    interleaved: bool = False


def dense_expert_entries(path: str, roles: tuple[str, ...], pieces: Iterable[DenseExperts]) -> Named:
    """The tensors of a layer's dense experts one by one; roles: the names of gate, up and down (up and down)."""
    first, halves = 0, len(roles) - 1
    for piece in pieces:
        biases = (None,) * halves if piece.gate_up_bias is None else piece.gate_up_bias.chunk(halves, dim=1)
        matrices = [*zip(piece.gate_up.chunk(halves, dim=1), biases, strict=True), (piece.down, piece.down_bias)]
        for e in range(len(piece.down)):
            for role, (weight, bias) in zip(roles, matrices, strict=True):
                yield f"{path}.{first + e}.{role}.weight", weight[e].contiguous()
                if bias is not None:
                    yield f"{path}.{first + e}.{role}.bias", bias[e].contiguous()
        first += len(piece.down)


def stacked_expert_entries(path: str, form: Stacked, pieces: Iterable[DenseExperts]) -> Named:
    """The tensors of a layer's dense experts, all in one; all pieces are held."""
    whole = _joined_dense(list(pieces))
    for role, weight, bias in (
        (form.gate_up, whole.gate_up, whole.gate_up_bias), (form.down, whole.down, whole.down_bias)
    ):  # fmt: skip
        order = _alternate if form.interleaved and role == form.gate_up else torch.Tensor.contiguous
        yield f"{path}.{role}", (order(weight).mT if form.transposed else order(weight)).contiguous()
        if bias is not None:
            yield f"{path}.{role}_bias", order(bias).contiguous()


def _joined_dense(pieces: list[DenseExperts]) -> DenseExperts:
    parts = [
        None if None in each else torch.cat([t for t in each if t is not None]) for each in zip(*pieces, strict=True)
    ]
    gate_up, down, *biases = parts
    assert gate_up is not None and down is not None
    return DenseExperts(gate_up, down, *biases)


def _matrices(experts: PackedExperts) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Codes, scales and bias of gate, up and down (up and down if not gated), each `[E, ...]`."""
    (codes, scales, global_scale), bias = experts.gate_up, experts.gate_up_bias
    halves = global_scale.shape[1]
    biases = (None,) * halves if bias is None else bias.chunk(halves, dim=1)
    raw = scales.view(torch.uint8).chunk(halves, dim=1)
    split = zip(codes.chunk(halves, dim=1), (half.view(scales.dtype) for half in raw), biases, strict=True)
    return [*split, (experts.down.codes, experts.down.scales, experts.down_bias)]


def _fused_entries(path: str, form: Form, experts: PackedExperts) -> Named:
    stored = stored_scales(form, multipliers_of(experts))
    columns = {"gate_up_proj": slice(0, 2), "down_proj": slice(2, 3)}
    weights = {"gate_up_proj": experts.gate_up, "down_proj": experts.down}
    biases = {"gate_up_proj": experts.gate_up_bias, "down_proj": experts.down_bias}
    for role, (codes, scales, _) in weights.items():
        stem, bias = f"{path}.{role}", biases[role]
        if role == "gate_up_proj" and form.interleaved:
            codes, scales = _alternate(codes), _alternate(scales.view(torch.uint8)).view(scales.dtype)
            bias = None if bias is None else _alternate(bias)
        global_scale = None if stored is None else _checked(stem, form.names, _one(stem, stored[:, columns[role]]))
        input_scale = None if form.input_scales is None else _one(stem, form.input_scales.stored[:, columns[role]])
        if input_scale is not None and bool(input_scale.isnan()):
            input_scale = None
        yield from weight_entries(stem, form.names, codes, scales, global_scale, input_scale, form.repeat)
        if bias is not None:
            yield f"{stem}_bias", bias.contiguous()


def _shared(stem: str, scales: Tensor, repeat: int) -> Tensor:
    """One of each `repeat` scales in a row."""
    if repeat == 1:
        return scales
    groups = scales.unflatten(-1, (-1, repeat))
    if bool((groups != groups[..., :1]).any()):
        raise CheckpointError(f"tensor {stem!r}: the layout has one scale for {repeat} blocks, and theirs differ")
    return groups[..., 0]


def _alternate(rows: Tensor) -> Tensor:
    """`[E, [gate; up], ...]` -> gate 0, up 0, gate 1, ..."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _one(stem: str, values: Tensor) -> Tensor:
    """The number that all experts have; CheckpointError if they differ."""
    distinct = values.unique().numel() if not bool(values.isnan().all()) else 1
    if distinct > 1:
        raise CheckpointError(
            f"tensor {stem!r}: this layout has one global scale for all experts, and the experts have {distinct}"
        )
    return values.flatten()[0]


def _joined(pieces: list[PackedExperts]) -> PackedExperts:
    if len(pieces) == 1:
        return pieces[0]
    gate_up, down = (
        PackedWeight(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scales.view(torch.uint8) for weight in weights]).view(weights[0].scales.dtype),
            torch.cat([weight.global_scale for weight in weights]),
        )
        for weights in ([piece.gate_up for piece in pieces], [piece.down for piece in pieces])
    )
    biases = [
        None if None in each else torch.cat([bias for bias in each if bias is not None])
        for each in ([piece.gate_up_bias for piece in pieces], [piece.down_bias for piece in pieces])
    ]
    return PackedExperts(gate_up, down, *biases)


def multipliers_of(weights: PackedExperts | PackedWeight) -> Tensor | None:
    """The global scales `[E, P]` as a form has them (of one matrix `[1, 1]`), on the CPU; None for MXFP4."""
    last = weights if isinstance(weights, PackedWeight) else weights.down
    if last.scales.dtype == MXFP4.scale_dtype:
        return None
    if isinstance(weights, PackedWeight):
        return weights.global_scale.detach().cpu().reshape(1, 1)
    return torch.cat([weights.gate_up.global_scale, weights.down.global_scale], dim=1).detach().cpu()


def stored_scales(form: Form, multipliers: Tensor | None, first: int = 0) -> Tensor | None:
    """What to store for the multipliers of some experts: what the form has for them, where that stands for the same."""
    if multipliers is None:
        return None
    fresh = Numbers.read(multipliers, False).turned(form.names.divisor).stored
    if form.global_scales is None:
        return fresh
    here = slice(first, first + len(multipliers))
    return torch.where(form.global_scales.meant[here] == multipliers, form.global_scales.stored[here], fresh)


def _checked(stem: str, names: Names, value: Tensor) -> Tensor:
    check_storable(f"{stem}{names.global_scale}", value, names.divisor)
    return value


def _input_scale(form: Form, e: int, p: int) -> Tensor | None:
    value = None if form.input_scales is None else form.input_scales.stored[e, p]
    return None if value is None or bool(value.isnan()) else value
