"""Adapters on packed experts and linear layers: what is made, frozen, trained, switched off, taken off."""

import itertools
import math

import pytest
import torch
from lora_toy import HIDDEN, INTER, Toy, trained
from torch import nn

from torch_nvfp4.lora import (
    LoRALinear,
    adapter_state_dict,
    add_lora,
    disable_adapters,
    remove_adapters,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_add_lora_starts_as_a_no_op_and_freezes_the_rest() -> None:
    model, x = Toy(), torch.randn(5, HIDDEN)
    before = model(x)
    summary = add_lora(model, r=4, alpha=8, expert_r=2, targets=("experts", "q_proj"))
    assert torch.equal(model(x), before)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trainable} == {
        "lora_a", "lora_b", "gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b",
    }  # fmt: skip
    experts = 2 * 3 * 2 * ((HIDDEN + 2 * INTER) + (INTER + HIDDEN))
    linears = 2 * 4 * (HIDDEN + HIDDEN)
    assert summary.targets == {"experts": experts, "q_proj": linears}
    assert summary.trainable == experts + linears == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert summary.total == summary.trainable + 2 * (3 * 3 * INTER * HIDDEN + HIDDEN * HIDDEN + HIDDEN)
    assert str(summary) == "LoRA trains 1,856 of 13,184 parameters (14.08 %): experts 1,344, q_proj 512"


@pytest.mark.parametrize("rslora", [False, True])
def test_alpha_over_the_rank_of_each(rslora: bool) -> None:
    model = Toy()
    add_lora(model, r=4, alpha=8, expert_r=2, rslora=rslora, targets=("experts", "q_proj"))
    layer = model.layers[0]
    assert layer.q_proj.scaling == (8 / math.sqrt(4) if rslora else 8 / 4)
    assert layer.mlp.experts.gate_up_scaling == layer.mlp.experts.down_scaling
    assert layer.mlp.experts.down_scaling == (8 / math.sqrt(2) if rslora else 8 / 2)


def test_one_projection_alone_and_suffixes() -> None:
    model = Toy()
    summary = add_lora(model, r=2, targets=["experts.down_proj", "0.q_proj"])
    experts = model.layers[1].mlp.experts
    assert experts.gate_up_lora_a is None and experts.down_lora_a is not None
    assert isinstance(model.layers[0].q_proj, LoRALinear) and type(model.layers[1].q_proj) is nn.Linear
    assert list(summary.targets) == ["experts.down_proj", "0.q_proj"]


def test_a_string_is_one_target() -> None:
    assert list(add_lora(Toy(), targets="q_proj").targets) == ["q_proj"]
    with pytest.raises(ValueError, match="target 'k_proj' matches nothing"):
        add_lora(Toy(), targets="k_proj")
    experts = Toy().layers[0].mlp.experts
    experts.add_lora(2, scaling=1.0, projections="down")
    assert experts.gate_up_lora_a is None and experts.down_lora_a is not None


def test_fault_c22_a_target_that_matches_nothing_is_an_error() -> None:
    model = Toy()
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="target 'gate_proj' matches nothing; the model has 2 packed experts mod"):
        add_lora(model, targets=("experts", "gate_proj"))
    with pytest.raises(ValueError, match="'experts' matches nothing .dense experts must be packed first"):
        add_lora(Toy(dense=True), targets=("q_proj", "experts"))
    assert [p.requires_grad for p in model.parameters()] == before
    assert not adapter_state_dict(model)


@pytest.mark.parametrize("options", [{"r": 0}, {"r": -1}, {"r": 2.0}, {"r": True}, {"expert_r": 0}])
def test_a_rank_below_one_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        add_lora(Toy(), targets=("experts",), **options)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, True, "8"])
def test_an_alpha_that_is_not_finite_is_an_error(alpha: object) -> None:
    model = Toy()
    with pytest.raises(ValueError, match=f"alpha must be a finite number, got {alpha!r}"):
        add_lora(model, alpha=alpha)
    assert not adapter_state_dict(model) and all(p.requires_grad for p in model.layers[0].q_proj.parameters())


def test_a_second_set_of_adapters_is_refused() -> None:
    model = trained(Toy())
    with pytest.raises(ValueError, match="has adapters already, layers.0.q_proj for one: call remove_adapters"):
        add_lora(model, targets=("experts",))


def test_fault_c4_every_factor_moves() -> None:
    model, x, target = Toy(), torch.randn(6, HIDDEN), torch.randn(6, HIDDEN)
    add_lora(model, r=4, alpha=8, targets=("experts", "q_proj"))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    history = []
    for _ in range(2):
        history.append({key: value.clone() for key, value in adapter_state_dict(model).items()})
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    history.append(adapter_state_dict(model))
    for key in history[0]:
        first, second = (after[key] != before[key] for before, after in itertools.pairwise(history))
        is_b = "lora_B" in key
        assert first.any() == is_b, f"{key}: B moves in the first step, A only after it"
        if "experts" in key:  # every expert has tokens, so each one's factors must move
            per_expert = second.unflatten(1, (-1, 3)).movedim(-1, 0) if is_b else second.unflatten(0, (3, -1))
            assert per_expert.flatten(1).any(1).all(), key
        assert second.any(), key


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fault_c12_factors_keep_their_dtype_under_other_activations(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    model = trained(Toy().to(x_dtype), dtype=dtype)
    y = model(torch.randn(4, HIDDEN, dtype=x_dtype))
    y.float().square().mean().backward()
    assert y.dtype == x_dtype
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == dtype and parameter.grad is not None and parameter.grad.dtype == dtype, name


def test_lora_linear_is_base_plus_scaled_product() -> None:
    base = nn.Linear(12, 7).double()
    layer = LoRALinear(base, 3, scaling=0.5, dtype=torch.float64)
    nn.init.normal_(layer.lora_b)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    merged = base.weight + 0.5 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x), x @ merged.T + base.bias)
    assert layer.weight is base.weight and layer.bias is base.bias


# switching off and taking off


@pytest.mark.parametrize("packed_linear", [False, True])
def test_disable_adapters_and_back(packed_linear: bool) -> None:
    model, x = Toy(packed_linear=packed_linear), torch.randn(5, HIDDEN)
    bare = model(x)
    trained(model)
    full, parameters = model(x), dict(model.named_parameters())
    with disable_adapters(model):
        assert torch.equal(model(x), bare)
        with disable_adapters(model, "experts"):
            assert torch.equal(model(x), bare)
    with disable_adapters(model, "experts"):
        partly = model(x)
        partly.sum().backward()
    assert not torch.equal(partly, bare) and not torch.equal(partly, full)
    assert torch.equal(model(x), full)
    after = dict(model.named_parameters())
    assert parameters.keys() == after.keys() and all(after[name] is p for name, p in parameters.items())
    grads = {name: p.grad is not None for name, p in after.items() if p.requires_grad}
    assert all(has_grad == ("experts" not in name) for name, has_grad in grads.items())


def test_disable_adapters_restores_after_an_exception() -> None:
    model, x = trained(Toy()), torch.randn(5, HIDDEN)
    full = model(x)
    with pytest.raises(RuntimeError, match="inside"), disable_adapters(model):
        raise RuntimeError("inside")
    assert torch.equal(model(x), full)
    with (
        pytest.raises(ValueError, match="kind must be 'all' or 'experts', got 'linear'"),
        disable_adapters(model, "linear"),
    ):
        pass


@pytest.mark.parametrize("packed_linear", [False, True])
def test_remove_adapters(packed_linear: bool) -> None:
    model, x = Toy(packed_linear=packed_linear), torch.randn(5, HIDDEN)
    bare, names = model(x), set(model.state_dict())
    remove_adapters(trained(model))
    assert torch.equal(model(x), bare) and set(model.state_dict()) == names
    trained(model)
