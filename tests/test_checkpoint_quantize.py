"""Dense folders written with packed experts: ModelOpt's own bytes, all else untouched, and nothing half done."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_checkpoint_golden import GOLDEN
from torch import Tensor

from torch_nvfp4.checkpoint import CheckpointError, open_checkpoint, quantize_folder
from torch_nvfp4.format import dequantize, quantize

PATH = "model.layers.0.mlp.experts"
CONFIG = {"model_type": "qwen3_moe", "num_experts": 3, "hidden_size": 64}


def dense(i: int = 32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (16, 64),
        "model.layers.0.mlp.gate.weight": (3, 64),
        "model.norm.weight": (64,),
    }
    for e in range(3):
        shapes |= {f"{PATH}.{e}.{role}_proj.weight": (i, 64) for role in ("gate", "up")}
        shapes |= {f"{PATH}.{e}.down_proj.weight": (64, i)}
    return {name: torch.randn(*shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.bin").write_bytes(b"weights of another kind")
    save_file(tensors, folder / "model.safetensors")
    return folder


def canonical(tensors: dict[str, Tensor], e: int, *roles: str) -> list[Tensor]:
    return [tensors[f"{PATH}.{e}.{role}_proj.weight"] for role in roles]


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("shard_bytes", "shared"), [(10**9, True), (4000, False)])
def test_what_is_written_is_read_as_quantize_gives_it(
    format: str, layout: str, shard_bytes: int, shared: bool, tmp_path: Path
) -> None:
    tensors = dense()
    source, out = write(tmp_path / "dense", tensors), tmp_path / "packed"
    done = quantize_folder(source, out, format=format, layout=layout, shard_bytes=shard_bytes, share_gate_up=shared)
    assert done.weights == 9 and done.packed_bytes < 0.3 * done.dense_bytes
    assert (len(list(out.glob("*.safetensors"))) == 1) == (shard_bytes == 10**9)
    checkpoint = open_checkpoint(out)
    assert checkpoint.experts[PATH].format == format
    loaded = checkpoint.load_experts(PATH)
    for e in range(3):
        for packed, weights in ((loaded.gate_up, canonical(tensors, e, "gate", "up")),
                                (loaded.down, canonical(tensors, e, "down"))):  # fmt: skip
            rows = torch.cat([w.float() for w in weights])
            scale = None if format == "mxfp4" else packed.global_scale[e : e + 1]
            wanted = quantize(rows[None], scale, format)
            assert torch.equal(packed.codes[e], wanted[0][0])
            assert torch.equal(packed.scales[e].view(torch.uint8), wanted[1][0].view(torch.uint8))
            for s, weight in enumerate(weights):
                weight = torch.stack(weights) if shared else weight
                own = weight.abs().amax().float() / torch.tensor(2688.0) if format == "nvfp4" else torch.tensor(1.0)
                torch.testing.assert_close(packed.global_scale[e, s], own, rtol=2e-7, atol=0)
    for name in checkpoint.plain:
        assert torch.equal(checkpoint.load_plain(name).view(torch.uint8), tensors[name].view(torch.uint8))
    assert len(checkpoint.plain) == 3
    assert (out / "tokenizer.json").exists() and not (out / "old.bin").exists()
    ignore = checkpoint.config["quantization_config"]["ignore"]
    assert ignore == ["model.embed_tokens", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize("name", ["ckpt_modelopt_qwen3_moe-W4A16_NVFP4_CFG", "ckpt_modelopt_gpt_oss-NVFP4_DEFAULT_CFG"])
def test_the_bytes_are_modelopts(name: str, tmp_path: Path) -> None:
    """One model with numbered experts, one that keeps all in a tensor packed along its middle dim."""
    folder = GOLDEN / name
    original, exported = (
        load_file(folder / "original_bf16_inmemory.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    tensors = {key: tensor for key, tensor in original.items() if key in exported}
    if "gpt_oss" in name:
        tensors |= {f"{PATH}.{p}": original[f"{PATH}.{p}"] for p in ("gate_up_proj", "down_proj")}
    else:
        for e, (gate_up, down) in enumerate(
            zip(original[f"{PATH}.gate_up_proj"], original[f"{PATH}.down_proj"], strict=True)
        ):
            gate, up = gate_up.chunk(2)
            for role, weight in (("gate", gate), ("up", up), ("down", down)):
                tensors[f"{PATH}.{e}.{role}_proj.weight"] = weight.contiguous()
    quantize_folder(write(tmp_path / "dense", tensors, config), tmp_path / "packed")
    written = load_file(tmp_path / "packed" / "model.safetensors")
    packed = {key for key in written if key.startswith(PATH) and not key.endswith("_bias")}
    assert packed == {key for key in exported if key.startswith(PATH) and not key.endswith(("_bias", "input_scale"))}
    for key in packed:
        assert written[key].dtype == exported[key].dtype and written[key].shape == exported[key].shape, key
        assert torch.equal(written[key].flatten().view(torch.uint8), exported[key].flatten().view(torch.uint8)), key


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), power=st.integers(-60, 8))
def test_a_divisor_says_exactly_what_was_used(seed: int, power: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("divisor")
    tensors = {name: (t.float() * 2.0**power).bfloat16() for name, t in dense(seed=seed).items()}
    quantize_folder(write(folder / "dense", tensors), folder / "packed", layout="compressed-tensors")
    down = open_checkpoint(folder / "packed").load_experts(PATH).down
    weight = tensors[f"{PATH}.1.down_proj.weight"].float()
    wanted = quantize(weight, down.global_scale[1])
    assert torch.equal(down.codes[1], wanted[0])
    values = dequantize(down.codes[1], down.scales[1], down.global_scale[1], torch.float32)
    assert (values - weight).norm() <= 0.12 * weight.norm()


def refuse(tensors: dict[str, Tensor], tmp_path: Path, config: dict[str, Any] = CONFIG, **options: Any) -> str:
    source, out = write(tmp_path / "dense", tensors, config), tmp_path / "packed"
    with pytest.raises(CheckpointError) as error:
        quantize_folder(source, out, **options)
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}
    return str(error.value)


def test_a_nan_leaves_nothing_behind(tmp_path: Path) -> None:
    tensors = dense()
    tensors[f"{PATH}.2.up_proj.weight"][3, 5] = torch.nan
    text = refuse(tensors, tmp_path)
    assert f"'{PATH}.2.up_proj.weight'" in text and "finite" in text


def test_what_cannot_be_packed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "ragged": (dense(i=24), "24 columns are no multiple of B = 16"),
        "none": ({"model.norm.weight": torch.ones(4)}, "holds no dense experts"),
        "gap": ({k: v for k, v in dense().items() if k != f"{PATH}.1.up_proj.weight"}, f"{PATH}.1 lacks up_proj"),
        "fused": ({f"{PATH}.gate_up_proj": torch.ones(2, 32, 64)}, "that layout is known only for"),
        "packed": (dense() | {"a.weight_packed": torch.zeros(2, 2, dtype=torch.uint8)}, "is quantised already"),
    }
    for name, (tensors, text) in cases.items():
        (tmp_path / name).mkdir()
        assert text in refuse(tensors, tmp_path / name), name


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    source, out = write(tmp_path / "dense", dense()), tmp_path / "packed"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="a name of its own"):
        quantize_folder(source, out)
    assert [path.name for path in out.iterdir()] == ["mine"]
