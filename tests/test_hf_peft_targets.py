"""What PEFT's targets reach on a packed model: experts, shared experts, the router, and what is refused in words."""

import warnings
from typing import Any

import pytest
import torch
from hf_models import ONE_LAYER, assert_same_grads, logits, quantized_and_dense, randomize_adapters, train_step
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from torch_nvfp4.nn import NVFP4Linear

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
V4 = ["gate_proj", "up_proj", "down_proj"]
SAME = dict(rtol=0, atol=1e-5)  # fp32 models; logits are of order 1
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT 0.21 honours a pattern that names a parameter, and says that it did not
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def adapt(model: nn.Module, **targets: Any) -> PeftModel:
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, **targets))
    randomize_adapters(adapted)
    return adapted.eval()


REACHED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "experts by their names in transformers 4": ("qwen3_moe", {"target_modules": V4}, {"experts"}),
    "mixtral's experts likewise": ("mixtral", {"target_modules": ["w1", "w2", "w3"]}, {"experts"}),
    "shared experts": ("qwen2_moe", {"target_modules": V4}, {"shared_expert"}),
    "shared and routed experts": (
        "qwen2_moe",
        {"target_modules": ["shared_expert.down_proj"], "target_parameters": BOTH},
        {"experts", "shared_expert"},
    ),
    "shared experts by their parameters": (
        "deepseek_v3",
        {"target_parameters": ["shared_experts.gate_proj.weight", "shared_experts.down_proj.weight", *BOTH]},
        {"experts", "shared_experts"},
    ),
    "the router": ("qwen3_moe", {"target_modules": ["mlp.gate"]}, {"gate"}),
    "router and experts": ("mixtral", {"target_modules": ["gate"], "target_parameters": BOTH}, {"gate", "experts"}),
    "the router's parameter": ("qwen2_moe", {"target_parameters": ["mlp.gate.weight", *BOTH]}, {"gate", "experts"}),
    "gpt-oss's router": ("gpt_oss", {"target_parameters": ["router.weight", *BOTH]}, {"router", "experts"}),
    "all linear layers": (
        "qwen3_moe",
        {"target_modules": "all-linear"},
        {"experts", "gate", "q_proj", "k_proj", "v_proj", "o_proj"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REACHED)
def test_targets_reach_what_they_reach_in_stock_peft(case: str) -> None:
    architecture, targets, reached = REACHED[case]
    packed, dense = quantized_and_dense(architecture, **ONE_LAYER[architecture])
    bare = logits(packed)
    ours, stock = adapt(packed, **targets), adapt(dense, **targets)
    expected = logits(stock)
    torch.testing.assert_close(logits(ours), expected, **SAME)
    assert (expected - bare).abs().max() > 0.01, "the adapter must show"
    grads = train_step(ours)
    assert_same_grads(grads, train_step(stock))
    places = {name.split(".layers.0.")[1].split(".lora_")[0].removesuffix(".base_layer") for name in grads}
    assert {part for place in places for part in place.split(".")[1:2]} == reached
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), expected, **SAME)
    with ours.disable_adapter():
        assert torch.equal(logits(ours), bare)
    assert torch.equal(logits(ours.unload()), bare)


NAMES = "experts are named in target_parameters, by 'experts.gate_up_proj'"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gate alone": ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj"]}, "gate_proj without also targeting up_pr"),
    "up alone": ("mixtral", {"target_modules": ["w3"]}, "w3 without also targeting w1"),
    "gate alone, as a parameter": (
        "qwen3_moe",
        {"target_parameters": ["experts.gate_proj", "experts.down_proj"]},
        f"target_parameters: 'experts.gate_proj' matches nothing in Qwen3MoeForCausalLM: {NAMES}",
    ),
    "another model's names": (
        "mixtral",
        {"target_modules": ["q_proj", *V4]},
        f"target_modules: 'down_proj' matches nothing in MixtralForCausalLM: {NAMES}",
    ),
    "shared experts that there are not": (
        "qwen3_moe",
        {"target_modules": ["shared_expert.down_proj"]},
        "'shared_expert.down_proj' matches nothing in Qwen3MoeForCausalLM",
    ),
    "shared experts that PEFT takes for routed ones": (
        "deepseek_v3",
        {"target_modules": ["shared_experts.down_proj"]},
        "PEFT takes 'shared_experts.down_proj' for .*in target_parameters, as 'mlp.shared_experts.down_proj.weight'",
    ),
    "a router PEFT does not know": ("qwen2_moe", {"target_modules": ["mlp.gate"]}, "TopKRouter.* is not supported"),
    "any parameter that there is not": (
        "gpt_oss",
        {"target_parameters": [*BOTH, "gate.weight"]},
        "target_parameters: 'gate.weight' matches nothing in GptOssForCausalLM$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_targets_do_not_reach_is_refused_in_words(case: str) -> None:
    architecture, targets, text = REFUSED[case]
    packed, _ = quantized_and_dense(architecture, **ONE_LAYER[architecture])
    expected = logits(packed)
    with pytest.raises(ValueError, match=text):
        get_peft_model(packed, LoraConfig(r=2, **targets))
    assert torch.equal(logits(packed), expected)


def test_a_target_of_which_peft_drops_a_part_is_warned_about() -> None:
    packed, _ = quantized_and_dense("deepseek_v3", **ONE_LAYER["deepseek_v3"])
    with pytest.warns(UserWarning, match="'down_proj' for the routed experts.* alone. 1 layers of that name get no"):
        get_peft_model(packed, LoraConfig(r=2, target_modules=["down_proj"]))


def test_a_second_adapter_is_checked_under_the_stock_names() -> None:
    packed, _ = quantized_and_dense("qwen2_moe", **ONE_LAYER["qwen2_moe"])
    path = "model.layers.0.mlp.shared_expert.up_proj"
    packed.set_submodule(path, NVFP4Linear.from_dense(packed.get_submodule(path)))
    targets = {"target_modules": ["shared_expert.up_proj", "q_proj"], "target_parameters": BOTH}
    model = adapt(packed, **targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.add_adapter("second", LoraConfig(r=3, **targets))
    with pytest.raises(ValueError, match="target_parameters: 'experts.up_proj' matches nothing in Qwen2Moe"):
        model.add_adapter("third", LoraConfig(r=3, target_parameters=["experts.up_proj"]))
