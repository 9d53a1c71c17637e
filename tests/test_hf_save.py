"""Packed models of transformers saved: the producer's bytes, and what loads again is the same model."""

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_models import CHECKPOINTS, COMPRESSED_TENSORS, GOLDEN, QWEN, load, logits, read_config, write
from hf_models import make_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_checkpoint_save import differing, stored_as
from test_hf_pretrained import gpt_oss_mxfp4
from transformers import AutoModel, PreTrainedModel

from torch_nvfp4 import convert_qat, set_numerics
from torch_nvfp4.checkpoint import CheckpointError, open_checkpoint, use_input_scales
from torch_nvfp4.hf import PackedConfig, pack_on_load, prepare_qat, quantize_experts, save_packed
from torch_nvfp4.lora import add_lora
from torch_nvfp4.nn import NVFP4Experts

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
IN_FP32 = {"backbone.layers.0.mixer.gate.e_score_correction_bias"}
"""What transformers keeps in fp32, whatever the file has."""


def same_model(model: PreTrainedModel, folder: Path) -> None:
    again = load(folder, dtype=model.dtype)
    found, expected = again.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_save_pretrained_gives_the_producers_bytes(name: str, tmp_path: Path) -> None:
    model = load(GOLDEN / name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert differing(tmp_path, load_file(GOLDEN / name / "model.safetensors")) <= IN_FP32
    assert read_config(tmp_path)["quantization_config"] == read_config(GOLDEN / name)["quantization_config"]
    same_model(model, tmp_path)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("layout", [None, "modelopt", "compressed-tensors"])
def test_save_packed_in_a_layout(name: str, layout: str | None, tmp_path: Path) -> None:
    model, out = load(GOLDEN / name, dtype=torch.bfloat16), tmp_path / "out"
    done = save_packed(model, out, layout=layout, shard_bytes=3000)
    source, written = open_checkpoint(GOLDEN / name), open_checkpoint(out)
    assert done.inexact == 0 and written.layout == (layout or source.layout)
    if written.layout == source.layout:
        assert differing(out, load_file(GOLDEN / name / "model.safetensors")) <= IN_FP32
    assert (out / "model.safetensors.index.json").exists() and (out / "generation_config.json").exists()
    config = read_config(out)
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "bfloat16"
    same_model(model, out)
    with pytest.raises(CheckpointError, match="a name of its own"):
        save_packed(model, out)


def test_sharded_by_transformers(tmp_path: Path) -> None:
    model = load(GOLDEN / QWEN, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert differing(tmp_path, load_file(GOLDEN / QWEN / "model.safetensors")) == set()
    same_model(model, tmp_path)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "olmoe", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_model_that_was_packed_here(name: str, layout: str, tmp_path: Path) -> None:
    """Under the names of the dense model's files; the multipliers of fp32 weights may have no exact divisor."""
    model = quantize_experts(make_model(name))
    assert isinstance(model, PreTrainedModel)
    done = save_packed(model, tmp_path / "out", layout=layout)
    again = load(tmp_path / "out")
    if layout == "modelopt":
        assert done.inexact == 0
        same_model(model, tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    (dense := make_model(name)).save_pretrained(tmp_path / "dense")
    written = {key.removesuffix("_packed") for key in stored_as(tmp_path / "out") if not key.endswith("_scale")}
    written = {key for key in written if not key.endswith(("_scale_2", "_scale"))}
    assert written == stored_as(tmp_path / "dense").keys() and dense.config.model_type == model.config.model_type


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_save_pretrained_of_a_model_that_was_packed_here(name: str, tmp_path: Path) -> None:
    """The tensors and the declaration of save_packed; afterwards the model is to transformers what it was."""
    model: Any = quantize_experts(make_model(name))
    model.save_pretrained(tmp_path / "a", max_shard_size="40KB")
    save_packed(model, tmp_path / "b")
    assert differing(tmp_path / "a", stored_as(tmp_path / "b")) == set()
    declared = [read_config(tmp_path / folder)["quantization_config"] for folder in "ab"]
    assert declared[0] == declared[1] and declared[0]["quant_method"] == "modelopt"
    same_model(model, tmp_path / "a")
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")


def test_save_pretrained_after_qat(tmp_path: Path) -> None:
    model: Any = prepare_qat(make_model("qwen3_moe"), modules=lambda path, _: path != "lm_head")
    convert_qat(model).save_pretrained(tmp_path)
    same_model(model, tmp_path)


def test_save_pretrained_with_adapters_of_add_lora_keeps_what_a_trainer_resumes_from(tmp_path: Path) -> None:
    model, again = (quantize_experts(make_model("qwen3_moe", seed=seed)) for seed in (0, 1))
    for each in (model, again):
        add_lora(each, r=2)
    with pytest.warns(UserWarning, match="from_pretrained does not: save the adapters with save_adapter, and the base"):
        model.save_pretrained(tmp_path)  # type: ignore[operator]
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(again), logits(model))


def test_gpt_oss_that_was_packed_here_has_too_many_global_scales_for_modelopt(tmp_path: Path) -> None:
    model: Any = quantize_experts(make_model("gpt_oss"))
    with pytest.raises(CheckpointError, match="one global scale for all experts, and the experts have"):
        save_packed(model, tmp_path / "out")
    save_packed(model, tmp_path / "out", layout="compressed-tensors")
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gpt_oss_mxfp4_in_its_own_layout(tmp_path: Path) -> None:
    gpt_oss_mxfp4(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    pack_on_load("mxfp4")
    try:
        model = load(tmp_path / "in", dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "a")
        save_packed(model, tmp_path / "b")
        save_packed(model, tmp_path / "c", layout="compressed-tensors")
        same_model(model, tmp_path / "b")
    finally:
        pack_on_load("mxfp4", False)
    assert differing(tmp_path / "a", stored) == differing(tmp_path / "b", stored) == set()
    same_model(model, tmp_path / "c")
    packed: Any = quantize_experts(make_model("gpt_oss", hidden_size=64, intermediate_size=32), "mxfp4")
    assert save_packed(packed, tmp_path / "d", layout="mxfp4").inexact == 0
    experts = open_checkpoint(tmp_path / "d")
    assert experts.layout == "mxfp4" and len(experts.experts) == 2


def test_a_checkpoint_that_declared_nothing_declares_itself(tmp_path: Path) -> None:
    config = {key: value for key, value in read_config(GOLDEN / QWEN).items() if key != "quantization_config"}
    write(tmp_path / "in", load_file(GOLDEN / QWEN / "model.safetensors"), config, None)
    shutil.copy(GOLDEN / QWEN / "hf_quant_config.json", tmp_path / "in")
    model = load(tmp_path / "in", dtype=torch.bfloat16, quantization_config=PackedConfig())
    model.save_pretrained(tmp_path / "a")
    quantization = read_config(tmp_path / "a")["quantization_config"]
    assert quantization["quant_method"] == "modelopt" and quantization["quant_algo"] == "NVFP4"
    assert quantization["ignore"] == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
    same_model(model, tmp_path / "a")
    save_packed(load(tmp_path / "in", quantization_config=PackedConfig()), tmp_path / "b")
    assert read_config(tmp_path / "b")["quantization_config"] == quantization


def test_fp8_layers_that_were_decoded_are_declared_plain(tmp_path: Path) -> None:
    tensors, stem = load_file(GOLDEN / QWEN / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{stem}.")}
    tensors[f"{stem}.weight"] = torch.randn(32, 32).to(torch.float8_e4m3fn)
    tensors[f"{stem}.weight_scale"] = torch.tensor(0.5)
    config = read_config(GOLDEN / QWEN)
    declared = config["quantization_config"] | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {stem: "FP8"}}
    write(tmp_path / "in", tensors, config, declared)
    model = load(tmp_path / "in", dtype=torch.bfloat16)
    save_packed(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    for out in (tmp_path / "a", tmp_path / "b"):
        quantization = read_config(out)["quantization_config"]
        assert stem in quantization["ignore"] and "quantized_layers" not in quantization
        assert quantization["quant_algo"] == "NVFP4"
        same_model(model, out)


def test_names_follow_a_model_without_its_head(tmp_path: Path) -> None:
    base = AutoModel.from_pretrained(GOLDEN / COMPRESSED_TENSORS, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "a")
    save_packed(base, tmp_path / "b")
    stored = load_file(GOLDEN / COMPRESSED_TENSORS / "model.safetensors")
    del stored["lm_head.weight"]
    assert differing(tmp_path / "a", stored) == differing(tmp_path / "b", stored)
    again = AutoModel.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    model: Any = quantize_experts(make_model("qwen3_moe", tie_word_embeddings=True))
    save_packed(model, tmp_path / "out")
    assert "lm_head.weight" not in stored_as(tmp_path / "out")
    same_model(model, tmp_path / "out")


def test_a_copy_of_a_model_saves_too(tmp_path: Path) -> None:
    model = copy.deepcopy(load(GOLDEN / COMPRESSED_TENSORS, dtype=torch.bfloat16))
    model.save_pretrained(tmp_path)
    assert differing(tmp_path, load_file(GOLDEN / COMPRESSED_TENSORS / "model.safetensors")) == set()


def test_adapters_are_saved_by_themselves(tmp_path: Path) -> None:
    model = load(GOLDEN / QWEN)
    add_lora(model, r=2, alpha=4)
    for save in (model.save_pretrained, lambda folder: save_packed(model, folder)):
        with pytest.raises(CheckpointError, match="belongs to an adapter, which packed checkpoints do not hold"):
            save(tmp_path / "out")
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    peft_model = get_peft_model(load(GOLDEN / QWEN), config)
    with pytest.raises(CheckpointError, match="belongs to an adapter"):
        save_packed(peft_model.base_model.model, tmp_path / "out")
    peft_model.save_pretrained(tmp_path / "adapter")
    assert {path.suffix for path in (tmp_path / "adapter").iterdir()} >= {".safetensors", ".json"}
    added = load(GOLDEN / QWEN)
    added.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    added.save_pretrained(tmp_path / "added")
    assert json.loads((tmp_path / "added" / "adapter_config.json").read_text())["r"] == 2
    assert not (tmp_path / "added" / "model.safetensors").exists()


@pytest.mark.parametrize("way", ["save_pretrained", "save_packed"])
def test_saving_tells_of_numerics_that_are_not_saved(way: str, tmp_path: Path) -> None:
    """Once, and only where there are some."""
    model = load(GOLDEN / QWEN)

    def told(folder: str) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if way == "save_packed":
                save_packed(model, tmp_path / folder)
            else:
                model.save_pretrained(tmp_path / folder)
        return [str(warning.message) for warning in found if "set_numerics" in str(warning.message)]

    assert told("default") == []
    count = set_numerics(model, compute="w4a4", merge_aware=True)
    assert told("changed") == [
        f"{count} of {count} packed modules compute w4a4, merge-aware, which a packed checkpoint does not hold: loaded "
        "again they are w4a16 and not merge-aware. After loading call "
        'torch_nvfp4.set_numerics(model, compute="w4a4", merge_aware=True)'
    ]
    assert {m.compute for m in load(tmp_path / "changed").modules() if isinstance(m, NVFP4Experts)} == {"w4a16"}
    set_numerics(model, merge_aware=False)
    use_input_scales(model)
    (text,) = told("calibrated")
    assert f"{count} packed modules compute w4a4, calibrated, which" in text
    assert text.endswith('set_numerics(model, compute="w4a4"), then torch_nvfp4.checkpoint.use_input_scales(model)')
