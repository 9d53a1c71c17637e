"""Packed models under torch.compile(fullgraph=True), every architecture, training and eval."""

import pytest
import torch
from hf_models import (
    ARCHITECTURES,
    ONE_LAYER,
    TARGETS,
    assert_same_grads,
    logits,
    make_model,
    randomize_adapters,
    train_step,
)
from transformers import PreTrainedModel

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


def test_fullgraph_with_inductor() -> None:
    model = adapted_model("qwen3_moe").train()
    expected = train_step(model)
    assert_same_grads(train_step(model, torch.compile(model, fullgraph=True)), expected)
