"""Numbers that few exporters write: DeepSeek-V4's own MXFP4, NVFP4 with 32 weights to a scale, FP8 in blocks of 128.

And headers of random bytes: read or refused, soon and in little memory.
"""

import json
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from checkpoint_files import WEIGHTS, Made, fresh, load_everything, make, refusal_of, same_experts
from format_bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nvfp4.checkpoint import CheckpointError, PackedWeight, open_checkpoint
from torch_nvfp4.format import dequantize

Q_PROJ = "model.layers.0.self_attn.q_proj"


def deepseek_v4() -> tuple[Made, str]:
    """int8 codes and ue8m0 scales of experts `w1`, `w3`, `w2`; everything else FP8 in blocks, or bf16."""
    made = make("modelopt_mxfp4")
    ((path, experts),) = made.experts.items()
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in made.tensors.items():
        stem, _, leaf = name.rpartition(".")
        if ".experts." not in name:
            continue
        head, _, role = stem.rpartition(".")
        if leaf == "weight":
            tensors[f"{head}.{names[role]}.weight"] = tensor.view(torch.int8)
        else:
            tensors[f"{head}.{names[role]}.scale"] = tensor.view(torch.float8_e8m0fnu)
    config = {"model_type": "deepseek_v4", "n_routed_experts": 3, "expert_dtype": "fp4"}
    config["quantization_config"] = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    return Made(tensors, config, {path: experts}), path


def test_deepseek_v4(tmp_path: Path) -> None:
    made, path = deepseek_v4()
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    exponents = torch.randint(110, 130, (2, 3), dtype=torch.uint8)
    made.tensors |= {
        "layers.0.attn.wq_a.weight": weight,
        "layers.0.attn.wq_a.scale": exponents.view(torch.float8_e8m0fnu),
    }
    checkpoint = open_checkpoint(made.write(tmp_path, shards=2))
    entry = checkpoint.experts[path]
    assert (entry.format, entry.num_experts, entry.hidden, entry.intermediate) == ("mxfp4", 3, 64, 32)
    assert same_experts(checkpoint.load_experts(path), made.experts[path])
    factors = torch.exp2(exponents.double() - 127).repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    decoded = checkpoint.load_plain("layers.0.attn.wq_a.weight")
    assert same_bits((decoded, (weight.double() * factors).float().bfloat16()))


def test_deepseek_v4_without_a_scale_or_with_another_declaration(tmp_path: Path) -> None:
    made, _ = deepseek_v4()
    name = next(name for name in made.tensors if name.endswith("1.w3.scale"))
    scale = made.tensors.pop(name)
    assert "must be U8" in refusal_of(made.write(fresh(tmp_path))) or "no companion" in refusal_of(
        tmp_path / "checkpoint"
    )
    made.tensors[name] = scale.view(torch.uint8).clone()
    made.tensors[name][0, 0] = 255
    made.tensors[name] = made.tensors[name].view(torch.float8_e8m0fnu)
    assert f"tensor {name!r}" in refusal_of(made.write(fresh(tmp_path)))
    made, _ = deepseek_v4()
    made.config["quantization_config"] = {"quant_method": "modelopt"}
    assert "is named as fp8 does it" in refusal_of(made.write(fresh(tmp_path)))


def with_wide_groups(made: Made) -> Made:
    """Of two neighbouring block scales only the first is kept."""
    for name in [name for name in made.tensors if name.endswith("weight_scale")]:
        scales = made.tensors[name].view(torch.uint8)
        fused = scales.dim() == 3
        kept = scales[:, ::2] if fused else scales[:, 0::2]
        made.tensors[name] = kept.contiguous().view(torch.float8_e4m3fn)
    return made


@pytest.mark.parametrize("layout", ["qwen3", "mixtral", "llama4"])
def test_nvfp4_with_32_weights_to_a_scale(tmp_path: Path, layout: str) -> None:
    """The scale of 32 is that of both halves: exact. The config must say so, or the scales may be half of them."""
    made = with_wide_groups(make(layout))
    text = refusal_of(made.write(fresh(tmp_path)))
    assert re.search(r"weight_scale' .* must be F8_E4M3 \[", text)
    made.config["quantization_config"]["config_groups"] = {"group_0": {"weights": {"group_size": 32}}}
    checkpoint = open_checkpoint(made.write(fresh(tmp_path)))
    for path, experts in made.experts.items():
        loaded = checkpoint.load_experts(path)
        for found, whole in ((loaded.gate_up, experts.gate_up), (loaded.down, experts.down)):
            wide = whole.scales.view(torch.uint8)[..., ::2].repeat_interleave(2, dim=-1).view(torch.float8_e4m3fn)
            assert same_bits((found.codes, whole.codes), (found.scales, wide))
            expected = PackedWeight(whole.codes, wide, whole.global_scale)
            assert torch.equal(dequantize(*found, torch.float32), dequantize(*expected, torch.float32))


def test_one_tensor_packed_along_its_outputs(tmp_path: Path) -> None:
    made = make("llama4")
    path = next(iter(made.experts))
    made.tensors[f"{path}.gate_up_proj"] = torch.zeros(3, 64, 32, dtype=torch.uint8)
    made.tensors[f"{path}.gate_up_proj_weight_scale"] = torch.zeros(3, 64, 2, dtype=torch.uint8)
    assert "is packed along its last dim, the outputs" in refusal_of(made.write(tmp_path))


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "scale"])
def test_fp8_in_blocks(tmp_path: Path, leaf: str) -> None:
    made = make("qwen3")
    weight, scale = torch.randn(1200, 130).to(torch.float8_e4m3fn), torch.rand(10, 2) + 0.1
    made.tensors |= {"a.weight": weight, f"a.{leaf}": scale}
    factors = scale.double().repeat_interleave(128, 0)[:1200].repeat_interleave(128, 1)[:, :130]
    decoded = open_checkpoint(made.write(tmp_path / "whole")).load_plain("a.weight")
    assert same_bits((decoded, (weight.double() * factors).float().bfloat16()))
    made.tensors[f"a.{leaf}"] = scale[:9].clone()
    assert f"tensor 'a.{leaf}'" in refusal_of(made.write(tmp_path / "cut"))


@settings(max_examples=200)
@given(data=st.data())
def test_random_bytes_in_a_header(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of it changed, put in, cut out, or all random: it reads as a checkpoint, or is refused in one line."""
    folder = make("qwen3", e=1).write(fresh(tmp_path))
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = bytearray(raw[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(header)))
        put = data.draw(st.binary(max_size=4) | st.sampled_from([b'"', b"{", b"[" * 3000, b"9" * 5000, b"\xff", b"-1"]))
        header[at : at + data.draw(st.integers(0, 8))] = put
    if data.draw(st.booleans()):
        header = bytearray(data.draw(st.binary(max_size=200)))
    stated = data.draw(st.just(len(header)) | st.integers(0, 2**64 - 1))
    (folder / WEIGHTS).write_bytes(stated.to_bytes(8, "little") + bytes(header) + raw[8 + length :])
    tracemalloc.start()
    try:
        load_everything(folder)
    except CheckpointError as refusal:
        assert str(folder) in str(refusal)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**22


def test_configs_of_any_shape_name_no_group(tmp_path: Path) -> None:
    for declared in (
        {"config_groups": 3, "group_size": "32"},
        {"quantized_layers": [1], "weights": {"group_size": True}},
    ):
        made = with_wide_groups(make("qwen3"))
        made.config["quantization_config"] |= declared
        assert "must be F8_E4M3" in refusal_of(made.write(fresh(tmp_path)))
    folder = made.write(fresh(tmp_path))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"group_size": 32}}))
    load_everything(folder)
