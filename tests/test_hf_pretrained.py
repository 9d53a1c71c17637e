"""Packed checkpoints through `from_pretrained`: what loads, what it computes, how it trains, what is refused."""

import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from golden_models import (
    CHECKPOINTS,
    COMPRESSED_TENSORS,
    GOLDEN,
    QWEN,
    grads,
    load,
    logits,
    read_config,
    token_ids,
    write,
    write_dense,
)
from hf_models import assert_same_grads, make_model, randomize_adapters
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.quantizers.auto import AutoQuantizationConfig

from torch_nvfp4._hf.load import place
from torch_nvfp4.checkpoint import Checkpoint, LinearEntry, PackedExperts, open_checkpoint, quantize_folder
from torch_nvfp4.format import quantize
from torch_nvfp4.hf import PackedConfig, pack_on_load, quantize_experts
from torch_nvfp4.lora import load_adapter
from torch_nvfp4.nn import NVFP4Experts, NVFP4Linear

TIGHT = dict(rtol=1e-5, atol=5e-6)  # fp32 sums in another order
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def packed_modules(model: nn.Module, kind: type) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def lora_config(model: nn.Module) -> LoraConfig:
    """Adapters on all packed weights of the model."""
    linears = {name.rpartition(".")[2] for name in packed_modules(model, NVFP4Linear) if "shared" not in name}
    first = "gate_up_proj" if next(iter(packed_modules(model, NVFP4Experts).values())).gated else "up_proj"
    parameters = [f"experts.{name}" for name in (first, "down_proj")]
    return LoraConfig(r=2, lora_alpha=4, target_modules=sorted(linears), target_parameters=parameters)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_golden_checkpoint_loads_packed_and_computes_its_makers_weights(name: str, tmp_path: Path) -> None:
    model, checkpoint = load(GOLDEN / name), open_checkpoint(GOLDEN / name)
    experts, linears = packed_modules(model, NVFP4Experts), packed_modules(model, NVFP4Linear)
    assert len(experts) == len(checkpoint.experts) > 0 and len(linears) == len(checkpoint.linears) > 0
    for module, path in zip(experts.values(), checkpoint.experts, strict=True):
        stored = checkpoint.load_experts(path)
        for projection in ("gate_up", "down"):
            codes, scales, _ = module.packed(projection)
            assert torch.equal(codes, getattr(stored, projection).codes)
            assert torch.equal(scales.view(torch.uint8), getattr(stored, projection).scales.view(torch.uint8))
        assert not module.training
    assert not any(p.requires_grad for module in (experts | linears).values() for p in module.parameters())
    assert not any(p.is_meta for p in model.parameters())
    dense = load(write_dense(name, tmp_path))
    torch.testing.assert_close(logits(model), logits(dense), **TIGHT)


# W4A16 differs from its twin in what its exporter recorded of activations, not in the graph
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "W4A16" not in name])
def test_a_compiled_training_step_has_stock_pefts_gradients_on_the_dense_model(name: str, tmp_path: Path) -> None:
    model = load(GOLDEN / name)
    model = get_peft_model(model, lora_config(model))
    randomize_adapters(model)
    model.save_pretrained(tmp_path / "adapter")
    dense = load(write_dense(name, tmp_path / "dense"))
    stock = PeftModel.from_pretrained(dense, tmp_path / "adapter", is_trainable=True)
    expected = grads(stock)
    assert_same_grads(grads(model, torch.compile(model, fullgraph=True, backend="aot_eager")), expected)
    assert any("experts" in key and grad.abs().max() > 0 for key, grad in expected.items())


@torch._inductor.config.patch({"aot_inductor.debug_compile": True, "cpp.simdlen": 1})  # C++ that compiles fast
def test_trainer_compiles_with_inductor_and_trains_a_step(tmp_path: Path) -> None:
    model = load(GOLDEN / QWEN)
    model = get_peft_model(model, lora_config(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=2, learning_rate=0.1, torch_compile=True,
        use_cpu=True, report_to=[], save_strategy="steps", save_steps=1,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in token_ids()]
    Trainer(model, arguments, train_dataset=rows).train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_B" in name for name in changed)  # B is zero, so A's gradient is
    saved = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    assert any("experts.base_layer.lora_B" in key for key in saved)


def test_the_dtype_is_the_checkpoints_or_the_callers(tmp_path: Path) -> None:
    name = "ckpt_modelopt_gpt_oss-NVFP4_DEFAULT_CFG"
    model = load(GOLDEN / name, dtype="auto")
    floating = {p.dtype for key, p in model.named_parameters() if p.is_floating_point()}
    assert model.dtype == torch.bfloat16 and floating == {torch.bfloat16}
    found = logits(model)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), logits(load(write_dense(name, tmp_path))), rtol=0, atol=0.02)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_map(device_map: Any) -> None:
    expected = logits(load(GOLDEN / QWEN))
    model = load(GOLDEN / QWEN, device_map=device_map)
    assert torch.equal(logits(model), expected) and {p.device.type for p in model.parameters()} == {"cpu"}


def test_offload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="packed weights must lie on the device that runs them"):
        load(GOLDEN / QWEN, device_map={"": "disk"}, offload_folder=tmp_path)


def test_a_model_without_head_loads_from_a_checkpoint_with_one() -> None:
    whole = load(GOLDEN / QWEN)
    base = AutoModel.from_pretrained(GOLDEN / QWEN, dtype=torch.float32)
    assert packed_modules(base, NVFP4Experts).keys() == {"layers.0.mlp.experts"}
    found = base(input_ids=token_ids(), use_cache=False).last_hidden_state
    torch.testing.assert_close(whole.lm_head(found), logits(whole), **TIGHT)


def test_a_checkpoint_that_only_the_caller_declares(tmp_path: Path) -> None:
    for file in ("model.safetensors", "hf_quant_config.json"):
        shutil.copy(GOLDEN / QWEN / file, tmp_path)
    config = {key: value for key, value in read_config(GOLDEN / QWEN).items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, quantization_config=PackedConfig())
    assert torch.equal(logits(model), logits(load(GOLDEN / QWEN)))


def test_the_config_is_written_back_as_it_was(tmp_path: Path) -> None:
    model = load(GOLDEN / QWEN)
    model.config.save_pretrained(tmp_path)
    assert read_config(tmp_path)["quantization_config"] == read_config(GOLDEN / QWEN)["quantization_config"]


def test_dequantize_gives_the_stock_model_which_can_be_saved(tmp_path: Path) -> None:
    model = load(GOLDEN / QWEN)
    expected = logits(model)
    dense = model.dequantize()
    assert not packed_modules(dense, NVFP4Experts | NVFP4Linear)
    torch.testing.assert_close(logits(dense), expected, **TIGHT)
    dense.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), expected, **TIGHT)


def test_fp8_layers_are_decoded(tmp_path: Path) -> None:
    """An FP8 layer of a mixed checkpoint becomes a plain one with the decoded weight."""
    tensors, stem = load_file(GOLDEN / QWEN / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{stem}.")}
    tensors[f"{stem}.weight"] = torch.randn(32, 32).to(torch.float8_e4m3fn)
    tensors[f"{stem}.weight_scale"] = torch.tensor(0.5)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)  # of a cache: not the model's
    config = read_config(GOLDEN / QWEN)
    write(tmp_path, tensors, config, config["quantization_config"])
    layer = load(tmp_path).get_submodule(stem)
    assert type(layer) is nn.Linear and torch.equal(layer.weight, tensors[f"{stem}.weight"].float() * 0.5)


def test_fp8_experts_are_refused_and_an_fp8_layer_that_the_model_lacks_is_not() -> None:
    model = make_model("qwen3_moe")
    checkpoint: Any = SimpleNamespace(experts={}, linears={}, fp8=["model.layers.7.self_attn.q_proj.weight"])
    assert place(model, checkpoint).fp8 == {}
    checkpoint.fp8.append("model.layers.0.mlp.experts.3.up_proj.weight")
    with pytest.raises(ValueError, match="experts.3.up_proj.weight: FP8 experts are not supported"):
        place(model, checkpoint)


def gpt_oss_mxfp4(folder: Path) -> None:
    """A tiny gpt-oss in the layout of the released one: experts as blocks and scales, the rest bf16."""
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=32, dtype=torch.bfloat16)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        codes, scales, _ = quantize(tensors.pop(name).mT.contiguous(), format="mxfp4")
        tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = scales.view(torch.uint8)
    write(folder, tensors, model.config.to_dict(), {"quant_method": "mxfp4"})


@pytest.mark.parametrize(
    ("architecture", "format", "layout"),
    [
        ("qwen3_moe", "nvfp4", "modelopt"),
        ("mixtral", "nvfp4", "modelopt"),
        ("deepseek_v3", "mxfp4", "modelopt"),
        ("olmoe", "mxfp4", "compressed-tensors"),
    ],
)
def test_what_quantize_folder_writes_is_what_quantize_experts_packs(
    tmp_path: Path, architecture: str, format: str, layout: str
) -> None:
    width = "intermediate_size" if architecture in ("mixtral", "olmoe") else "moe_intermediate_size"
    model = make_model(architecture, hidden_size=64, **{width: 32})
    model.save_pretrained(tmp_path / "dense")
    options = dict(format=format, layout=layout, share_gate_up=False, shard_bytes=20_000)
    quantize_folder(tmp_path / "dense", tmp_path / "packed", **options)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    expected = quantize_experts(model, format)
    loaded = load(tmp_path / "packed")
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    assert torch.equal(logits(loaded), logits(expected))


def test_one_layer_at_a_time_is_held_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("qwen3_moe", num_hidden_layers=4).save_pretrained(tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "packed")
    read, alive, codes = Checkpoint.load_experts, [], []

    def counting(self: Checkpoint, path: str) -> PackedExperts:
        alive.append(sum(ref() is not None for ref in codes))
        experts = read(self, path)
        codes.append(weakref.ref(experts.gate_up.codes))
        return experts

    monkeypatch.setattr(Checkpoint, "load_experts", counting)
    load(tmp_path / "packed")
    assert alive == [0, 0, 0, 0]


def test_an_adapter_of_peft_loads_without_peft_too(tmp_path: Path) -> None:
    model = load(GOLDEN / QWEN)
    peft_model = get_peft_model(model, lora_config(model)).eval()
    randomize_adapters(peft_model)
    peft_model.save_pretrained(tmp_path)
    alone = load(GOLDEN / QWEN)
    load_adapter(alone, tmp_path)
    assert torch.equal(logits(alone), logits(peft_model))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gpt_oss_mxfp4_is_taken_over_on_request(tmp_path: Path) -> None:
    gpt_oss_mxfp4(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float()
    assert not packed_modules(stock, NVFP4Experts)  # on a CPU transformers dequantises
    pack_on_load("mxfp4")
    try:
        packed = load(tmp_path)
    finally:
        pack_on_load("mxfp4", False)
    experts = packed_modules(packed, NVFP4Experts)
    assert len(experts) == 2 and all(module.format == "mxfp4" for module in experts.values())
    torch.testing.assert_close(logits(packed), logits(stock), **TIGHT)
    assert not packed_modules(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), NVFP4Experts)


def test_compressed_tensors_is_taken_over_for_nvfp4_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nvfp4 = read_config(GOLDEN / COMPRESSED_TENSORS)["quantization_config"]
    assert isinstance(AutoQuantizationConfig.from_dict(nvfp4), PackedConfig)
    seen: list[dict[str, Any]] = []
    stock = type("CompressedTensorsConfig", (PackedConfig,), {"from_dict": classmethod(lambda cls, d: seen.append(d))})
    monkeypatch.setattr("torch_nvfp4._hf.quantizer._STOCK", {"compressed-tensors": stock})
    try:
        pack_on_load("compressed-tensors")
        other = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        assert AutoQuantizationConfig.from_dict(other) is None and seen == [other]
        pack_on_load("compressed-tensors", False)
        assert AutoQuantizationConfig.from_dict(nvfp4) is None and seen == [other, nvfp4]
    finally:
        monkeypatch.undo()
        pack_on_load("compressed-tensors")
    with pytest.raises(ValueError, match="must be one of compressed-tensors, mxfp4, fp8, got 'gptq'"):
        pack_on_load("gptq")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_act": "relu"}, r"cannot pack Qwen3MoeExperts at model.layers.0.mlp.experts: its activation"),
        ({"moe_intermediate_size": 32}, r"the model's experts have \(E, H, I, gate, bias\) = \(3, 32, 32, True, False"),
        ({"num_local_experts": 4, "num_experts": 4}, "has 3 experts, config.json states num_local_experts = 4"),
        ({"head_dim": 32}, r"k_proj: the model's weight is \[32, 32\], the checkpoint's \[16, 32\]"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_words(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    shutil.copy(GOLDEN / QWEN / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(read_config(GOLDEN / QWEN) | changes))
    with pytest.raises(ValueError, match=text):
        load(tmp_path)


def test_what_is_no_plain_linear_or_has_no_flags_is_refused() -> None:
    model = make_model("qwen3_moe")
    router = "model.layers.0.mlp.gate"
    entry = LinearEntry(router, "nvfp4", 5, 32, ())
    checkpoint: Any = SimpleNamespace(experts={}, linears={router: entry}, fp8={})
    with pytest.raises(ValueError, match=f"{router}: .*Qwen3MoeTopKRouter is no plain nn.Linear"):
        place(model, checkpoint)
    stored = open_checkpoint(GOLDEN / QWEN)
    experts = model.model.layers[0].mlp.experts
    del experts.has_gate
    if hasattr(experts, "has_gate"):
        pytest.fail("the flag is not the instance's")
    with pytest.raises(ValueError, match="does not carry the flags of transformers' experts interface"):
        place(model, stored)


def test_parallel_plans_are_refused() -> None:
    config = AutoConfig.from_pretrained(GOLDEN / QWEN)
    config.distributed_config = {"tp_size": 2}  # what from_pretrained sets, where processes are there for it
    with pytest.raises(ValueError, match="shard dense experts, not packed ones: load the model whole"):
        AutoModelForCausalLM.from_pretrained(GOLDEN / QWEN, config=config)


def test_files_are_needed() -> None:
    config = AutoConfig.from_pretrained(GOLDEN / QWEN)
    state = load_file(GOLDEN / QWEN / "model.safetensors")
    with pytest.raises(ValueError, match="a state_dict alone does not do"):
        type(load(GOLDEN / QWEN)).from_pretrained(None, config=config, state_dict=state)


def test_packing_a_loaded_model_again_is_refused() -> None:
    with pytest.raises(ValueError, match="its experts are packed already"):
        quantize_experts(load(GOLDEN / QWEN))
