"""Tiny checkpoints in every layout, made from known canonical weights, and files changed by hand."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from torch_nvfp4.checkpoint import CheckpointError, PackedExperts, PackedWeight, open_checkpoint

E, H, I = 3, 64, 32
Draw = Callable[[st.SearchStrategy], Any]
EXAMPLES = settings().max_examples // 4
"""Of each kind of corruption: 12, and 250 under the profile `deep`."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class Made:
    """A checkpoint before it is written: the test may change any of it."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    experts: dict[str, PackedExperts] = field(default_factory=dict)
    linears: dict[str, PackedWeight] = field(default_factory=dict)

    def write(self, folder: Path, shards: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if shards == 1:
            save_file(self.tensors, folder / WEIGHTS)
            return folder
        weight_map = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(self.tensors.items())[shard::shards])
            save_file(part, folder / name)
            weight_map |= dict.fromkeys(part, name)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder


class Random:
    """Random packed weights: every code byte; scales that are no NaN; global scales that are no powers of two."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def bytes(self, *shape: int, high: int = 256) -> Tensor:
        return torch.randint(high, shape, dtype=torch.uint8, generator=self.generator)

    def global_scale(self, *shape: int) -> Tensor:
        return 1 / (torch.rand(shape, generator=self.generator) * 1e5 + 1e4).bfloat16().float()

    def bf16(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16()

    def packed(self, format: str, *shape: int, globals_shape: tuple[int, ...]) -> PackedWeight:
        codes = self.bytes(*shape[:-1], shape[-1] // 2)
        if format == "nvfp4":
            scales = self.bytes(*shape[:-1], shape[-1] // 16, high=127).view(torch.float8_e4m3fn)
            return PackedWeight(codes, scales, self.global_scale(*globals_shape))
        scales = self.bytes(*shape[:-1], shape[-1] // 32, high=255).view(torch.float8_e8m0fnu)
        return PackedWeight(codes, scales, torch.ones(globals_shape))


def interleave(rows: Tensor) -> Tensor:
    """`[gate; up]` along dim 1 -> gate and up alternating."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2).contiguous()


def modelopt(stem: str, packed: PackedWeight) -> dict[str, Tensor]:
    named = {f"{stem}.weight": packed.codes, f"{stem}.weight_scale": packed.scales}
    if packed.scales.dtype == torch.float8_e8m0fnu:
        return named | {f"{stem}.weight_scale": packed.scales.view(torch.uint8)}
    return named | {f"{stem}.weight_scale_2": packed.global_scale.reshape(())}


def compressed(stem: str, packed: PackedWeight) -> dict[str, Tensor]:
    named = {f"{stem}.weight_packed": packed.codes, f"{stem}.weight_scale": packed.scales}
    if packed.scales.dtype == torch.float8_e8m0fnu:
        return named | {f"{stem}.weight_scale": packed.scales.view(torch.uint8)}
    # The multipliers made here are 1 / bf16: this gives back the divisor that they came from.
    return named | {f"{stem}.weight_global_scale": (1 / packed.global_scale).bfloat16().float().reshape(1)}


def numbered(
    path: str, roles: tuple[str, ...], experts: PackedExperts, write: Callable[..., dict]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for e in range(len(experts.down.codes)):
        *halves, down = roles
        for half, role in enumerate(halves):
            codes, scales = (t[e].chunk(len(halves))[half].contiguous() for t in experts.gate_up[:2])
            part = PackedWeight(codes, scales, experts.gate_up.global_scale[e, half].clone())
            tensors |= write(f"{path}.{e}.{role}", part)
        tensors |= write(f"{path}.{e}.{down}", PackedWeight(*(t[e].contiguous() for t in experts.down)))
    return tensors


def columns(path: str, experts: PackedExperts, interleaved: bool) -> dict[str, Tensor]:
    """Fused as ModelOpt exports gpt-oss and Llama 4: packed along dim -2, one global scale for all experts."""
    tensors = {}
    for role, packed in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
        codes, scales = packed.codes, packed.scales.view(torch.uint8)
        if interleaved and role == "gate_up_proj":
            codes, scales = interleave(codes), interleave(scales)
        tensors[f"{path}.{role}"] = codes.transpose(1, 2).contiguous()
        tensors[f"{path}.{role}_weight_scale"] = scales.transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
        tensors[f"{path}.{role}_weight_scale_2"] = packed.global_scale.flatten()[0].clone()
    return tensors


def blocks(path: str, experts: PackedExperts) -> dict[str, Tensor]:
    tensors = {}
    for role, packed in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
        order = interleave if role == "gate_up_proj" else torch.Tensor.contiguous
        tensors[f"{path}.{role}_blocks"] = order(packed.codes).unflatten(-1, (-1, 16))
        tensors[f"{path}.{role}_scales"] = order(packed.scales.view(torch.uint8))
    return tensors


QWEN = ("gate_proj", "up_proj", "down_proj")
LAYOUTS = ("qwen3", "mixtral", "nemotron", "compressed", "gpt_oss", "llama4", "mxfp4", "modelopt_mxfp4", "ct_mxfp4")
NUMBERED = ("qwen3", "mixtral", "nemotron", "compressed", "modelopt_mxfp4", "ct_mxfp4")
NVFP4_LAYOUTS = ("qwen3", "mixtral", "nemotron", "compressed", "gpt_oss", "llama4")
WITH_BIAS = ("gpt_oss", "mxfp4")


def quantiser_of(layout: str) -> str:
    return (
        "compressed-tensors" if layout in ("compressed", "ct_mxfp4") else "mxfp4" if layout == "mxfp4" else "modelopt"
    )


def make(layout: str, seed: int = 0, e: int = E, h: int = H, i: int = I, prefix: str = "model.") -> Made:
    """One layer of experts, one dense packed layer where the layout has any, a norm and a router."""
    random, gated = Random(seed), layout != "nemotron"
    format = "mxfp4" if "mxfp4" in layout else "nvfp4"
    halves = 2 if gated else 1
    gate_up = random.packed(format, e, halves * i, h, globals_shape=(e, halves))
    down = random.packed(format, e, h, i, globals_shape=(e, 1))
    path = prefix + {"mixtral": "layers.0.block_sparse_moe.experts", "nemotron": "layers.0.mixer.experts"}.get(
        layout, "layers.0.mlp.experts"
    )
    tensors: dict[str, Tensor] = {}
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if layout in ("gpt_oss", "llama4"):  # one global scale for all
        gate_up = gate_up._replace(global_scale=gate_up.global_scale[:1, :1].repeat(e, 2))
        down = down._replace(global_scale=down.global_scale[:1].repeat(e, 1))
    if layout in WITH_BIAS:
        biases = random.bf16(e, 2 * i), random.bf16(e, h)
        tensors |= {f"{path}.gate_up_proj_bias": interleave(biases[0]), f"{path}.down_proj_bias": biases[1]}
    write = compressed if quantiser_of(layout) == "compressed-tensors" else modelopt
    dense = random.packed(format, 96, h, globals_shape=(1,))
    stem = f"{prefix}layers.0.self_attn.q_proj"
    if layout != "mxfp4":
        tensors |= write(stem, dense)
    experts = PackedExperts(gate_up, down, *biases)
    if layout in NUMBERED:
        roles = {"mixtral": ("w1", "w3", "w2"), "nemotron": QWEN[1:]}.get(layout, QWEN)
        tensors |= numbered(path, roles, experts, write)
    elif layout == "mxfp4":
        tensors |= blocks(path, experts)
    else:
        tensors |= columns(path, experts, interleaved=layout == "gpt_oss")
    tensors[f"{prefix}norm.weight"] = random.bf16(h)
    tensors[path.removesuffix("experts") + "gate.weight"] = random.bf16(e, h)
    config = {
        "model_type": {"mxfp4": "gpt_oss", "gpt_oss": "gpt_oss", "llama4": "llama4_text"}.get(layout, "some_moe"),
        "num_local_experts": e,
        "quantization_config": {"quant_method": quantiser_of(layout)},
    }
    return Made(tensors, config, {path: experts}, {} if layout == "mxfp4" else {stem: dense})


def digest(folder: Path) -> str:
    """Of the names and bytes of all files of a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path.relative_to(folder)).encode())
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


def split_header(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join_header(header: dict[str, Any] | str | bytes, data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    encoded = text.encode() if isinstance(text, str) else text
    return (len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data


def same_experts(x: PackedExperts, y: PackedExperts) -> bool:
    return all(_same(a, b) for a, b in zip(_flat(x), _flat(y), strict=True))


def _flat(experts: PackedExperts) -> Iterable[Tensor | None]:
    return (*experts.gate_up, *experts.down, experts.gate_up_bias, experts.down_bias)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    as_bytes = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def load_everything(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for path in checkpoint.experts:
        checkpoint.load_experts(path)
    for path in checkpoint.linears:
        checkpoint.load_linear(path)
    for name in (*checkpoint.plain, *checkpoint.fp8):
        checkpoint.load_plain(name)


def check_refused(folder: Path, named: str, at_open: bool) -> None:
    before = digest(folder)
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(folder) if at_open else load_everything(folder)
    text = str(refusal.value)
    assert str(folder) in text and named in text, text
    assert digest(folder) == before


def fresh(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def refusal_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        load_everything(folder)
    return str(refusal.value).replace(str(folder), "DIR")
