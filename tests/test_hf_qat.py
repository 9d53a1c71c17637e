"""Quantisation-aware training of transformers' models: experts and linear layers, trained dense and saved packed."""

import copy
import pickle
from pathlib import Path

import packed_models
import pytest
import torch
from golden_models import load
from hf_models import ONE_LAYER, logits, make_model, token_ids
from torch import nn
from transformers import PreTrainedModel

from torch_nvfp4 import NVFP4Experts, NVFP4Linear, convert_qat, hf
from torch_nvfp4._hf.qat import FakeQuantizedExperts
from torch_nvfp4.hf import prepare_qat, save_packed

pytestmark = pytest.mark.usefixtures("one_thread")


OTHERS = ("nemotron_h", "llama4")


def body(path: str, module: nn.Module) -> bool:
    """All that is no head, router or gate."""
    return path.rpartition(".")[2] not in ("lm_head", "gate", "router", "shared_expert_gate")


def only_experts(path: str, module: nn.Module) -> bool:
    return path.endswith("experts")


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    ids = token_ids()
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def train(model: PreTrainedModel, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "nvfp4"])
def test_prepare_train_convert_save_load(implementation: str, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", **ONE_LAYER["qwen3_moe"])
    model.set_experts_implementation(implementation)
    dense = dict(model.state_dict())
    assert prepare_qat(model, modules=body) is model
    assert model.state_dict().keys() == dense.keys()
    losses = train(model, 12)
    assert losses[-1] < 0.8 * losses[0]
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        used = experts.rounded_weights()
        before = logits(model)
    assert convert_qat(model) is model
    packed = model.model.layers[0].mlp.experts
    assert isinstance(packed, NVFP4Experts) and type(model.model.layers[0].self_attn.q_proj) is NVFP4Linear
    for projection, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        assert torch.equal(packed.dequantize(projection, torch.float32), used[name])
    with torch.no_grad():
        torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
        save_packed(model, tmp_path / "out")
        torch.testing.assert_close(logits(load(tmp_path / "out", dtype=torch.float32)), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activations", [False, True], ids=["weights", "both"])
@pytest.mark.parametrize("architecture", ["gpt_oss", "nemotron_h", "llama4"])
def test_layouts(architecture: str, activations: bool) -> None:
    """Interleaved, transposed, biased; without a gate; weighed on the input. Every expert weight gets a gradient."""
    made = packed_models.make_stock(architecture) if architecture in OTHERS else make_model(architecture)
    if architecture == "llama4" and activations:
        with pytest.raises(ValueError, match="activations of experts whose inputs the router weighs"):
            prepare_qat(made, activations=True, modules=only_experts)
        return
    prepare_qat(made, activations=activations, modules=only_experts)
    loss_of(made).backward()
    for path, module in made.named_modules():
        if isinstance(module, FakeQuantizedExperts):
            assert all(float(p.grad.norm()) > 0 for p in module.parameters()), path
    with torch.no_grad():
        before = logits(made)
        convert_qat(made)
        after = logits(made)
    packed = [module for module in made.modules() if isinstance(module, NVFP4Experts)]
    assert packed and {module.compute for module in packed} == {"w4a4" if activations else "w4a16"}
    # An activation on a rounding boundary falls where the order of a sum sends it.
    assert float((after - before).norm() / before.norm()) < (1e-2 if activations else 1e-5)


def test_compiled_with_experts() -> None:
    model = prepare_qat(make_model("qwen3_moe", **ONE_LAYER["qwen3_moe"]), activations=True, modules=body)
    expected = loss_of(model)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)
    loss = loss_of(compiled)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - gradients[name]).norm() <= 0.02 * gradients[name].norm() + 1e-6, name


def test_prepared_experts_are_copied_and_pickled() -> None:
    model = prepare_qat(make_model("qwen3_moe", **ONE_LAYER["qwen3_moe"]), activations=True, modules=body)
    expected = logits(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), expected)
        assert type(again.model.layers[0].mlp.experts) is type(model.model.layers[0].mlp.experts)
        convert_qat(again)
        torch.testing.assert_close(logits(again), logits(convert_qat(copy.deepcopy(model))), rtol=0, atol=0)


def test_refused_in_words() -> None:
    model = make_model("qwen3_moe", **ONE_LAYER["qwen3_moe"])
    with pytest.raises(ValueError, match=r"cannot pack Qwen3MoeExperts at .*I = 16 must be multiples of B = 32"):
        prepare_qat(model, format="mxfp4", modules=only_experts)
    with pytest.raises(ValueError, match="nothing to prepare in Qwen3MoeForCausalLM"):
        prepare_qat(model, modules=lambda path, module: False)
    prepare_qat(model, modules=body)
    with pytest.raises(ValueError, match="is prepared already"):
        prepare_qat(model, modules=body)
    with pytest.raises(ValueError, match="convert_qat comes next"):
        hf.quantize_experts(model)
