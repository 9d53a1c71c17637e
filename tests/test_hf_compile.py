"""Packed models under torch.compile(fullgraph=True), every architecture, training and eval."""

import copy
import pickle

import pytest
import torch
from golden_models import GOLDEN, QWEN, load
from hf_models import (
    ARCHITECTURES,
    ONE_LAYER,
    TARGETS,
    assert_same_grads,
    logits,
    make_model,
    quantized_and_dense,
    randomize_adapters,
    token_ids,
    train_step,
)
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from torch_nvfp4.hf import quantize_experts
from torch_nvfp4.lora import add_lora

pytestmark = pytest.mark.usefixtures("one_thread")


def adapted_model(architecture: str) -> PreTrainedModel:
    model = quantize_experts(make_model(architecture, **ONE_LAYER[architecture]))
    add_lora(model, r=3, expert_r=2, targets=TARGETS[architecture])
    randomize_adapters(model)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fullgraph_in_training_and_in_eval(architecture: str) -> None:
    model = adapted_model(architecture)
    expected_logits = logits(model)
    expected_grads = train_step(model.train())
    assert all(grad.abs().max() > 0 for grad in expected_grads.values())
    # Dynamo alone decides about fullgraph; the traced backward is the same op's in each canonical layout
    backend = "aot_eager" if architecture in ("qwen3_moe", "gpt_oss") else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_same_grads(train_step(model, compiled), expected_grads)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(compiled), expected_logits, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "deepseek_v3"])
def test_router_logits_and_auxiliary_loss_in_one_graph(architecture: str) -> None:
    """DeepSeek-V3 has no auxiliary loss. Stock: PEFT on the dense model with the dequantised weights."""
    settings = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    asked = dict(input_ids=token_ids(), labels=token_ids(), use_cache=False, output_router_logits=True)
    found = []
    for model in quantized_and_dense(architecture, **ONE_LAYER[architecture]):
        model = get_peft_model(model, copy.deepcopy(settings)).train()
        randomize_adapters(model)
        is_packed = not found
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_packed else model
        output = run(**asked)
        output.loss.backward()
        found.append((output, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    (output, grads), (expected, expected_grads) = found
    assert expected.aux_loss > 0
    for name in ("loss", "aux_loss", "logits"):
        torch.testing.assert_close(output[name], expected[name], rtol=1e-5, atol=1e-5)
    for layer, stock in zip(output.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(layer, stock, rtol=1e-5, atol=1e-5)
    assert_same_grads(grads, expected_grads)


def test_packed_models_are_pickled_with_their_hooks() -> None:
    """Packed here, loaded packed, and before or after a forward; what records then still does."""
    for model in (quantize_experts(make_model("qwen3_moe")), load(GOLDEN / QWEN)):
        asked = dict(input_ids=token_ids() % model.config.vocab_size, use_cache=False, output_router_logits=True)
        pickled = [pickle.dumps(model)]
        expected = model(**asked)
        pickled.append(pickle.dumps(model))
        for data in pickled:
            found = pickle.loads(data)(**asked)
            assert torch.equal(found.logits, expected.logits)
            assert len(found.router_logits) == len(expected.router_logits) == model.config.num_hidden_layers
            assert all(map(torch.equal, found.router_logits, expected.router_logits))


def test_router_logits_are_recorded_once() -> None:
    """Whether the dense model was asked for them before it was packed, or not."""
    for asked_before in (False, True):
        model = make_model("mixtral")
        if asked_before:
            logits(model, output_router_logits=True)
        output = quantize_experts(model)(input_ids=token_ids(), use_cache=False, output_router_logits=True)
        assert len(output.router_logits) == model.config.num_hidden_layers == 2
        assert model(input_ids=token_ids(), use_cache=False).router_logits is None


def test_fullgraph_with_inductor() -> None:
    model = adapted_model("qwen3_moe").train()
    expected = train_step(model)
    assert_same_grads(train_step(model, torch.compile(model, fullgraph=True)), expected)


def test_layers_compile_one_by_one() -> None:
    """Each to one graph in a model that runs eagerly; a forward that asks for router logits gets those of all."""
    model = quantize_experts(make_model("qwen3_moe"))
    add_lora(model, r=3, targets=TARGETS["qwen3_moe"])
    randomize_adapters(model)
    asked = dict(output_router_logits=True, labels=token_ids(), use_cache=False)
    expected_grads, expected = train_step(model.train()), model(token_ids(), **asked)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    assert_same_grads(train_step(model), expected_grads)
    graphs = counter.frame_count
    assert 0 < graphs <= len(model.model.layers)
    with pytest.raises(torch._dynamo.exc.Unsupported):  # what records cannot be traced by itself
        model(token_ids(), **asked)
    assert_same_grads(train_step(model), expected_grads)
    assert counter.frame_count == graphs
    for layer in model.model.layers:
        layer.compile(backend=counter)
    found = model(token_ids(), **asked)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    for layer, stock in zip(found.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(layer, stock, rtol=1e-5, atol=1e-5)
    assert not output_capturing._active_collector.recording
