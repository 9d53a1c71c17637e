"""Quantisation-aware training of linear layers: what is computed, what trains, what comes out packed."""

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

from torch_nvfp4 import NVFP4Experts, NVFP4Linear, convert_qat, prepare_qat
from torch_nvfp4.checkpoint import open_checkpoint
from torch_nvfp4.checkpoint.save import save_packed
from torch_nvfp4.format import decode, dequantize, global_scales, quantize
from torch_nvfp4.ops.rows import quantize_rows
from torch_nvfp4.qat import fake_quantize_experts, fake_quantize_rows

pytestmark = pytest.mark.usefixtures("one_thread")
DOCS = Path(__file__).parents[1] / "docs"
KINDS: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "activations": {"activations": True},
    "mxfp4": {"format": "mxfp4", "activations": True},
}


def small(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias=bias), nn.GELU(), nn.Linear(96, 32, bias=bias))


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@settings(max_examples=60)
@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=40))
def test_global_scales_are_those_of_quantize(amax: list[float]) -> None:
    values = torch.tensor(amax)
    expected = [quantize(value.expand(1, 16))[2] for value in values]
    assert torch.equal(global_scales(values), torch.cat(expected))
    quotients = values.numpy() / np.float32(2688)  # IEEE's division, in fp32
    assert torch.equal(global_scales(values), torch.from_numpy(np.where(quotients > 0, quotients, np.float32(1))))


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from((torch.float32, torch.bfloat16)), st.integers(0, 5))
def test_rows_are_those_of_w4a4_and_pass_every_gradient(seed: int, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, 2, 32, generator=generator) * 2.0 ** (seed % 40 - 20)).to(dtype).requires_grad_()
    got = fake_quantize_rows(x)
    codes, scales, row_scales = quantize_rows(x.detach().reshape(-1, 32))
    wanted = decode(codes, scales) * row_scales.unsqueeze(-1)
    torch.testing.assert_close(got.detach().float().view(-1, 32), wanted, rtol=torch.finfo(dtype).eps, atol=0)
    grad = torch.randn(x.shape, generator=generator).to(dtype)
    got.backward(grad)
    assert torch.equal(x.grad, grad)


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from((torch.float32, torch.bfloat16)), st.sampled_from(("nvfp4", "mxfp4")))
def test_experts_are_those_of_from_dense(seed: int, dtype: torch.dtype, format: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(3, 128, 32, generator=generator) * torch.rand(3, 128, 1, generator=generator)
    gate_up, down = gate_up.to(dtype).requires_grad_(), torch.randn(3, 32, 64, generator=generator).to(dtype)
    packed = NVFP4Experts.from_dense(gate_up.detach(), down, format=format)
    got = fake_quantize_experts(gate_up, 2, format)
    assert torch.equal(got, packed.dequantize("gate_up", dtype))
    assert torch.equal(fake_quantize_experts(down, 1, format), packed.dequantize("down", dtype))
    got.sum().backward()
    assert torch.equal(gate_up.grad, torch.ones_like(gate_up))


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_train_convert_save_load(kind: str, tmp_path: Path) -> None:
    """Compiled without a graph break, the loss falls; packed, saved and loaded, the outputs are the same."""
    model = small()
    keys = list(model.state_dict())
    assert prepare_qat(model, **KINDS[kind]) is model and list(model.state_dict()) == keys
    teacher, x = small(), torch.randn(64, 64)
    with torch.no_grad():
        wanted = 2 * teacher(x) + 0.3
    step, optimizer = torch.compile(model, fullgraph=True), torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = (step(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]

    format = KINDS[kind].get("format", "nvfp4")
    with torch.no_grad():
        before = model(x)
        used = [torch.ops.nvfp4.fake_quantize(model[i].weight, format=format) for i in (0, 2)]
    assert relative(step(x).detach(), before) < 1e-6
    dense_biases = [model[i].bias.detach().clone() for i in (0, 2)]
    assert convert_qat(model) is model
    for i, weight, bias in zip((0, 2), used, dense_biases, strict=True):
        assert type(model[i]) is NVFP4Linear and torch.equal(model[i].dequantize(torch.float32), weight)
        assert torch.equal(model[i].bias, bias)
        assert model[i].compute == ("w4a4" if "activations" in KINDS[kind] else "w4a16")
    # Where an activation stands on a rounding boundary of the next layer, the order of a sum decides its code.
    tolerance = 1e-5 if kind == "nvfp4" else 3e-3
    assert relative(model(x), before) < tolerance

    save_packed(model, tmp_path / "out", config={})
    checkpoint = open_checkpoint(tmp_path / "out")
    again = small()
    for i in (0, 2):
        loaded = checkpoint.load_linear(str(i))
        for got, expected in zip(loaded, model[i].packed(), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        again[i].weight.data = dequantize(*loaded, torch.float32)
        again[i].bias.data = checkpoint.load_plain(f"{i}.bias")
    if kind == "nvfp4":
        assert relative(again(x).detach(), before) < 1e-6


def test_a_plain_checkpoint_loads_while_prepared_and_hooks_stay() -> None:
    model, other, seen = small(), small(), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    prepare_qat(model)
    model.load_state_dict(other.state_dict())
    other.load_state_dict(model.state_dict())
    model(torch.randn(2, 64))
    assert seen and torch.equal(other[0].weight, model[0].weight)
    assert "qat=nvfp4 weights" in repr(model) and isinstance(copy.deepcopy(model)[0].weight, nn.Parameter)


@pytest.mark.parametrize("kind", KINDS)
def test_under_torch_func(kind: str) -> None:
    model, x = prepare_qat(small(), **KINDS[kind]), torch.randn(5, 64)
    parameters = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (x,)).square().sum()

    loss(parameters, x).backward()
    found = torch.func.grad(loss)(parameters, x)
    of_each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)
        torch.testing.assert_close(of_each[name].sum(0), parameter.grad, rtol=1e-4, atol=1e-5)


def test_under_autocast_and_in_bf16() -> None:
    """Rounded from the weights as they are kept: fp32 under autocast, bf16 in a bf16 model."""
    x = torch.randn(4, 64)
    model = prepare_qat(small(bias=False))
    with torch.autocast("cpu", torch.bfloat16):
        got = model[0](x)
    weight = torch.ops.nvfp4.fake_quantize(model[0].weight)
    assert torch.equal(got, nn.functional.linear(x.bfloat16(), weight.bfloat16()))
    got.sum().backward()
    assert model[0].weight.grad.dtype == torch.float32

    half = prepare_qat(small(bias=False).bfloat16())
    used = torch.ops.nvfp4.fake_quantize(half[0].weight)
    assert torch.equal(half[0](x.bfloat16()), nn.functional.linear(x.bfloat16(), used))
    convert_qat(half)
    assert torch.equal(half[0].dequantize(torch.bfloat16), used)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 96, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_layer_in_two_places_is_packed_in_both() -> None:
    layer = nn.Linear(32, 32)
    model = convert_qat(prepare_qat(nn.Sequential(layer, layer)))
    assert isinstance(model[0], NVFP4Linear) and model[0] is model[1]


def old_weight_norm(linear: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and met
        return nn.utils.weight_norm(linear)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "twice": (lambda: prepare_qat(prepare_qat(small())), r"^0 is prepared already; convert_qat comes next"),
    "nothing": (lambda: prepare_qat(nn.Sequential(nn.ReLU())), "nothing to prepare in Sequential"),
    "filtered": (lambda: prepare_qat(small(), modules=lambda path, module: False), "nothing to prepare"),
    "weight_norm": (
        lambda: prepare_qat(nn.Sequential(old_weight_norm(nn.Linear(32, 8)))),
        "cannot prepare 0: its weight is computed from other parameters.*make it one .remove_weight_norm, prune",
    ),
    "pruned": (
        lambda: prepare_qat(nn.Sequential(prune.l1_unstructured(nn.Linear(32, 8), "weight", 0.5))),
        "cannot prepare 0: its weight is computed from other parameters.*or leave it out with `modules`",
    ),
    "nothing to convert": (lambda: convert_qat(small()), "nothing to convert in Sequential: call prepare_qat first"),
    "width": (
        lambda: prepare_qat(nn.Sequential(nn.Linear(48, 8)), format="mxfp4"),
        "cannot prepare 0: its width C = 48 is no multiple of B = 32; leave it out",
    ),
    "width of rows": (
        lambda: prepare_qat(nn.Sequential(nn.Linear(24, 8)), weights=False, activations=True),
        "C = 24 is no multiple of B = 16",
    ),
    "neither": (lambda: prepare_qat(small(), weights=False), "both False"),
    "format": (lambda: prepare_qat(small(), format="int4"), "format must be one of"),
    "root": (lambda: prepare_qat(nn.Linear(32, 32)), "cannot prepare the model itself"),
    "tied": (lambda: prepare_qat(tied()), r"cannot prepare 1: its weight is shared \(0.weight, 1.weight\)"),
    "unseen": (
        lambda: convert_qat(prepare_qat(small(), weights=False, activations=True)),
        "0 was prepared with weights=False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case: str) -> None:
    run, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        run()


def test_a_refusal_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 8))
    with pytest.raises(ValueError, match="cannot prepare 1"):
        prepare_qat(model)
    assert type(model[0]) is nn.Linear
    prepare_qat(model, modules=lambda path, module: path == "0")


def test_the_example_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "qat.md").read_text(), re.M | re.S)
    exec(compile(example, "qat.md", "exec"), {})
