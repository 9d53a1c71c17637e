"""200 corrupted exports: real ones of several layouts, each broken in one of eleven named ways, refused in words."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import INDEX, WEIGHTS, digest, join_header, load_everything, split_header
from golden_models import CHECKPOINTS, GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_nvfp4.checkpoint import CheckpointError

COUNT = 200
Corrupt = Callable[[Path, random.Random], str]
"""Breaks the checkpoint in a folder, and returns the name that the refusal must mention."""

_CODES = re.compile(r".*(\.weight_packed|_proj\.weight|\.w[123]\.weight|experts\.\w+_proj)")
_SCALES = re.compile(r".*weight_scale")
_GLOBALS = re.compile(r".*(weight_scale_2|weight_global_scale)")


def _edit(folder: Path, change: Callable[[dict[str, Tensor]], str]) -> str:
    tensors = load_file(folder / WEIGHTS)
    named = change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return named


def _pick(tensors: dict[str, Tensor], pattern: re.Pattern[str], choose: random.Random) -> str:
    return choose.choice([n for n, t in tensors.items() if pattern.fullmatch(n) and t.dtype != torch.bfloat16])


def truncated_file(folder: Path, choose: random.Random) -> str:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: choose.randrange(len(raw))])
    return WEIGHTS


def header_length(folder: Path, choose: random.Random) -> str:
    raw = (folder / WEIGHTS).read_bytes()
    true = int.from_bytes(raw[:8], "little")
    wrong = choose.choice([0, 1, true - 1, true + 1, true + 8, len(raw), 2**31, 2**63, 2**64 - 1])
    (folder / WEIGHTS).write_bytes(wrong.to_bytes(8, "little") + raw[8:])
    return WEIGHTS


def wrong_dtype(folder: Path, choose: random.Random) -> str:
    """In the header alone, of the same size; and of the tensor, too."""
    header, data = split_header((folder / WEIGHTS).read_bytes())
    kinds = {"U8": ["I8", "F8_E5M2", "BOOL"], "F8_E4M3": ["F8_E5M2", "F8_E8M0", "I8"], "F32": ["I32", "U32"]}
    name = choose.choice([n for n, f in header.items() if _is_packed(n) and f["dtype"] in kinds])
    header[name]["dtype"] = choose.choice(kinds[header[name]["dtype"]])
    (folder / WEIGHTS).write_bytes(join_header(header, data))
    return WEIGHTS


def wrong_shape(folder: Path, choose: random.Random) -> str:
    header, data = split_header((folder / WEIGHTS).read_bytes())
    name = choose.choice([n for n, f in header.items() if _is_packed(n) and len(f["shape"]) > 1])
    *rest, n, c = header[name]["shape"]
    others = [[*rest, c, n], [*rest, n * c], [*rest, n // 2, c * 2], [*rest, n * 2, c // 2], [1, *rest, n, c]]
    size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    fitting = [s for s in others if s != header[name]["shape"] and torch.Size(s).numel() == size]
    header[name]["shape"] = choose.choice(fitting)
    (folder / WEIGHTS).write_bytes(join_header(header, data))
    return WEIGHTS


def _is_packed(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_CODES, _SCALES, _GLOBALS))


def missing_companion(folder: Path, choose: random.Random) -> str:
    def change(tensors: dict[str, Tensor]) -> str:
        del tensors[_pick(tensors, choose.choice([_CODES, _SCALES, _GLOBALS]), choose)]
        return WEIGHTS

    return _edit(folder, change)


def nan_scale_byte(folder: Path, choose: random.Random) -> str:
    def change(tensors: dict[str, Tensor]) -> str:
        name = _pick(tensors, _SCALES, choose)
        scales = tensors[name].view(torch.uint8).flatten()
        scales[choose.randrange(len(scales))] = choose.choice([0x7F, 0xFF])
        return name

    return _edit(folder, change)


def global_scale_the_wrong_way_round(folder: Path, choose: random.Random) -> str:
    def change(tensors: dict[str, Tensor]) -> str:
        name = _pick(tensors, _GLOBALS, choose)
        tensors[name] = 1 / tensors[name]
        return name

    return _edit(folder, change)


def duplicate_experts(folder: Path, choose: random.Random) -> str:
    """Expert 01 beside expert 1; where one tensor holds all, another layout of the same beside it."""

    def change(tensors: dict[str, Tensor]) -> str:
        e = choose.randrange(3)
        of_expert = [name for name in tensors if f".experts.{e}." in name]
        copies = {name.replace(f".experts.{e}.", f".experts.0{e}."): tensors[name].clone() for name in of_expert}
        if not of_expert:
            name = choose.choice([n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))])
            copies = {f"{name}_blocks": tensors[name].clone()}
        tensors |= copies
        return "experts"

    return _edit(folder, change)


def missing_experts(folder: Path, choose: random.Random) -> str:
    """One expert, or the last of a tensor that holds all."""

    def change(tensors: dict[str, Tensor]) -> str:
        e = choose.randrange(3)
        for name in [name for name in tensors if f".experts.{e}." in name]:
            del tensors[name]
        fused = choose.choice(["gate_up_proj", "down_proj"])
        for name in [name for name in tensors if f".experts.{fused}" in name and tensors[name].dim()]:
            tensors[name] = tensors[name][:-1].clone()
        return "experts"

    return _edit(folder, change)


def index_outside_the_folder(folder: Path, choose: random.Random) -> str:
    """A shard's name that leads elsewhere, or a link; the file that it leads to exists."""
    outside = folder.parent / "outside.safetensors"
    shutil.copy(folder / WEIGHTS, outside)
    header, _ = split_header(outside.read_bytes())
    (folder / WEIGHTS).unlink()
    shard = choose.choice(["../outside.safetensors", str(outside), "sub/../../outside.safetensors", "link.safetensors"])
    if shard == "link.safetensors":
        (folder / shard).symlink_to(outside)
    names = [name for name in header if name != "__metadata__"]
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    return shard


def mixed_formats_in_one_stack(folder: Path, choose: random.Random) -> str:
    """A projection of an expert (of all, where one tensor holds them) in bf16, in FP8, or packed as MXFP4."""

    def change(tensors: dict[str, Tensor]) -> str:
        codes = [n for n, t in tensors.items() if ".experts." in n and _CODES.fullmatch(n) and t.dtype == torch.uint8]
        name = choose.choice(codes)
        fused, weight = tensors[name].dim() == 3, torch.randn(32, 32)
        stem = name if fused else name.rpartition(".")[0]
        for other in [n for n in tensors if n.startswith(stem) and not n.endswith("bias")]:
            del tensors[other]
        if fused:
            tensors[stem] = torch.randn(3, 32, 32).bfloat16()
        elif choose.random() < 0.5:
            tensors[f"{stem}.weight"] = weight.bfloat16()
        else:
            tensors |= {f"{stem}.weight": weight.to(torch.float8_e4m3fn), f"{stem}.weight_scale": torch.ones(())}
        return "experts"

    return _edit(folder, change)


CLASSES: tuple[Corrupt, ...] = (
    truncated_file, header_length, wrong_dtype, wrong_shape, missing_companion, nan_scale_byte,
    global_scale_the_wrong_way_round, duplicate_experts, missing_experts, index_outside_the_folder,
    mixed_formats_in_one_stack,
)  # fmt: skip


def _cases() -> list[tuple[Corrupt, str, int]]:
    """Class and export change in step, so that every pair comes up; each case has a seed of its own."""
    pairs = [(corrupt, name) for name in CHECKPOINTS for corrupt in CLASSES]
    return [(*pairs[i % len(pairs)], i) for i in range(COUNT)]


def test_each_class_meets_each_layout() -> None:
    cases = _cases()
    assert len(cases) == len(set(cases)) == COUNT and len(CLASSES) == 11 and len(CHECKPOINTS) >= 6
    assert {(c, n) for c, n, _ in cases} == {(c, n) for c in CLASSES for n in CHECKPOINTS}


@pytest.mark.parametrize("corrupt", CLASSES, ids=lambda corrupt: corrupt.__name__)
def test_corrupted_exports_are_refused_and_left_as_they_are(corrupt: Corrupt, tmp_path: Path) -> None:
    for _, name, seed in [case for case in _cases() if case[0] is corrupt]:
        torch.manual_seed(seed)
        folder = tmp_path / str(seed) / "checkpoint"
        folder.mkdir(parents=True)
        for file in (WEIGHTS, "config.json", "hf_quant_config.json"):
            if (GOLDEN / name / file).exists():
                shutil.copy(GOLDEN / name / file, folder)
        load_everything(folder)
        named = corrupt(folder, random.Random(seed))
        before = digest(folder.parent)
        with pytest.raises(CheckpointError) as refusal:
            load_everything(folder)
        text = str(refusal.value)
        assert str(folder) in text and named in text, (name, seed, text)
        assert "\n" not in text and digest(folder.parent) == before
