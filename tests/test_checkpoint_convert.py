"""Folders converted between layouts: there and back the same bytes, and what is not packed untouched."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import LAYOUTS, WITH_BIAS, Made, make, quantiser_of, same_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_checkpoint_golden import COMPRESSED, GOLDEN, MODELOPT
from test_checkpoint_save import decode, differing, stored_as, with_scales
from torch import Tensor

from torch_nvfp4.checkpoint import Checkpoint, CheckpointError, PackedExperts, Written, convert_folder, open_checkpoint
from torch_nvfp4.checkpoint.write import FolderWriter

PATH = "model.layers.0.mlp.experts"


def other(layout: str | None) -> str:
    return "modelopt" if layout == "compressed-tensors" else "compressed-tensors"


@pytest.mark.parametrize("name", (*MODELOPT, COMPRESSED))
@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
def test_a_golden_checkpoint_comes_back_byte_for_byte(name: str, shard_bytes: int, tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / name)
    there = convert_folder(GOLDEN / name, tmp_path / "a", layout=other(source.layout), shard_bytes=shard_bytes)
    assert there.inexact == 0
    stored = load_file(GOLDEN / name / "model.safetensors")
    converted = open_checkpoint(tmp_path / "a")
    assert converted.layout == other(source.layout) and len(converted.experts) == len(source.experts)
    assert not differing(tmp_path / "a", stored) & set(source.plain)
    for path in source.experts:
        assert same_experts(converted.load_experts(path), source.load_experts(path))
    convert_folder(tmp_path / "a", tmp_path / "b", layout=str(source.layout), shard_bytes=shard_bytes)
    assert differing(tmp_path / "b", stored) == set()
    assert (tmp_path / "b" / "hf_quant_config.json").exists() == (GOLDEN / name / "hf_quant_config.json").exists()
    for config, theirs in ((_quantization(tmp_path / "b"), _quantization(GOLDEN / name)),):
        assert config["quant_method"] == theirs["quant_method"]
        assert config.get("quant_algo") == theirs.get("quant_algo") and config.get("format") == theirs.get("format")


def _quantization(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", [name for name in (*MODELOPT, COMPRESSED) if "gpt_oss" not in name])
def test_the_other_tool_decodes_the_same_values(name: str, tmp_path: Path) -> None:
    layout = other(open_checkpoint(GOLDEN / name).layout)
    convert_folder(GOLDEN / name, tmp_path / "a", layout=layout)
    written = stored_as(tmp_path / "a")
    for key, weight in load_file(GOLDEN / name / "expected_dequant_f32.safetensors").items():
        found = decode(written, key.removesuffix(".weight"), layout)
        torch.testing.assert_close(found, weight, rtol=5 * 2.0**-24, atol=0)  # one multiplies, the other divides


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_back(name: str, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("convert")
    made = with_short_scales(make(name, seed=seed))
    made.write(folder / "in", shards=1 + seed % 3)
    convert_folder(folder / "in", folder / "a", layout=other(quantiser_of(name)))
    convert_folder(folder / "a", folder / "b", layout=quantiser_of(name), shard_bytes=5000)
    assert differing(folder / "b", made.tensors) == set()


def with_short_scales(made: Made) -> Made:
    """Global scales as quantisers of bf16 weights write them, amax / 2688, and input scales beside them."""
    for key, tensor in list(made.tensors.items()):
        if key.endswith("weight_scale_2"):
            made.tensors[key] = (tensor * 2688).bfloat16().float() / 2688
            made.tensors[key.replace("weight_scale_2", "input_scale")] = made.tensors[key] * 2
        elif key.endswith("weight_global_scale"):
            made.tensors[key.replace("weight_global_scale", "input_global_scale")] = tensor / 4
    return made


def test_what_is_not_packed_to_4_bits_is_untouched(tmp_path: Path) -> None:
    """FP8 layers with scales, a further prediction layer, a vision tower, scales of the cache, and other files."""
    made = make("qwen3")
    extra: dict[str, Tensor] = {
        "model.layers.0.self_attn.o_proj.weight": torch.randn(32, 64).to(torch.float8_e4m3fn),
        "model.layers.0.self_attn.o_proj.weight_scale": torch.tensor(0.01),
        "model.layers.0.self_attn.o_proj.input_scale": torch.tensor(0.02),
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.5),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(8, 64).half(),
        "visual.blocks.0.attn.qkv.weight": torch.randn(8, 8),
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.tensor([1, 2, 3]),
    }
    made.tensors |= extra
    made.config |= {"text_config": {"quantization_config": made.config.pop("quantization_config"), "x": 1}}
    made.config["text_config"]["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8}
    made.write(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "hf_quant_config.json").write_text("{}")
    (tmp_path / "in" / "old.bin").write_bytes(b"other weights")
    convert_folder(tmp_path / "in", tmp_path / "a", layout="compressed-tensors")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert not differing(tmp_path / "a", made.tensors) & extra.keys()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert config["text_config"] == {"x": 1} and quantization["format"] == "mixed-precision"
    assert quantization["config_groups"]["group_1"]["targets"] == ["model.layers.0.self_attn.o_proj"]
    assert quantization["kv_cache_scheme"]["num_bits"] == 8
    assert quantization["ignore"] == sorted(
        ["model.layers.0.mlp.gate", "mtp.layers.0.mlp.experts.0.up_proj", "visual.blocks.0.attn.qkv"]
    )
    convert_folder(tmp_path / "a", tmp_path / "b", layout="modelopt")
    assert differing(tmp_path / "b", made.tensors) == set()
    details = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())["quantization"]
    assert details["quant_algo"] == "MIXED_PRECISION" and details["kv_cache_quant_algo"] == "FP8"
    layers = details["quantized_layers"]
    assert layers["model.layers.0.self_attn.o_proj"] == {"quant_algo": "FP8"}
    assert layers[f"{PATH}.2.down_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16} and len(layers) == 11


def test_codes_move_by_nibbles_where_another_dim_is_packed(tmp_path: Path) -> None:
    made = make("gpt_oss")
    made.write(tmp_path / "in")
    done = convert_folder(tmp_path / "in", tmp_path / "a", layout="compressed-tensors")
    assert done.weights == 10  # nine of experts that were in two tensors
    fused, written = made.tensors[f"{PATH}.gate_up_proj"], stored_as(tmp_path / "a")
    for role, first in (("gate_proj", 0), ("up_proj", 1)):
        assert torch.equal(written[f"{PATH}.1.{role}.weight_packed"], fused[1, :, first::2].T)
        bias = made.tensors[f"{PATH}.gate_up_proj_bias"][1, first::2]
        assert torch.equal(written[f"{PATH}.1.{role}.bias"], bias)


@pytest.mark.parametrize("name", WITH_BIAS)
def test_biases_of_experts_come_back(name: str, tmp_path: Path) -> None:
    made = make(name)
    made.write(tmp_path / "in")
    convert_folder(tmp_path / "in", tmp_path / "a", layout="compressed-tensors")
    (experts,) = made.experts.values()
    assert same_experts(open_checkpoint(tmp_path / "a").load_experts(PATH), _kept(experts, tmp_path / "a"))


def _kept(experts: PackedExperts, folder: Path) -> PackedExperts:
    """With the global scales that the folder has, which other tests compare."""
    found = open_checkpoint(folder).load_experts(PATH)
    gate_up = experts.gate_up._replace(global_scale=found.gate_up.global_scale)
    return experts._replace(gate_up=gate_up, down=experts.down._replace(global_scale=found.down.global_scale))


def test_what_is_not_exact_is_counted_or_refused(tmp_path: Path) -> None:
    made = with_scales(make("qwen3"), "up_proj", (1 - 2**-24) * 2**-13)
    made.write(tmp_path / "in")
    with pytest.raises(CheckpointError, match=f"{PATH}: 3 of its scales have no exact divisor"):
        convert_folder(tmp_path / "in", tmp_path / "a", layout="compressed-tensors", exact=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    done = convert_folder(tmp_path / "in", tmp_path / "a", layout="compressed-tensors")
    assert done == Written(weights=10, inexact=3)


def test_an_expert_at_a_time_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("qwen3", e=6).write(tmp_path / "in")
    iterate, alive = Checkpoint.iterate_experts, []
    pieces: list[weakref.ref[Tensor]] = []

    def counting(self: Checkpoint, path: str) -> Iterator[PackedExperts]:
        for piece in iterate(self, path):
            pieces.append(weakref.ref(piece.gate_up.codes))
            alive.append(sum(ref() is not None for ref in pieces))
            yield piece

    monkeypatch.setattr(Checkpoint, "iterate_experts", counting)
    convert_folder(tmp_path / "in", tmp_path / "a", layout="compressed-tensors", shard_bytes=1)
    assert len(alive) == 6 and max(alive) <= 2  # one that comes, and one in the shard that it fills


@pytest.mark.parametrize(
    ("name", "layout", "text"),
    [
        ("qwen3", "modelopt", "in: has the layout modelopt already"),
        ("qwen3", "mxfp4", "layout mxfp4 is that of gpt-oss's MXFP4 experts"),
        ("modelopt_mxfp4", "mxfp4", "layout mxfp4 is that of gpt-oss's MXFP4 experts"),
        ("qwen3", "gguf", "layout 'gguf' cannot be written; known: modelopt, compressed-tensors, mxfp4"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(name: str, layout: str, text: str, tmp_path: Path) -> None:
    made = make(name)
    made.write(tmp_path / "in")
    assert text in _refused(tmp_path, layout)


def _refused(tmp_path: Path, layout: str) -> str:
    with pytest.raises(CheckpointError) as error:
        convert_folder(tmp_path / "in", tmp_path / "out", layout=layout)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    return str(error.value)


def test_a_dense_folder_and_one_with_fp8_in_blocks_are_refused(tmp_path: Path) -> None:
    made, dense = make("qwen3"), tmp_path / "dense"
    stem = "model.layers.0.self_attn.o_proj"
    made.tensors |= {f"{stem}.weight": torch.zeros(256, 256).to(torch.float8_e4m3fn)}
    made.tensors |= {f"{stem}.weight_scale_inv": torch.ones(2, 2)}
    (tmp_path / "fp8").mkdir()
    made.write(tmp_path / "fp8" / "in")
    assert f"'{stem}.weight_scale_inv': FP8 layers are kept as they are" in _refused(
        tmp_path / "fp8", "compressed-tensors"
    )
    dense.mkdir()
    Made({"model.norm.weight": torch.ones(4)}, {}).write(dense / "in")
    assert "holds no packed weights" in _refused(dense, "modelopt")


def test_unequal_global_scales_do_not_fit_in_one_tensor(tmp_path: Path) -> None:
    made = make("gpt_oss")
    made.write(tmp_path / "first")
    convert_folder(tmp_path / "first", tmp_path / "second", layout="compressed-tensors")
    tensors = stored_as(tmp_path / "second")
    tensors[f"{PATH}.1.down_proj.weight_global_scale"] *= 2
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    (tmp_path / "x").mkdir()
    Made(tensors, config).write(tmp_path / "x" / "in")
    text = _refused(tmp_path / "x", "modelopt")
    text = text.removeprefix(f"{tmp_path / 'x' / 'in'}: tensor '{PATH}.down_proj': ")
    assert text == "this layout has one global scale for all experts, and the experts have 2"


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("qwen3").write(tmp_path / "in")
    add, count = FolderWriter.add, [0]

    def failing(self: FolderWriter, name: str, tensor: Tensor) -> None:
        count[0] += 1
        if count[0] == 12:
            raise OSError("disk full")
        add(self, name, tensor)

    monkeypatch.setattr(FolderWriter, "add", failing)
    with pytest.raises(OSError, match="disk full"):
        convert_folder(tmp_path / "in", tmp_path / "out", layout="compressed-tensors", shard_bytes=2000)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_progress_names_each_module_once(tmp_path: Path) -> None:
    made = make("qwen3")
    made.write(tmp_path / "in")
    seen: list[str] = []
    convert_folder(tmp_path / "in", tmp_path / "out", layout="compressed-tensors", progress=seen.append)
    assert sorted(seen) == sorted([*made.experts, *made.linears])
