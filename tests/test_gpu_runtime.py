"""How the CUDA path lives with the runtime: graphs, streams, the allocator, and what it keeps in memory."""

from typing import Any

import pytest
import torch
from cuda_layers import on_cuda, random_grad, run
from strategies import Layer, make_layer
from torch import Tensor

from torch_nvfp4.lowering import launch

pytestmark = pytest.mark.gpu
SIZES = dict(t=96, k=2, e=6, h=128, i=64, dtype=torch.bfloat16, ranks=(4, 8))


@pytest.fixture(scope="module")
def layer() -> Layer:
    return on_cuda(make_layer(**SIZES))


def test_a_captured_graph_is_right_for_other_ids(layer: Layer) -> None:
    grad = random_grad(layer)
    ids = layer.topk_ids.clone()
    captured = layer.replaced(topk_ids=ids)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(captured, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(captured, grad)
    for seed, pattern in enumerate(("distinct", "one_expert", "sentinel")):
        other = make_layer(**SIZES | dict(seed=seed, pattern=pattern)).topk_ids.cuda()
        ids.copy_(other)
        graph.replay()
        wanted = run(layer.replaced(topk_ids=other), grad)
        for name, tensor in wanted.items():
            assert torch.equal(result[name], tensor), (name, pattern)


def test_side_streams_do_not_disturb_each_other(layer: Layer) -> None:
    grad = random_grad(layer)
    layers = [layer.replaced(x=layer.x * (i + 1)) for i in range(4)]
    wanted = [run(one, grad) for one in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    got: list[dict[str, Tensor]] = []
    for _ in range(3):
        got.clear()
        for stream, one in zip(streams, layers, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(one, grad))
    torch.cuda.synchronize()
    for mine, theirs in zip(got, wanted, strict=True):
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("t", [1, 8, 300])
def test_launches_wait_for_what_they_read(t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper a kernel comes while the one before it ends; queued closely, steps give what single launches do."""
    layer = on_cuda(make_layer(**SIZES | dict(t=t, e=16, h=1024, i=512)))
    grad, plain = random_grad(layer), launch._run

    def alone(*args: Any) -> None:
        torch.cuda.synchronize()
        plain(*args)
        torch.cuda.synchronize()

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_run", alone)
        wanted = run(layer, grad)
    torch.cuda.synchronize()
    for got in [run(layer, grad) for _ in range(20)]:
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


def test_saved_and_peak_memory_stay_small() -> None:
    """Saved: pre, routing and [M, R]; never a weight in bf16. Budgets of a layer an eighth of Qwen3-30B-A3B's T."""
    t, k, e, h, i, r = 1024, 8, 16, 2048, 768, 16
    layer = on_cuda(make_layer(t=t, k=k, e=e, h=h, i=i, ranks=(r, r), dtype=torch.bfloat16)).requires_grad()
    grad = random_grad(layer)
    layer.run().backward(grad)
    for leaf in layer.differentiable.values():
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = layer.run()
    m = t * k
    kept = m * 2 * i * 2 + 2 * m * r * 2 + 2 * m * 4 + t * h * 2
    assert torch.cuda.memory_allocated() - before < kept * 1.05 + 2**20
    out.backward(grad)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in layer.differentiable.values())
    rows = m * (2 * h + 4 * i) * 2
    assert torch.cuda.max_memory_allocated() - before < kept + gradients + rows


def test_a_current_device_that_is_not_the_tensors(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second card in truth; with one card alone, by a current device that only says to be another."""
    grad = random_grad(layer)
    wanted = run(layer, grad)
    with monkeypatch.context() as patch:
        if torch.cuda.device_count() > 1:
            with torch.cuda.device(1):
                got = run(layer, grad)
        else:
            patch.setattr(torch.cuda, "current_device", lambda: 1)
            got = run(layer, grad)
    for name, tensor in wanted.items():
        assert got[name].device == tensor.device and torch.equal(got[name], tensor), name
