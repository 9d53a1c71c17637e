"""Every layout gives the canonical weights it was written from; shards, FP8, links, memory."""

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from checkpoint_files import LAYOUTS, NUMBERED, NVFP4_LAYOUTS, Made, make, same_experts
from format_bits import same_bits
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_checkpoint_golden import GOLDEN

from torch_nvfp4.checkpoint import CheckpointError, open_checkpoint
from torch_nvfp4.checkpoint.files import Reader
from torch_nvfp4.format import dequantize

PATH = "model.layers.0.mlp.experts"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def check_loads(made: Made, folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.experts) == set(made.experts) and set(checkpoint.linears) == set(made.linears)
    for path, experts in made.experts.items():
        assert same_experts(checkpoint.load_experts(path), experts)
        entry = checkpoint.experts[path]
        e, h, i = experts.down.codes.shape[0], experts.down.codes.shape[1], experts.down.codes.shape[2] * 2
        assert (entry.num_experts, entry.hidden, entry.intermediate) == (e, h, i)
        assert entry.gated == (experts.gate_up.global_scale.shape[1] == 2)
        assert entry.has_bias == (experts.gate_up_bias is not None)
    for path, packed in made.linears.items():
        assert same_bits(*zip(checkpoint.load_linear(path), packed, strict=True))
        assert (checkpoint.linears[path].out_features, checkpoint.linears[path].in_features) == (
            96,
            packed[0].size(1) * 2,
        )
    for name in checkpoint.plain:
        assert same_bits((checkpoint.load_plain(name), made.tensors[name]))
    owned = [name for entry in checkpoint.experts.values() for name in entry.tensors]
    owned += [name for entry in checkpoint.linears.values() for name in entry.tensors]
    assert sorted((*owned, *checkpoint.plain)) == sorted(made.tensors)


@given(
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**32),
    e=st.integers(1, 5),
    h=st.sampled_from([32, 64, 96]),
    i=st.sampled_from([32, 64]),
    shards=st.integers(1, 4),
    prefix=st.sampled_from(["", "model.", "model.language_model.", "language_model.model."]),
)
def test_every_layout_gives_the_weights_it_was_written_from(
    tmp_path: Path, layout: str, seed: int, e: int, h: int, i: int, shards: int, prefix: str
) -> None:
    """H = 2I and H = I are among the sizes: no layout is guessed from a shape."""
    made = make(layout, seed, e, h, i, prefix)
    shutil.rmtree(tmp_path)
    check_loads(made, made.write(tmp_path, shards))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout(tmp_path: Path, layout: str) -> None:
    made = make(layout)
    check_loads(made, made.write(tmp_path))


def test_gate_and_up_keep_global_scales_of_their_own(tmp_path: Path) -> None:
    made = make("qwen3")
    loaded = open_checkpoint(made.write(tmp_path)).load_experts(PATH)
    gate, up = loaded.gate_up.global_scale.unbind(1)
    assert not (gate == up).any()


def test_native_gpt_oss_decodes_as_in_transformers(tmp_path: Path) -> None:
    """Scale 255 is refused: transformers makes it infinity, the format NaN. 254 and 0 are read as they are."""
    golden = load_file(GOLDEN / "gptoss_mxfp4_hf.safetensors")
    made = make("mxfp4", e=2, h=64, i=4 * 32)
    made.tensors[f"{PATH}.gate_up_proj_blocks"] = golden["gate_up_proj_blocks"].repeat(1, 32, 1, 1)
    made.tensors[f"{PATH}.gate_up_proj_scales"] = golden["gate_up_proj_scales"].repeat(1, 32, 1)
    checkpoint = open_checkpoint(made.write(tmp_path / "as_it_is"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*gate_up_proj_scales'.* holds NaN"):
        checkpoint.load_experts(PATH)

    nan = golden["gate_up_proj_scales"] == 255
    made.tensors[f"{PATH}.gate_up_proj_scales"][nan.repeat(1, 32, 1)] = 1
    loaded = open_checkpoint(made.write(tmp_path / "without_nan")).load_experts(PATH)
    expected = golden["dequant_f32"].transpose(1, 2).repeat(1, 32, 1)
    expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=1)
    known = ~nan.repeat(1, 32, 1).repeat_interleave(32, dim=-1)
    known = torch.cat([known[:, 0::2], known[:, 1::2]], dim=1)
    assert same_bits((dequantize(*loaded.gate_up, torch.float32)[known], expected[known]))


def test_a_bf16_layer_among_packed_ones_is_plain(tmp_path: Path) -> None:
    made = make("qwen3")
    dense = {
        f"model.layers.1.mlp.experts.{e}.{p}.weight": torch.randn(4, 4) for e in range(3) for p in ("up_proj", "x")
    }
    made.tensors |= dense | {"lm_head.weight": torch.randn(8, 8)}
    made.config["quantization_config"]["ignore"] = [PATH, "lm_head.\0nonsense"]  # not asked
    checkpoint = open_checkpoint(made.write(tmp_path))
    assert {*dense, "lm_head.weight"} < set(checkpoint.plain) and list(checkpoint.experts) == [PATH]


def test_scales_that_change_no_weight_are_plain(tmp_path: Path) -> None:
    made = make("qwen3")
    scale = torch.tensor(0.5)
    spare = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "dense.input_scale")
    made.tensors |= {f"model.layers.0.{name}": scale.clone() for name in spare}
    made.tensors["model.layers.0.dense.weight"] = torch.randn(4, 4).bfloat16()
    check_loads(made, made.write(tmp_path))


def test_biases_of_numbered_experts_and_of_linears(tmp_path: Path) -> None:
    made = make("qwen3")
    biases = {role: torch.randn(3, 64 if role == "down_proj" else 32) for role in ("gate_proj", "up_proj", "down_proj")}
    for role, bias in biases.items():
        made.tensors |= {f"{PATH}.{e}.{role}.bias": bias[e].clone() for e in range(3)}
    made.tensors[f"{Q_PROJ}.bias"] = torch.randn(96)
    checkpoint = open_checkpoint(made.write(tmp_path))
    loaded = checkpoint.load_experts(PATH)
    assert loaded.gate_up_bias is not None and loaded.down_bias is not None
    assert torch.equal(loaded.gate_up_bias, torch.cat([biases["gate_proj"], biases["up_proj"]], dim=1))
    assert torch.equal(loaded.down_bias, biases["down_proj"])
    assert f"{Q_PROJ}.bias" in checkpoint.plain


@pytest.mark.parametrize("scale", [torch.tensor(0.37), torch.tensor([0.37]), torch.rand(40, 1) + 0.1, torch.rand(40)])
def test_fp8_layers_are_decoded_with_their_scale(tmp_path: Path, scale: torch.Tensor) -> None:
    made = make("qwen3")
    weight = torch.randn(40, 24).to(torch.float8_e4m3fn)
    made.tensors |= {"a.b.weight": weight, "a.b.weight_scale": scale, "a.b.input_scale": torch.tensor(2.0)}
    checkpoint = open_checkpoint(made.write(tmp_path))
    assert list(checkpoint.fp8) == ["a.b.weight"] and not any(name.startswith("a.b") for name in checkpoint.plain)
    expected = (weight.double() * scale.double().reshape(-1, 1)).float().bfloat16()
    assert same_bits((checkpoint.load_plain("a.b.weight"), expected))


@pytest.mark.parametrize("layout", NVFP4_LAYOUTS)
def test_input_scales(tmp_path: Path, layout: str) -> None:
    made = make(layout)
    (path,) = made.experts
    assert open_checkpoint(made.write(tmp_path / "without")).input_scale(path) is None
    scales = {}
    for name in list(made.tensors):
        for ending, companion in (("weight_scale_2", "input_scale"), ("weight_global_scale", "input_global_scale")):
            if name.endswith(ending):
                scales[name.removesuffix(ending)] = scale = torch.tensor(0.25 + 0.25 * (len(scales) % 8))
                made.tensors[name.removesuffix(ending) + companion] = scale
    checkpoint = open_checkpoint(made.write(tmp_path / "with"))
    by_stem = {stem.rstrip("._"): (1 / s if layout == "compressed" else s) for stem, s in scales.items()}
    (linear,) = made.linears
    assert checkpoint.input_scale(linear) == by_stem[linear]
    read = checkpoint.input_scale(path)
    assert read is not None
    if layout in NUMBERED:
        roles = {"mixtral": ("w1", "w3", "w2"), "nemotron": ("up_proj", "down_proj")}.get(
            layout, ("gate_proj", "up_proj", "down_proj")
        )
        expected = [[by_stem[f"{path}.{e}.{role}"] for role in roles] for e in range(3)]
    else:
        expected = [[by_stem[f"{path}.{role}"] for role in ("gate_up_proj", "gate_up_proj", "down_proj")]] * 3
    assert torch.equal(read, torch.tensor(expected))


def test_an_expert_without_input_scale_harms_only_who_asks(tmp_path: Path) -> None:
    made = make("qwen3")
    made.tensors[f"{PATH}.1.up_proj.input_scale"] = torch.tensor(0.5)
    checkpoint = open_checkpoint(made.write(tmp_path))
    assert same_experts(checkpoint.load_experts(PATH), made.experts[PATH])
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight'.* has no input scale"):
        checkpoint.input_scale(PATH)


def test_the_config_may_be_that_of_modelopt_alone(tmp_path: Path) -> None:
    made = make("qwen3")
    del made.config["quantization_config"]
    folder = made.write(tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}}))
    check_loads(made, folder)


def test_the_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    made = make("qwen3")
    blobs, snapshot = made.write(tmp_path / "blobs", shards=3), tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("..", "..", "blobs", blob.name))
    check_loads(made, snapshot)


def test_memory_holds_one_layer_and_one_expert_of_one_tensor_beside_it(tmp_path: Path) -> None:
    """All bytes of files pass through Python buffers, which tracemalloc counts; results are torch's, and are added."""
    made, e, h, i = make("qwen3"), 4, 512, 256
    made.tensors = {}
    for layer in range(4):
        part = make("gpt_oss", layer, e, h, i, prefix=f"model.{layer}.")
        made.tensors |= part.tensors
        made.experts |= part.experts
    made.config = part.config
    folder = made.write(tmp_path, shards=4)
    largest_slice = 2 * i * h // 2
    layer_bytes = sum(t.numel() * t.element_size() for t in (*part.experts.popitem()[1].gate_up,))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(folder)
        _, opened = tracemalloc.get_traced_memory()
        for path in checkpoint.experts:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            experts = checkpoint.load_experts(path)
            after, peak = tracemalloc.get_traced_memory()
            assert peak - before < 1.5 * largest_slice < layer_bytes / 2
            assert after - before < 0.1 * largest_slice  # nothing read is kept
            del experts
    finally:
        tracemalloc.stop()
    assert opened < largest_slice  # headers, and nothing else


def test_opening_reads_headers_and_global_scales_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("qwen3").write(tmp_path, shards=2)
    sizes = []
    read = Reader._bytes

    def counted(self: Reader, info, begin: int, end: int) -> bytearray:  # type: ignore[no-untyped-def]
        sizes.append(end - begin)
        return read(self, info, begin, end)

    monkeypatch.setattr(Reader, "_bytes", counted)
    open_checkpoint(folder)
    assert sizes == [4] * 10


def test_a_file_that_changed_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    made = make("qwen3")
    checkpoint = open_checkpoint(made.write(tmp_path))
    save_file(dict(made.tensors, other=torch.zeros(3)), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has changed since the checkpoint was opened"):
        checkpoint.load_experts(PATH)
