"""From packed weights to the experts of a layer: which weight is whose gate, up and down."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .entries import ExpertsEntry
from .errors import CheckpointError
from .files import TensorInfo
from .layouts import FLOATS, Packed, check_tensor

_PER_EXPERT = re.compile(r"((?:.*\.)?experts)\.([0-9]+)\.(.+)", re.DOTALL)
_UNDER_EXPERTS = re.compile(r"((?:.*\.)?experts)\.(.+)", re.DOTALL)
_ROLES = {
    frozenset(("gate_proj", "up_proj", "down_proj")): ("gate_proj", "up_proj", "down_proj"),
    frozenset(("w1", "w3", "w2")): ("w1", "w3", "w2"),
    frozenset(("up_proj", "down_proj")): ("up_proj", "down_proj"),
}
"""The names of an expert's projections -> the same in order: gate, up, down."""

INTERLEAVED = {"gpt_oss": True, "llama4": False, "llama4_text": False}
"""model_type of models that keep all experts in one tensor -> whether its gate and up rows alternate.

Nothing in the tensors tells, so others are refused.
"""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Projection:
    """gate_up or down of all experts: `weights[e]` and `biases[e]` joined along N are the rows of expert e.

    A weight that holds all experts stands at each e.
    """

    weights: tuple[tuple[Packed, ...], ...]
    biases: tuple[tuple[TensorInfo, ...], ...] | None
    interleaved: bool = False


@dataclass(frozen=True)
class Stack:
    entry: ExpertsEntry
    gate_up: Projection
    down: Projection


def find_stacks(packed: Mapping[str, Packed], rest: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> list[Stack]:
    """The expert stacks among these weights; what they take is in their entries' `tensors`."""
    numbered: dict[str, dict[int, dict[str, Packed]]] = defaultdict(lambda: defaultdict(dict))
    fused: dict[str, dict[str, Packed]] = defaultdict(dict)
    for stem, weight in packed.items():
        if weight.experts is not None:
            path, _, role = stem.rpartition(".")
            fused[path][role] = weight
        elif match := _PER_EXPERT.fullmatch(stem):
            path, number, role = match.groups()
            if len(number) > 6 or number != str(int(number)):
                raise CheckpointError(f"{weight.codes.file.path}: tensor {weight.codes}: {number} is no expert's index")
            numbered[path][int(number)][role] = weight
    unpacked = _unpacked_parts(rest)
    for path in fused:
        if path in numbered:
            raise CheckpointError(f"{path}: holds its experts twice, fused and one by one")
    stacks = [_numbered_stack(path, experts, unpacked.get(path, {})) for path, experts in numbered.items()]
    stacks += [_fused_stack(path, roles, unpacked.get(path, {}), config) for path, roles in fused.items()]
    for stack in stacks:
        _check_count(stack, config)
    return stacks


def _unpacked_parts(rest: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Stack path -> what else lies under it, by the name after the path."""
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in rest.items():
        if match := _UNDER_EXPERTS.fullmatch(name):
            parts[match[1]][match[2]] = info
    return parts


def _check_expected(path: str, unpacked: Mapping[str, TensorInfo], expected: Collection[str], some: TensorInfo) -> None:
    for name, info in unpacked.items():
        if name not in expected:
            raise CheckpointError(
                f"{info.file.path}: tensor {info} is not packed, others of {path} are ({some}): mixed formats in one "
                "stack of experts"
            )


def _numbered_stack(path: str, experts: Mapping[int, dict[str, Packed]], unpacked: dict[str, TensorInfo]) -> Stack:
    some = next(iter(next(iter(experts.values())).values())).codes
    count = len(experts)
    for e in range(count):
        if e not in experts:
            raise CheckpointError(f"{some.file.path}: {path}: expert {e} is missing, {max(experts)} is there")
    roles = _ROLES.get(frozenset(experts[0]))
    if roles is None:
        raise CheckpointError(
            f"{some.file.path}: {path}.0 has the packed projections {sorted(experts[0])}; expected gate_proj, up_proj "
            "and down_proj, or w1, w3 and w2, or up_proj and down_proj"
        )
    for e in range(count):
        if set(experts[e]) != set(roles):
            differing = sorted(set(roles).symmetric_difference(experts[e]))
            raise CheckpointError(
                f"{some.file.path}: {path}.{e}: {', '.join(differing)} is packed in some experts and not in others"
            )
    biases = _numbered_biases(path, count, roles, unpacked, some)
    first = [experts[0][role] for role in roles]
    for e in range(count):
        for role, model in zip(roles, first, strict=True):
            _check_like(experts[e][role], model)
    halves = roles[:-1]
    for half in first[1:-1]:
        if (half.rows, half.columns) != (first[0].rows, first[0].columns):
            raise CheckpointError(
                f"{half.codes.file.path}: tensor {half.codes} must have the shape of {first[0].codes}"
            )
    gate_up = Projection(tuple(tuple(experts[e][role] for role in halves) for e in range(count)), biases and biases[0])
    down = Projection(tuple((experts[e][roles[-1]],) for e in range(count)), biases and biases[1])
    return _stack(path, gate_up, down, count, first[0].rows, gated=len(halves) == 2)


def _numbered_biases(
    path: str, count: int, roles: tuple[str, ...], unpacked: dict[str, TensorInfo], some: TensorInfo
) -> tuple[tuple[tuple[TensorInfo, ...], ...], tuple[tuple[TensorInfo, ...], ...]] | None:
    """The biases of gate_up and of down by expert; CheckpointError where some lack one, or something else is left."""
    if not unpacked:
        return None
    expected = {f"{e}.{role}.bias" for e in range(count) for role in roles}
    _check_expected(path, unpacked, expected, some)
    for name in sorted(expected):
        if name not in unpacked:
            raise CheckpointError(f"{some.file.path}: {path}: some biases are there, {path}.{name} is missing")
    gate_up = tuple(tuple(unpacked[f"{e}.{role}.bias"] for role in roles[:-1]) for e in range(count))
    return gate_up, tuple((unpacked[f"{e}.{roles[-1]}.bias"],) for e in range(count))


def _fused_stack(
    path: str, roles: Mapping[str, Packed], unpacked: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> Stack:
    some = next(iter(roles.values())).codes
    for role in ("gate_up_proj", "down_proj"):
        if role not in roles:
            raise CheckpointError(
                f"{some.file.path}: tensor {some} is packed, {path}.{role} is not: mixed formats in one stack"
            )
    gate_up, down = roles["gate_up_proj"], roles["down_proj"]
    count = gate_up.experts
    assert count is not None
    if down.experts != count:
        raise CheckpointError(f"{down.codes.file.path}: tensor {down.codes} must hold {count} experts, as {some} does")
    if gate_up.rows % 2:
        raise CheckpointError(f"{some.file.path}: tensor {gate_up.codes} must have an even N: gate and up")
    interleaved = _is_interleaved(gate_up, config)
    names = ("gate_up_proj_bias", "down_proj_bias")
    _check_expected(path, unpacked, names, some)
    biases = [unpacked.get(name) for name in names]
    if biases.count(None) == 1:
        raise CheckpointError(f"{some.file.path}: {path}: one of gate_up_proj_bias and down_proj_bias is missing")
    projections = [
        Projection(((weight,),) * count, ((bias,),) * count if bias is not None else None, split)
        for weight, bias, split in ((gate_up, biases[0], interleaved), (down, biases[1], False))
    ]
    return _stack(path, projections[0], projections[1], count, gate_up.rows // 2, gated=True)


def model_types(config: Mapping[str, Any]) -> list[Any]:
    """model_type of the language model first: a multimodal config keeps it in `text_config`."""
    text = config.get("text_config")
    return ([text.get("model_type")] if isinstance(text, Mapping) else []) + [config.get("model_type")]


def _is_interleaved(weight: Packed, config: Mapping[str, Any]) -> bool:
    for model_type in model_types(config):
        if isinstance(model_type, str) and model_type in INTERLEAVED:
            interleaved = INTERLEAVED[model_type]
            if weight.names.layout == "blocks" and not interleaved:
                break
            return interleaved
    raise CheckpointError(
        f"{weight.codes.file.path}: tensor {weight.codes}: whether gate and up rows alternate is not known for "
        f"model_type {model_types(config)[-1]!r}; known: {', '.join(INTERLEAVED)}"
    )


def _check_like(weight: Packed, model: Packed) -> None:
    """CheckpointError unless an expert's weight is of the same kind and shape as that of expert 0."""
    same = (weight.format, weight.names, weight.rows, weight.columns) == (
        model.format,
        model.names,
        model.rows,
        model.columns,
    )
    if not same:
        raise CheckpointError(
            f"{weight.codes.file.path}: tensor {weight.codes} ({weight.names.convention} {weight.format.name}) must be "
            f"like {model.codes} ({model.names.convention} {model.format.name})"
        )


def _stack(path: str, gate_up: Projection, down: Projection, count: int, intermediate: int, gated: bool) -> Stack:
    up, out = gate_up.weights[0][0], down.weights[0][0]
    if (up.format, up.names) != (out.format, out.names):
        raise CheckpointError(f"{out.codes.file.path}: tensor {out.codes} is {out.format.name}, {up.codes} is not")
    if (out.rows, out.columns) != (up.columns, intermediate):
        raise CheckpointError(
            f"{out.codes.file.path}: tensor {out.codes} must be the packed form of [H, I] = "
            f"[{up.columns}, {intermediate}], as {up.codes} tells"
        )
    weights = [weight for projection in (gate_up, down) for each in projection.weights for weight in each]
    names = dict.fromkeys(info.name for weight in weights for info in weight.parts)
    for projection in (gate_up, down):
        names.update(dict.fromkeys(bias.name for bias in _check_biases(projection)))
    entry = ExpertsEntry(
        path=path,
        format=up.format.name,
        num_experts=count,
        hidden=up.columns,
        intermediate=intermediate,
        gated=gated,
        has_bias=gate_up.biases is not None,
        tensors=tuple(names),
    )
    return Stack(entry, gate_up, down)


def _check_biases(projection: Projection) -> list[TensorInfo]:
    biases = []
    for weights, infos in zip(projection.weights, projection.biases or (), strict=projection.biases is not None):
        for weight, bias in zip(weights, infos, strict=True):
            check_tensor(bias, FLOATS, (weight.rows,) if weight.experts is None else (weight.experts, weight.rows))
            if bias.dtype != (projection.biases or ())[0][0].dtype:
                raise CheckpointError(f"{bias.file.path}: tensor {bias} must have the dtype of the other biases")
            biases.append(bias)
    return biases


def _check_count(stack: Stack, config: Mapping[str, Any]) -> None:
    """A stack may lack its last experts without a gap; only the config can tell."""
    text = config.get("text_config")
    for source in (text, config) if isinstance(text, Mapping) else (config,):
        for key in _EXPERT_COUNTS:
            stated = source.get(key)
            if type(stated) is int and stated != stack.entry.num_experts:
                some = stack.gate_up.weights[0][0].codes
                raise CheckpointError(
                    f"{some.file.path}: {stack.entry.path} has {stack.entry.num_experts} experts, "
                    f"config.json states {key} = {stated}"
                )
