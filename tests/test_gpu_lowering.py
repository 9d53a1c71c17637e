"""Compiled layers on a GPU: eager's numbers in every mode, one graph for every T, caches; and the templates themselves.

Results of two tiles, or of two kernels, differ by the order of sums; ROOM says by how many roundings of the result.
"""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_layers import on_cuda, random_grad
from strategies import Layer, make_layer
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

from torch_nvfp4.lowering import configs, multiply

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROOM = {F32: 64.0, BF16: 2.0, F16: 2.0}
SIZES = dict(k=3, e=6, h=256, i=192, ranks=(16, 8), bias=True, pattern="sentinel")
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


@pytest.fixture(autouse=True)
def _own_cache() -> Iterator[None]:
    with fresh_cache():
        yield


@pytest.fixture
def templates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and compiled both decode in the loop of the Triton kernels, as on cards before and after Hopper."""
    monkeypatch.setattr(multiply, "choose_path", lambda *args, **kwargs: multiply.Path.LOOP)
    monkeypatch.setattr(configs, "launcher_first", lambda *args: False)


def layer_of(t: int, dtype: torch.dtype, **sizes: object) -> Layer:
    return on_cuda(make_layer(**SIZES | dict(t=t, dtype=dtype) | sizes))


def results(run: Callable[..., Tensor], layer: Layer, grad: Tensor) -> dict[str, Tensor]:
    fresh = layer.requires_grad()
    out = run(*fresh.args)
    leaves = fresh.differentiable
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"output": out.detach().clone(), **{n: g.clone() for n, g in zip(leaves, grads, strict=True)}}


def call_of(layer: Layer) -> Callable[..., Tensor]:
    options = layer.options

    def call(*args: Tensor | None) -> Tensor:
        return torch.ops.nvfp4.moe_lora(*args, **options)

    return call


def assert_as_eager(compiled: Callable[..., Tensor], layer: Layer) -> None:
    grad = random_grad(layer)
    wanted, got = results(call_of(layer), layer, grad), results(compiled, layer, grad)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        error = (got[name].double() - tensor.double()).norm()
        room = ROOM[layer.x.dtype] * torch.finfo(layer.x.dtype).eps
        assert error <= room * tensor.double().norm(), f"{name}: {error / tensor.double().norm():.2e} > {room:.2e}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_every_mode_gives_what_eager_gives(dtype: torch.dtype, mode: str) -> None:
    layer = layer_of(40, dtype)
    compiled = torch.compile(call_of(layer), fullgraph=True, mode=mode)
    for _ in range(3):  # a CUDA graph is recorded at the second call, and replayed from the third on
        assert_as_eager(compiled, layer)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2", "gelu_tanh"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_templates_give_what_eager_gives(activation: str, fmt: str, templates_only: None) -> None:
    layer = layer_of(40, BF16, activation=activation, fmt=fmt, limit=1.0 if activation == "swiglu_oai" else None)
    compiled = torch.compile(call_of(layer), fullgraph=True)
    grad = random_grad(layer)
    got, code = run_and_get_code(results, compiled, layer, grad)
    text = "\n".join(code)
    assert text.count("import grouped_linear as body") == text.count("import grouped_dgrad as body") == 2
    assert "extern_kernels.nvfp4" not in text and not re.search(r"ops\.nvfp4\.g\w+\.default\(", text)
    assert all(torch.isfinite(tensor).all() for tensor in got.values())
    assert_as_eager(compiled, layer)


@pytest.mark.parametrize("rows", configs.ROW_CLASSES)
def test_templates_of_every_class_of_rows(rows: int, templates_only: None) -> None:
    layer = layer_of(rows * 2, BF16, k=2, e=4, h=512, i=256, pattern="distinct")
    assert_as_eager(torch.compile(call_of(layer), fullgraph=True), layer)


@pytest.mark.parametrize("loop", [False, True], ids=["table", "templates"])
def test_one_graph_serves_every_number_of_tokens(loop: bool, request: pytest.FixtureRequest) -> None:
    if loop:
        request.getfixturevalue("templates_only")
    compiled = torch.compile(call_of(layer_of(40, BF16)), fullgraph=True, dynamic=None)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in (40, 2, 3, 700, 41, 3000):
            layer = layer_of(t, BF16)
            fresh = layer.requires_grad()
            for name in ("x", "topk_ids", "topk_weights"):
                torch._dynamo.mark_dynamic(fresh.tensors[name], 0)
            grad = random_grad(layer)
            out = compiled(*fresh.args)
            got = torch.autograd.grad(out, [fresh.x, fresh.gate_up_lora_a, fresh.down_lora_b], grad)
            wanted = results(call_of(layer), layer, grad)
            for name, tensor in zip(("x", "gate_up_lora_a", "down_lora_b"), got, strict=True):
                error = (tensor.double() - wanted[name].double()).norm()
                assert error <= ROOM[BF16] * torch.finfo(BF16).eps * wanted[name].double().norm(), (t, name)


def test_autotuning_times_the_launcher_beside_templates() -> None:
    """Every choice runs on routing that leads nowhere out of bounds; which one is fastest is the card's business."""
    for t in (8, 2048):
        layer = layer_of(t, BF16, k=2, e=4, h=512, i=256, bias=False, pattern="distinct")
        counters.clear()
        torch._dynamo.reset()
        compiled = torch.compile(call_of(layer), fullgraph=True, mode="max-autotune-no-cudagraphs")
        assert_as_eager(compiled, layer)
        assert counters["inductor"]["select_algorithm_autotune"] >= 4
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_code_from_a_warm_cache_gives_the_same_bits(mode: str) -> None:
    layer = layer_of(40, BF16)
    grad = random_grad(layer)
    seen: list[dict[str, Tensor]] = []
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        seen.append(results(torch.compile(call_of(layer), fullgraph=True, mode=mode), layer, grad))
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
    for name, tensor in seen[0].items():
        assert torch.equal(tensor, seen[1][name]), name


def test_a_slot_of_no_expert_gets_no_gradient_and_disturbs_nothing() -> None:
    """What a compiled backward leaves for them is written, not found: memory is full of NaN here."""
    layer = layer_of(64, BF16, pattern="none")
    filler = [torch.full((2**k,), torch.nan, device="cuda") for k in range(8, 22) for _ in range(4)]
    del filler
    got = results(torch.compile(call_of(layer), fullgraph=True), layer, random_grad(layer))
    assert all(not tensor.any() for tensor in got.values())
