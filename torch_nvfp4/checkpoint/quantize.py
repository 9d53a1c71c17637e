"""A dense model's folder -> the same model with packed experts, in the layout of ModelOpt or of compressed-tensors.

Tensor by tensor: at most a shard and one weight are in memory. What is no expert's weight comes out byte for byte.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..format import NVFP4, Format, get_format, quantize
from .declare import Declaration, hf_quant_config, plain_matrices, quantization_config
from .emit import weight_entries
from .errors import CheckpointError
from .files import Reader, TensorInfo
from .folder import read_json, read_tensors
from .layouts import COMPRESSED, FLOATS, FUSED, MODELOPT, Names, is_quantised
from .stacks import INTERLEAVED, model_types
from .write import SHARD_BYTES, FolderWriter

LAYOUTS = {"modelopt": MODELOPT, "compressed-tensors": COMPRESSED}
_EXPERT = re.compile(r"(?P<path>(?:.*\.)?experts)\.(?P<e>\d+)\.(?P<role>gate_proj|up_proj|down_proj|w[123])\.weight")
_SIBLINGS = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_SIBLING = re.compile(rf"\.({'|'.join(_SIBLINGS)})\.weight$")
_FUSED_EXPERTS = re.compile(r"(?:.*\.)?experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Quantised:
    """What `quantize_folder` did: how many weights it packed, and the bytes of those before and after."""

    weights: int
    dense_bytes: int
    packed_bytes: int


def quantize_folder(
    source: Path, out: Path, *, format: str = "nvfp4", layout: str = "modelopt", share_gate_up: bool = True,
    shard_bytes: int = SHARD_BYTES, progress: Callable[[str], None] | None = None,
) -> Quantised:  # fmt: skip
    """Write the model of folder `source` to `out` with its experts packed.

    share_gate_up: an expert's gate and up get one global scale, as ModelOpt writes it and serving engines that fuse the
    two expect; without, each has its own, which is a little more precise and read here as it is. (Experts that are
    stored as one tensor have one for all.)
    format: "nvfp4" or "mxfp4". layout: "modelopt" or "compressed-tensors".
    CheckpointError, before anything is written, for a folder without dense experts, one that is quantised already, and
    experts that cannot be packed; for NaN or infinity in a weight nothing is left behind.
    """
    fmt, names = get_format(format), LAYOUTS[layout]
    tensors, config = read_tensors(source), read_json(source, "config.json")
    experts = _plan(source, tensors, config, fmt, names)
    done = Quantised(len(experts), 0, 0)
    amaxes: dict[str, Tensor] = {}
    with FolderWriter(out, shard_bytes) as writer, Reader() as reader:
        for name, info in tensors.items():
            tensor = reader.read(info)
            if name not in experts:
                writer.add(name, tensor)
                continue
            if progress is not None:
                progress(name)
            if fmt is NVFP4:
                amaxes[name] = _amax(tensor)
                beside = _SIBLING.sub(lambda m: f".{_SIBLINGS[m[1]]}.weight", name) if share_gate_up else name
                if beside in experts:
                    if beside not in amaxes:
                        amaxes[beside] = _amax(reader.read(tensors[beside]))
                    amaxes[name] = torch.maximum(amaxes[name], amaxes[beside])
            packed = dict(_pack(tensor, info, amaxes.get(name), fmt, experts[name]))
            for key, part in packed.items():
                writer.add(key, part)
            done = Quantised(
                done.weights, done.dense_bytes + info.end - info.begin,
                done.packed_bytes + sum(part.numel() * part.element_size() for part in packed.values()),
            )  # fmt: skip
        ignore = plain_matrices((name, len(info.shape)) for name, info in tensors.items() if name not in experts)
        quantization = quantization_config(Declaration(layout, fmt, ignore))
        writer.finish(
            {"config.json": {**config, "quantization_config": quantization},
             "hf_quant_config.json": hf_quant_config(quantization, fmt.block_size)},
            source,
        )  # fmt: skip
    return done


def _plan(
    source: Path, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], fmt: Format, names: Names
) -> dict[str, Names]:
    """Name of each expert weight -> the names of its parts; CheckpointError for what cannot be packed."""
    for info in tensors.values():
        if is_quantised(info):
            raise CheckpointError(f"{info.file.path}: tensor {info} is quantised already")
    found: dict[str, Names] = {}
    roles: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, info in tensors.items():
        if match := _EXPERT.fullmatch(name):
            roles[match["path"]][int(match["e"])].add(match["role"])
            found[name] = names
            _check_packable(info, 2, info.shape[-1], fmt)
        elif _FUSED_EXPERTS.fullmatch(name):
            _check_fused(info, config, fmt, names)
            found[name] = FUSED
    for path, experts in roles.items():
        whole = set().union(*experts.values())
        for e in range(max(experts) + 1):
            if experts.get(e) != whole:
                lacking = ", ".join(sorted(whole - experts.get(e, set())))
                raise CheckpointError(f"{source}: {path}.{e} lacks {lacking}, which other experts have")
    if not found:
        raise CheckpointError(f"{source}: holds no dense experts (tensors such as ….experts.0.down_proj.weight)")
    return found


def _check_packable(info: TensorInfo, dims: int, c: int, fmt: Format) -> None:
    if info.dtype not in FLOATS or len(info.shape) != dims:
        raise CheckpointError(f"{info.file.path}: tensor {info} must be {' or '.join(FLOATS)} with {dims} dims")
    if c % fmt.block_size or not c:
        raise CheckpointError(
            f"{info.file.path}: tensor {info}: {c} columns are no multiple of B = {fmt.block_size} ({fmt.name})"
        )


def _check_fused(info: TensorInfo, config: Mapping[str, Any], fmt: Format, names: Names) -> None:
    if not any(kind in INTERLEAVED for kind in model_types(config)):
        raise CheckpointError(
            f"{info.file.path}: tensor {info} holds all experts; that layout is known only for {', '.join(INTERLEAVED)}"
        )
    if names is not MODELOPT or fmt is not NVFP4:
        raise CheckpointError(f"{info.file.path}: tensor {info} holds all experts, which only ModelOpt's NVFP4 has")
    _check_packable(info, 3, info.shape[1] if len(info.shape) == 3 else 0, fmt)


def _amax(weight: Tensor) -> Tensor:
    return weight.abs().amax().to(torch.float32)


def _pack(
    weight: Tensor, info: TensorInfo, amax: Tensor | None, fmt: Format, names: Names
) -> Iterator[tuple[str, Tensor]]:
    """The named parts of a packed weight; MXFP4 has no `amax`."""
    stem = info.name if names is FUSED else info.name.removesuffix(".weight")
    x = weight.mT.contiguous() if names is FUSED else weight
    used, stored = (None, None) if amax is None else _global_scale(amax, names.divisor)
    try:
        codes, scales, _ = quantize(x, used, fmt.name)
    except ValueError as error:
        raise CheckpointError(f"{info.file.path}: tensor {info}: {error}") from error
    yield from weight_entries(stem, names, codes, scales, stored)


def _global_scale(amax: Tensor, divisor: bool) -> tuple[Tensor, Tensor]:
    """The multiplier to quantise with, and what is stored for it: itself, or the divisor whose reciprocal it is."""
    most = torch.tensor(2688.0)
    stored = most / amax if divisor else amax / most
    stored = torch.where(stored.isfinite() & (stored > 0), stored, 1.0)
    return (1 / stored if divisor else stored), stored
