"""Checkpoints of many architectures under their exporters' names: loaded packed, they compute what their twins do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_models import grads, load, logits, read_config, write
from hf_models import assert_same_grads, randomize_adapters
from packed_models import COMPRESSED, W123, Style, export, make_stock, make_stock_with_vision
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText

from torch_nvfp4.checkpoint import convert_folder, open_checkpoint
from torch_nvfp4.format import dequantize, quantize
from torch_nvfp4.hf import pack_on_load
from torch_nvfp4.nn import NVFP4Experts, NVFP4Linear

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
MIXTRAL = ((r"\.mlp\.", ".block_sparse_moe."), *((rf"(experts\.\d+\.){old}", rf"\1{new}") for old, new in W123))
NEMOTRON = ((r"^model\.", "backbone."), (r"embed_tokens", "embeddings"))
CASES: dict[str, tuple[str, Style]] = {
    "qwen2_moe": ("qwen2_moe", Style()),
    "qwen3_next": ("qwen3_next", Style()),
    "qwen3_5_moe": ("qwen3_5_moe", Style()),
    "deepseek_v3": ("deepseek_v3", Style()),
    "glm4_moe": ("glm4_moe", Style()),
    "mixtral, w1 w3 w2": ("mixtral", Style(renames=MIXTRAL)),
    "minimax_m2, w1 w3 w2": ("minimax_m2", Style(renames=MIXTRAL)),
    "nemotron_h, latent": ("nemotron_h", Style(renames=NEMOTRON)),
    "llama4, one tensor": ("llama4", Style(fused=True)),
    "gemma4": ("gemma4", Style()),
    "glm_moe_dsa": ("glm_moe_dsa", Style()),
    "qwen2_moe, lm_head packed": ("qwen2_moe", Style(linears=r"(proj|lm_head)$")),
    "glm4_moe, experts alone, MXFP4": ("glm4_moe", Style(linears=r"^$", format="mxfp4")),
    "mixtral, compressed-tensors": ("mixtral", Style(**COMPRESSED)),
    "deepseek_v3, compressed-tensors": ("deepseek_v3", Style(**COMPRESSED, linears=r"mlp\..*proj$")),
    "llama4, compressed-tensors": ("llama4", Style(**COMPRESSED)),
    "gpt_oss, compressed-tensors": ("gpt_oss", Style(**COMPRESSED)),
    "gpt_oss, compressed-tensors, MXFP4": ("gpt_oss", Style(**COMPRESSED, format="mxfp4")),
}
COMPILED = ("llama4, one tensor",)  # whose block is no stock one


def assert_same_logits(model: nn.Module, twin: nn.Module) -> None:
    expected = logits(twin)
    error = (logits(model) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5  # fp32 sums in another order


def packed_modules(model: nn.Module, kind: type) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


@pytest.mark.parametrize("case", CASES)
def test_a_packed_model_computes_and_trains_as_its_twin(case: str, tmp_path: Path) -> None:
    architecture, style = CASES[case]
    twin = make_stock(architecture)
    linears = export(twin, tmp_path / "packed", style)
    model, checkpoint = load(tmp_path / "packed"), open_checkpoint(tmp_path / "packed")
    decoded = 2 if architecture == "glm_moe_dsa" else 0  # the indexer's weights_proj, which is asked for its dtype
    assert len(packed_modules(model, NVFP4Experts)) == len(checkpoint.experts) > 0
    assert len(packed_modules(model, NVFP4Linear)) == linears - decoded == len(checkpoint.linears) - decoded
    assert_same_logits(model, twin)

    gated = next(iter(packed_modules(model, NVFP4Experts).values())).gated
    parameters = [f"experts.{name}" for name in ("gate_up_proj" if gated else "up_proj", "down_proj")]
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=parameters))
    randomize_adapters(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    stock = PeftModel.from_pretrained(twin, tmp_path / "adapter", is_trainable=True)
    compiled = torch.compile(adapted, fullgraph=True, backend="aot_eager") if case in COMPILED else None
    assert_same_grads(grads(adapted, compiled), grads(stock))


def test_a_language_model_inside_a_larger_one(tmp_path: Path) -> None:
    """Under `model.language_model.`, beside a vision tower that stays as it is and a prediction layer of no model."""
    twin = make_stock_with_vision()
    linears = export(twin, tmp_path, Style())
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"mtp.{name}": t.clone() for name, t in tensors.items() if "layers.1.mlp" in name}
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any(name.startswith("model.language_model.layers.0.mlp.experts.3.") for name in tensors)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(packed_modules(model, NVFP4Experts)) == 2 and len(packed_modules(model, NVFP4Linear)) == linears
    assert not any("visual" in name for name in packed_modules(model, NVFP4Linear))
    assert_same_logits(model, twin)
    for name, parameter in model.model.visual.named_parameters():
        assert torch.equal(parameter, twin.model.visual.get_parameter(name).detach().bfloat16().float())


def test_a_dense_layer_of_experts_among_packed_ones(tmp_path: Path) -> None:
    twin = make_stock("mixtral")
    export(twin, tmp_path, Style())
    other = make_stock("mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if "layers.1.mlp.experts" not in name}
    experts = other.model.layers[1].mlp.experts
    twin.model.layers[1].mlp.experts.load_state_dict(experts.state_dict())
    for e in range(4):
        for role, weight in zip(("w1", "w3"), experts.gate_up_proj[e].detach().chunk(2), strict=True):
            kept[f"model.layers.1.block_sparse_moe.experts.{e}.{role}.weight"] = weight.bfloat16().clone()
        kept[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"] = experts.down_proj[e].detach().bfloat16()
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert list(packed_modules(model, NVFP4Experts)) == ["model.layers.0.mlp.experts"]
    assert_same_logits(model, twin)


def test_what_is_decoded_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An embedding cannot be packed here, and FP8 layers are not kept: with blocks of 128, a row or one scale."""
    twin = make_stock("qwen2_moe")
    export(twin, tmp_path, Style())
    tensors = load_file(tmp_path / "model.safetensors")
    q, k, v = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    for stem, leaf in ((q, "weight_scale_inv"), (k, "weight_scale"), (v, "weight_scale")):
        values = twin.get_parameter(f"{stem}.weight").detach()
        for name in [name for name in tensors if name.startswith(f"{stem}.weight")]:
            del tensors[name]
        scale = torch.full({q: (1, 1), k: (len(values), 1), v: ()}[stem], 0.03125)
        tensors |= {f"{stem}.weight": (values / 0.03125).to(torch.float8_e4m3fn), f"{stem}.{leaf}": scale}
        twin.get_parameter(f"{stem}.weight").data = tensors[f"{stem}.weight"].float() * 0.03125
    codes, scales, global_scale = quantize(tensors.pop("model.embed_tokens.weight"))
    name = "model.embed_tokens.weight"
    tensors |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": global_scale.reshape(())}
    twin.model.embed_tokens.weight.data = dequantize(codes, scales, global_scale, torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert "3 FP8 weights were decoded to torch.float32" in caplog.text
    assert "1 4-bit weights were decoded to torch.float32: model.embed_tokens" in caplog.text
    assert_same_logits(model, twin)


@pytest.mark.parametrize(
    ("renames", "text"),
    [
        (
            ((r"mlp\.experts\.", "mlp.experts.experts."),),
            "model.layers.0.mlp.experts.experts: the checkpoint quantises it",
        ),
        (
            ((r"self_attn\.q_proj", "self_attn.query"),),
            "has model.layers.0.self_attn, but nothing called 'query' there",
        ),
    ],
)
def test_a_layer_under_another_name_is_refused(tmp_path: Path, renames: Any, text: str) -> None:
    """It would be left out, and the model's own would be random numbers."""
    export(make_stock("mixtral"), tmp_path, Style(renames=renames))
    with pytest.raises(ValueError, match=re.escape(text)):
        load(tmp_path)


def test_deepseek_v4_as_released(tmp_path: Path) -> None:
    """Experts in MXFP4 as int8, attention in FP8 by blocks, the names of its own code: asked for, or converted."""
    twin = make_stock("deepseek_v4")
    twin.save_pretrained(tmp_path / "dense")
    released: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, weight in load_file(tmp_path / "dense" / "model.safetensors").items():
        scale = name.removesuffix("weight") + "scale"
        if re.search(r"\.experts\.\d+\.w[123]\.weight", name):
            codes, scales, global_scale = quantize(weight.float(), format="mxfp4")
            released |= {name: codes.view(torch.int8), scale: scales}
            dense[name] = dequantize(codes, scales, global_scale, torch.float32)
        elif re.search(r"attn\.(wq_a|wq_b|wkv)\.weight", name):
            half = torch.tensor([[126]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
            released |= {name: (weight / 0.5).to(torch.float8_e4m3fn), scale: half.clone()}
            dense[name] = released[name].float() * 0.5
        else:
            released[name] = dense[name] = weight
    config = read_config(tmp_path / "dense") | {"expert_dtype": "fp4"}
    method = {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    write(tmp_path / "released", released, config, method)
    write(tmp_path / "twin", dense, read_config(tmp_path / "dense"), None)
    convert_folder(tmp_path / "released", tmp_path / "converted", layout="modelopt")
    twin = load(tmp_path / "twin")
    pack_on_load("fp8")
    try:
        models = [load(tmp_path / "released"), load(tmp_path / "converted")]
    finally:
        pack_on_load("fp8", False)
    for model in models:
        assert len(packed_modules(model, NVFP4Experts)) == 2
        assert_same_logits(model, twin)


def test_a_config_that_names_no_architecture_here_still_reads(tmp_path: Path) -> None:
    export(make_stock("glm4_moe"), tmp_path, Style())
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "of_tomorrow"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    experts = checkpoint.load_experts("model.layers.1.mlp.experts")
    assert experts.gate_up.codes.shape == (4, 64, 32) and experts.gate_up.global_scale.shape == (4, 2)
