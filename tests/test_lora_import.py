"""Adapters that others wrote: PEFT in both layouts and both orientations, Unsloth, axolotl, Mixtral's old names."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden_models import GOLDEN
from hf_models import ONE_LAYER, assert_same_grads, logits, quantized_and_dense, randomize_adapters
from lora_toy import HIDDEN, INTER, Toy, delta, trained
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torch_nvfp4.hf import dequantize_experts, quantize_experts
from torch_nvfp4.lora import adapter_state_dict, add_lora, export_adapter, load_adapter, save_adapter

ADAPTER = GOLDEN / "peft_qwen3_moe"
SAME = dict(rtol=0, atol=1e-5)  # fp32 models; logits are of order 1
PREFIX = "base_model.model."

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def read(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def write(folder: Path, state: dict[str, Tensor], **config: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict], object]) -> None:
    state, config = read(folder), json.loads((folder / "adapter_config.json").read_text())
    change(state, config)
    write(folder, state, **config)


def golden_base() -> nn.Module:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json_file(ADAPTER / "base_config.json"))
    model.load_state_dict(load_file(ADAPTER / "base_f32.safetensors"))
    return quantize_experts(model.eval())


def backward(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits; parameters have the gradients of a smooth function of them."""
    found = model(input_ids=ids, use_cache=False).logits
    found.logsumexp(-1).mean().backward()
    return found.detach()


def same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("form", ["adapter_3d", "adapter_2d"])
def test_golden_adapters_of_both_layouts_are_one_adapter(tmp_path: Path, form: str) -> None:
    """The logits and gradients of stock PEFT on the dequantised base, and both layouts written as they were read."""
    packed = golden_base()
    dense = dequantize_experts(copy.deepcopy(packed))
    load_adapter(packed, ADAPTER / form)
    assert same_state(adapter_state_dict(packed), read(ADAPTER / "adapter_3d"))
    export_adapter(packed, tmp_path, layout="2d")
    assert same_state(read(tmp_path), read(ADAPTER / "adapter_2d"))
    ids = load_file(ADAPTER / "expected.safetensors")["input_ids"]
    found = backward(packed, ids)
    stock = PeftModel.from_pretrained(dense, ADAPTER / "adapter_3d", is_trainable=True)
    expected = backward(stock, ids)
    torch.testing.assert_close(found, expected, **SAME)
    wanted = {n.replace(".default", ""): p.grad for n, p in stock.named_parameters() if p.requires_grad}
    with torch.no_grad():  # gradients in PEFT's layout: as factors are saved
        for parameter in packed.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    assert_same_grads(adapter_state_dict(packed), wanted)


def per_expert_adapter(r: int, *, names: tuple[str, str, str], path: str) -> dict[str, Tensor]:
    """Random factors for o_proj and each matrix of each expert, gate and up with an A each."""
    generator = torch.Generator().manual_seed(5)
    hidden, inter, experts = 32, 16, 5
    prefix = f"{PREFIX}model.layers.0"
    shapes = {f"{prefix}.self_attn.o_proj": (32, 32)}
    for e in range(experts):
        for name, shape in zip(names, ((inter, hidden), (inter, hidden), (hidden, inter)), strict=True):
            shapes[f"{prefix}.{path}.{e}.{name}"] = shape
    state = {}
    for key, (rows, columns) in shapes.items():
        state[f"{key}.lora_A.weight"] = 0.2 * torch.randn(r, columns, generator=generator)
        state[f"{key}.lora_B.weight"] = 0.2 * torch.randn(rows, r, generator=generator)
    return state


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
SPELLINGS = {
    "qwen3_moe": (GATE_UP_DOWN, "mlp.experts"),
    "mixtral": (("w1", "w3", "w2"), "block_sparse_moe.experts"),
}


@pytest.mark.parametrize("architecture", SPELLINGS)
def test_keys_for_each_expert_as_stock_peft_reads_them(tmp_path: Path, architecture: str) -> None:
    names, path = SPELLINGS[architecture]
    packed, dense = quantized_and_dense(architecture, **ONE_LAYER[architecture])
    bare = logits(packed)
    state = per_expert_adapter(3, names=names, path=path)
    write(tmp_path / "2d", state, r=3, lora_alpha=5, target_modules=["o_proj", *names])
    load_adapter(packed, tmp_path / "2d")
    expected = logits(PeftModel.from_pretrained(dense, tmp_path / "2d").eval())
    torch.testing.assert_close(logits(packed), expected, **SAME)
    assert (expected - bare).abs().max() > 0.05
    save_adapter(packed, tmp_path / "3d")
    again, dense = quantized_and_dense(architecture, **ONE_LAYER[architecture])
    torch.testing.assert_close(logits(PeftModel.from_pretrained(dense, tmp_path / "3d").eval()), expected, **SAME)
    load_adapter(again, tmp_path / "3d")
    assert torch.equal(logits(again), logits(packed))


@pytest.mark.parametrize("rslora", [False, True])
def test_gate_and_up_with_an_a_each_keep_their_deltas(tmp_path: Path, rslora: bool) -> None:
    packed, _ = quantized_and_dense("qwen3_moe", **ONE_LAYER["qwen3_moe"])
    state = per_expert_adapter(4, names=GATE_UP_DOWN, path="mlp.experts")
    write(tmp_path, state, use_rslora=rslora, alpha_pattern={"gate_proj": 6, "up_proj": 6},
          target_modules=r".*\.(o_proj|gate_proj|up_proj|down_proj)")  # fmt: skip
    load_adapter(packed, tmp_path)
    experts = packed.model.layers[0].mlp.experts
    root = 2 if rslora else 4  # sqrt(r) or r, r = 4
    for e in range(5):
        parts = []
        for name in GATE_UP_DOWN:
            key = f"{PREFIX}model.layers.0.mlp.experts.{e}.{name}"
            alpha = 8 if name == "down_proj" else 6
            parts.append(alpha / root * state[f"{key}.lora_B.weight"] @ state[f"{key}.lora_A.weight"])
        torch.testing.assert_close(delta(experts, "gate_up")[e], torch.cat(parts[:2]))
        torch.testing.assert_close(delta(experts, "down")[e], parts[2])


def test_stock_peft_makes_gate_and_up_stronger_under_rslora(tmp_path: Path) -> None:
    """The claim of the documentation: by sqrt(2), and so not as the adapter was trained."""
    _, dense = quantized_and_dense("qwen3_moe", **ONE_LAYER["qwen3_moe"])
    state = per_expert_adapter(4, names=GATE_UP_DOWN, path="mlp.experts")
    write(tmp_path, state, use_rslora=True, target_modules=["o_proj", *GATE_UP_DOWN])
    wrapper = PeftModel.from_pretrained(dense, tmp_path).base_model.model.model.layers[0].mlp.experts.base_layer
    assert wrapper.parameter_name == "gate_up_proj"
    assert wrapper.scaling["default"] == pytest.approx(2**0.5 * 8 / 4**0.5)


def test_shared_experts_beside_keys_for_each_expert(tmp_path: Path) -> None:
    """A target `down_proj` names both; which of the two is adapted, the keys say."""
    targets = ("experts", "q_proj", "shared_expert.down_proj")
    for chosen in (targets, targets[:2]):
        packed, _ = quantized_and_dense("qwen2_moe", **ONE_LAYER["qwen2_moe"])
        add_lora(packed, r=2, alpha=4, targets=chosen)
        randomize_adapters(packed)
        export_adapter(packed, tmp_path, layout="2d")
        again, _ = quantized_and_dense("qwen2_moe", **ONE_LAYER["qwen2_moe"])
        load_adapter(again, tmp_path)
        assert same_state(adapter_state_dict(again), adapter_state_dict(packed))
        assert torch.equal(logits(again), logits(packed))


KEY = f"{PREFIX}model.layers.0.mlp.experts"
BROKEN: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "gate alone": (
        lambda s, c: [s.pop(key) for key in list(s) if ".up_proj." in key],
        "mlp.experts: the file adapts gate_proj without up_proj; packed, the two are one matrix",
    ),
    "an expert is missing": (
        lambda s, c: [s.pop(key) for key in list(s) if ".experts.4." in key],
        rf"adapter_model.safetensors lacks {KEY}.4.down_proj.lora_A.weight, .* and 3 more",
    ),
    "an expert too many": (
        lambda s, c: s.update({f"{KEY}.5.down_proj.lora_A.weight": torch.ones(2, 16)}),
        f"has the unexpected {KEY}.5.down_proj.lora_A.weight",
    ),
    "another layer": (
        lambda s, c: s.update({key.replace("layers.0", "layers.7"): s[key].clone() for key in list(s)}),
        "has the unexpected .*layers.7.mlp.experts.0.down_proj",
    ),
    "shape": (
        lambda s, c: s.update({f"{KEY}.3.up_proj.lora_B.weight": torch.ones(15, 2)}),
        rf"{KEY}.3.up_proj.lora_B.weight: expected shape \[16, 2\] for R = 2, got \[15, 2\]",
    ),
    "dtype": (
        lambda s, c: s.update({f"{KEY}.3.up_proj.lora_A.weight": torch.ones(2, 32).int()}),
        "up_proj.lora_A.weight: expected a floating dtype, got torch.int32",
    ),
    "ranks": (
        lambda s, c: c.update(rank_pattern={r"experts\.1\.down_proj": 1}),
        "experts.down_proj: its matrices have 2 kinds of rank and alpha, an adapter has one",
    ),
    "targets of the other layout": (
        lambda s, c: c.update(target_parameters=["experts.down_proj"]),
        "experts.down_proj: the file has keys for each expert, its config targets all of them as one",
    ),
    "a target that is not there": (
        lambda s, c: c.update(target_modules=["gate_proj", "up_proj", "down_proj", "w1"]),
        "the adapter's target 'w1' matches no linear layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_keys_for_each_expert_are_read_strictly(tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    packed, _ = quantized_and_dense("qwen3_moe", **ONE_LAYER["qwen3_moe"])
    add_lora(packed, r=2, targets=("experts",))
    randomize_adapters(packed)
    export_adapter(packed, tmp_path, layout="2d")
    rewrite(tmp_path, change)
    again, _ = quantized_and_dense("qwen3_moe", **ONE_LAYER["qwen3_moe"])
    with pytest.raises(ValueError, match=message):
        load_adapter(again, tmp_path)
    assert not adapter_state_dict(again)


def grouped(b: Tensor, experts: int) -> Tensor:
    """B with the rank slowest -> with the expert slowest."""
    return b.unflatten(1, (-1, experts)).transpose(1, 2).flatten(1)


def of_experts(state: dict[str, Tensor], factor: str) -> list[str]:
    return [key for key in state if re.search(rf"experts(\.base_layer)?\.lora_{factor}\.", key)]


@pytest.mark.parametrize("experts", [3, 4])
def test_unsloths_layouts_are_read_as_the_file_or_the_caller_says(tmp_path: Path, experts: int) -> None:
    """With E = R = 4, as always, no shape could tell them apart."""
    reference = trained(Toy(experts))
    save_adapter(reference, tmp_path)
    rewrite(tmp_path, lambda s, c: c.update(lora_B_layout="rank_major"))
    model = Toy(experts)
    load_adapter(model, tmp_path, lora_b_layout="rank_major")
    assert same_state(adapter_state_dict(model), adapter_state_dict(reference))
    with pytest.raises(ValueError, match="lora_b_layout='grouped_by_expert' contradicts .* says 'rank_major'"):
        load_adapter(model, tmp_path, lora_b_layout="grouped_by_expert")
    rewrite(tmp_path, lambda s, c: s.update({key: grouped(s[key], experts) for key in of_experts(s, "B")}))
    for stamp, told in (("grouped_by_expert", None), (None, "grouped_by_expert")):
        rewrite(tmp_path, lambda s, c, stamp=stamp: c.update(lora_B_layout=stamp))
        model = Toy(experts)
        load_adapter(model, tmp_path, lora_b_layout=told)
        assert same_state(adapter_state_dict(model), adapter_state_dict(reference))
    misread = Toy(experts)
    load_adapter(misread, tmp_path)
    assert not same_state(adapter_state_dict(misread), adapter_state_dict(reference))
    with pytest.raises(ValueError, match="lora_b_layout must be one of rank_major, grouped_by_expert, got 'x'"):
        load_adapter(misread, tmp_path, lora_b_layout="x")


def transposed(state: dict[str, Tensor], experts: int, is_grouped: bool) -> dict[str, Tensor]:
    """As PEFT before 0.19.1 wrote it: A belongs to the weight's rows, B to its columns."""
    changed = dict(state)
    for key_a, key_b in zip(of_experts(state, "A"), of_experts(state, "B"), strict=True):
        a, b = state[key_a].unflatten(0, (experts, -1)), state[key_b].unflatten(1, (-1, experts)).permute(2, 0, 1)
        new_b = a.permute(2, 1, 0).flatten(1)  # [C, R*E]
        changed[key_a], changed[key_b] = b.mT.flatten(0, 1), grouped(new_b, experts) if is_grouped else new_b
    return changed


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("version", ["0.18.0", "0.19.0", None])
def test_adapters_of_the_transposed_weight(tmp_path: Path, version: str | None, is_grouped: bool) -> None:
    """gate_up is square here and down is not: one tells for both."""
    reference = trained(Toy(3))
    save_adapter(reference, tmp_path)
    state = transposed(read(tmp_path), 3, is_grouped)
    stamps = {"peft_version": version, "lora_B_layout": "grouped_by_expert" if is_grouped else None}
    write(tmp_path, state, **(json.loads((tmp_path / "adapter_config.json").read_text()) | stamps))
    model = Toy(3)
    load_adapter(model, tmp_path)
    for layer, expected in zip(model.layers, reference.layers, strict=True):
        for projection in ("gate_up", "down"):
            assert torch.equal(delta(layer.mlp.experts, projection), delta(expected.mlp.experts, projection))


def test_a_square_weight_alone_is_not_guessed(tmp_path: Path) -> None:
    assert 2 * INTER == HIDDEN
    reference = trained(Toy(3), targets=("experts.gate_up_proj",))
    save_adapter(reference, tmp_path)
    rewrite(tmp_path, lambda s, c: c.update(peft_version="0.18.1"))
    with pytest.raises(ValueError, match="PEFT 0.18.1 adapted the transposed weight of most models"):
        load_adapter(Toy(3), tmp_path)
    for version in ("0.19.1", "0.21.3.dev0", None):
        rewrite(tmp_path, lambda s, c, version=version: c.update(peft_version=version))
        model = Toy(3)
        load_adapter(model, tmp_path)
        assert same_state(adapter_state_dict(model), adapter_state_dict(reference))
