"""Adapters of packed models in stock PEFT on the dense model, and stock PEFT's adapters on packed models."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from hf_models import ARCHITECTURES, logits, quantized_and_dense, randomize_adapters
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from torch_nvfp4 import hf
from torch_nvfp4.lora import adapter_state_dict, add_lora, export_adapter, load_adapter, save_adapter

SAME = dict(rtol=0, atol=1e-5)  # fp32 models; logits are of order 1
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OPTIONS: dict[str, dict[str, object]] = {
    "same rank": dict(r=4, alpha=8),
    "ranks differ, rslora": dict(r=4, alpha=8, expert_r=3, rslora=True),
    "ranks differ": dict(r=2, alpha=7.5, expert_r=5),
    "experts alone": dict(r=3, alpha=6, targets=("experts",)),
    "down alone": dict(r=3, alpha=6, targets=("experts.down_proj", "q_proj")),
    "gate_up alone": dict(r=3, alpha=6, targets=("experts.gate_up_proj",)),
    "linear alone": dict(r=3, alpha=6, targets=("q_proj",)),
}
# every architecture with differing ranks, every option on gpt-oss (interleaved) and on one canonical layout
CASES = [(name, "ranks differ, rslora") for name in ARCHITECTURES]
CASES += [(name, option) for name in ("qwen3_moe", "gpt_oss") for option in OPTIONS if option != CASES[0][1]]


pytestmark = pytest.mark.usefixtures("one_thread")


def load_with_stock_peft(dense: torch.nn.Module, directory: Path) -> PeftModel:
    """PeftModel.from_pretrained, where a warning (missing or unexpected keys, targets) is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # transformers' deprecations that PEFT meets
        return PeftModel.from_pretrained(dense, directory).eval()


@pytest.mark.parametrize(("architecture", "option"), CASES)
def test_stock_peft_gives_the_same_logits(tmp_path: Path, architecture: str, option: str) -> None:
    packed, dense = quantized_and_dense(architecture)
    bare = logits(packed)
    add_lora(packed, **({"targets": ("experts", "q_proj", "o_proj")} | OPTIONS[option]))
    randomize_adapters(packed)
    save_adapter(packed, tmp_path)
    stock = load_with_stock_peft(dense, tmp_path)
    expected = logits(stock)
    torch.testing.assert_close(logits(packed), expected, **SAME)
    assert (expected - bare).abs().max() > 0.05, "the adapter must show"
    written = load_file(tmp_path / "adapter_model.safetensors")
    held = {n.replace(".default", ""): p for n, p in stock.named_parameters() if "lora_" in n}
    assert held.keys() == written.keys() and all(torch.equal(held[key], written[key]) for key in written)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_targets_come_from_the_module_names(tmp_path: Path, architecture: str) -> None:
    packed, _ = quantized_and_dense(architecture)
    add_lora(packed, r=2, targets=("experts", "q_proj"))
    save_adapter(packed, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_parameters"] == BOTH and config["target_modules"] == ["q_proj"]
    assert config["task_type"] == "CAUSAL_LM" and config["peft_type"] == "LORA"


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_an_adapter_that_stock_peft_saved(tmp_path: Path, architecture: str) -> None:
    packed, dense = quantized_and_dense(architecture)
    config = LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"o_proj": 9},
        target_modules=["q_proj", "o_proj"], target_parameters=BOTH,
    )  # fmt: skip
    stock = get_peft_model(dense, config).eval()
    randomize_adapters(stock)
    stock.save_pretrained(tmp_path)
    load_adapter(packed, tmp_path)
    torch.testing.assert_close(logits(packed), logits(stock), **SAME)
    written, held = load_file(tmp_path / "adapter_model.safetensors"), adapter_state_dict(packed)
    assert held.keys() == written.keys() and all(torch.equal(held[key], written[key]) for key in written)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v3"])
def test_linear_layers_named_like_an_experts_projections(tmp_path: Path, architecture: str) -> None:
    """Shared experts, dense MLPs: PEFT would take a module `down_proj` for the experts' and drop it."""
    packed, dense = quantized_and_dense(architecture)
    add_lora(packed, r=2, alpha=4, targets=("experts", "down_proj", "gate_proj", "q_proj"))
    randomize_adapters(packed)
    save_adapter(packed, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj"]
    shared = "shared_expert" if architecture == "qwen2_moe" else "shared_experts"
    assert f"mlp.{shared}.down_proj.weight" in config["target_parameters"]
    torch.testing.assert_close(logits(packed), logits(load_with_stock_peft(dense, tmp_path)), **SAME)
    again, _ = quantized_and_dense(architecture)
    load_adapter(again, tmp_path)
    assert torch.equal(logits(again), logits(packed))


def test_an_adapter_on_one_layer_of_several(tmp_path: Path) -> None:
    packed, dense = quantized_and_dense("gpt_oss")
    add_lora(packed, r=2, alpha=4, targets=("layers.0.mlp.experts.down_proj", "layers.1.self_attn.k_proj"))
    randomize_adapters(packed)
    save_adapter(packed, tmp_path)
    torch.testing.assert_close(logits(packed), logits(load_with_stock_peft(dense, tmp_path)), **SAME)


PEFT_GOLDEN = Path(__file__).parent / "golden" / "peft_qwen3_moe"


def test_the_2d_layout_is_the_golden_one(tmp_path: Path) -> None:
    """PEFT's 3D adapter, loaded here and exported: key for key and bit for bit the same adapter in 2D."""
    config = AutoConfig.for_model(**json.loads((PEFT_GOLDEN / "base_config.json").read_text()))
    packed = hf.quantize_experts(AutoModelForCausalLM.from_config(config))
    load_adapter(packed, PEFT_GOLDEN / "adapter_3d")
    export_adapter(packed, tmp_path)
    written, golden = (load_file(d / "adapter_model.safetensors") for d in (tmp_path, PEFT_GOLDEN / "adapter_2d"))
    assert written.keys() == golden.keys() and all(torch.equal(written[key], golden[key]) for key in golden)
    told, wanted = (json.loads((d / "adapter_config.json").read_text()) for d in (tmp_path, PEFT_GOLDEN / "adapter_2d"))
    assert set(told["target_modules"]) == set(wanted["target_modules"]) and told["target_parameters"] is None
    assert (told["r"], told["lora_alpha"], told["task_type"]) == (wanted["r"], wanted["lora_alpha"], "CAUSAL_LM")


def test_the_2d_layout_gives_the_same_logits_in_stock_peft(tmp_path: Path) -> None:
    packed, dense = quantized_and_dense("qwen3_moe")
    add_lora(packed, r=4, alpha=6, targets=("experts", "q_proj"))
    randomize_adapters(packed)
    export_adapter(packed, tmp_path, layout="2d")
    torch.testing.assert_close(logits(packed), logits(PeftModel.from_pretrained(dense, tmp_path).eval()), **SAME)


@pytest.mark.parametrize(
    "targets",
    [
        ("layers.0.self_attn.q_proj",),
        ("layers.1.mlp.shared_expert.down_proj", "o_proj"),
        ("layers.1.mlp.shared_expert.up_proj", "layers.0.mlp.experts.down_proj", "layers.0.self_attn.q_proj"),
        ("layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"),
    ],
)
def test_the_2d_layout_of_some_layers_alone(tmp_path: Path, targets: tuple[str, ...]) -> None:
    packed, dense = quantized_and_dense("qwen2_moe")
    add_lora(packed, r=4, alpha=6, targets=targets)
    randomize_adapters(packed)
    export_adapter(packed, tmp_path, layout="2d")
    again, _ = quantized_and_dense("qwen2_moe")
    load_adapter(again, tmp_path)
    written, read = adapter_state_dict(packed), adapter_state_dict(again)
    assert written.keys() == read.keys() and all(torch.equal(written[key], read[key]) for key in written)
    assert torch.equal(logits(again), logits(packed))
    if targets == ("layers.0.self_attn.q_proj",):
        torch.testing.assert_close(logits(packed), logits(load_with_stock_peft(dense, tmp_path)), **SAME)


def test_what_the_2d_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    packed, _ = quantized_and_dense("gpt_oss")
    with pytest.raises(ValueError, match="no adapters"):
        export_adapter(packed, tmp_path)
    add_lora(packed, r=4, targets=("experts",))
    with pytest.raises(ValueError, match="rows alternate"):
        export_adapter(packed, tmp_path)
    packed, _ = quantized_and_dense("qwen3_moe")
    add_lora(packed, r=4, expert_r=2)
    with pytest.raises(ValueError, match="one rank and one alpha"):
        export_adapter(packed, tmp_path)
    assert not list(tmp_path.iterdir())
