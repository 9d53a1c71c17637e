"""Layers of real sizes on a GPU: every result against fp32, what they keep in memory, and no wait for the device."""

from typing import Any

import pytest
import torch
from cuda_layers import random_grad, run, without_sync
from real_layers import GPT_OSS, QWEN3, real_layer, reference
from torch import Tensor

pytestmark = pytest.mark.gpu
LARGEST_ERROR = 0.008
"""Relative, by Frobenius norm: of bf16 with a pre-activation, an activation and shrinks that are rounded to it."""
MIB = 2**20

STEPS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": QWEN3 | dict(t=8192),
    "few tokens": QWEN3 | dict(t=512),
    "skewed, some experts without tokens": QWEN3 | dict(t=8192, skew=4.0),
    "gpt-oss": GPT_OSS | dict(t=2048),
}


@pytest.fixture(autouse=True)
def _dirty_memory(poison: object) -> None:
    """NaN in what is allocated without being written, and in the blocks that are free."""
    blocks = [torch.full((size * MIB,), 0xFF, dtype=torch.uint8, device="cuda") for size in (1, 2, 16, 64, 256, 1024)]
    del blocks


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    errors = {}
    for name, expected in wanted.items():
        assert torch.isfinite(got[name]).all(), f"{name} is not finite"
        errors[name] = ((got[name].float() - expected).norm() / expected.norm()).item()
    assert max(errors.values()) <= LARGEST_ERROR, errors


@pytest.mark.parametrize("sizes", STEPS.values(), ids=STEPS)
def test_output_and_every_gradient_match_fp32(sizes: dict[str, Any]) -> None:
    layer = real_layer(**sizes)
    grad = random_grad(layer)
    got = without_sync(lambda: run(layer, grad))
    assert_close(got, reference(layer, grad))


def test_many_tokens_match_fp32() -> None:
    layer = real_layer(**QWEN3 | dict(t=32768))
    with torch.no_grad():
        out = without_sync(layer.run)
    assert_close({"output": out}, reference(layer, None))


def test_a_step_keeps_and_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """pre (192 MiB), the output, routing and [M, R] are kept; no weight in bf16 and one [M, H] at a time."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    layer = real_layer(**QWEN3 | dict(t=8192)).requires_grad()
    grad = random_grad(layer)
    leaves = list(layer.differentiable.values())
    torch.autograd.grad(layer.run(), leaves, grad)  # what the first call keeps for ever
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = layer.run()
    saved = torch.cuda.memory_allocated() - resident
    grads = torch.autograd.grad(out, leaves, grad)
    peak = torch.cuda.max_memory_allocated() - resident
    assert len(grads) == len(leaves)
    assert saved <= 270 * MIB, f"{saved / MIB:.0f} MiB"
    assert peak <= 900 * MIB, f"{peak / MIB:.0f} MiB"


def test_a_captured_step_is_right_on_replay_with_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    layer = real_layer(**QWEN3 | dict(t=512))
    grad, ids = random_grad(layer), layer.topk_ids.clone()
    captured = layer.replaced(topk_ids=ids)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(captured, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(captured, grad)
    for step in range(1, 4):
        other = (layer.topk_ids + 17 * step) % 128
        other[::5, 0] = -1
        ids.copy_(other)
        graph.replay()
        for name, expected in run(layer.replaced(topk_ids=other), grad).items():
            assert torch.equal(result[name], expected), (name, step)
