"""Adapters on packed experts and linear layers: what is made, frozen, saved, refused; no transformers."""

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torch_nvfp4._lora import peft
from torch_nvfp4._lora.sites import iter_sites
from torch_nvfp4.lora import (
    LoRALinear,
    StockLayout,
    adapter_state_dict,
    add_lora,
    disable_adapters,
    load_adapter,
    remove_adapters,
    save_adapter,
)
from torch_nvfp4.nn import NVFP4Experts, NVFP4Linear

GOLDEN = Path(__file__).parent / "golden" / "peft_qwen3_moe"
HIDDEN, INTER = 32, 16  # 2I = H


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class DenseExperts(nn.Module):
    """Weights alone, in transformers' layout: what PEFT's target_parameters need."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * INTER, HIDDEN) / HIDDEN**0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, HIDDEN, INTER) / INTER**0.5)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, q_proj: nn.Module) -> None:
        super().__init__()
        self.q_proj = q_proj
        self.mlp = nn.Module()
        self.mlp.experts = experts


class Toy(nn.Module):
    """`layers.{i}.q_proj` and `layers.{i}.mlp.experts`; every token goes to experts t and t + 1 (mod E)."""

    def __init__(self, num_experts: int = 3, *, dense: bool = False, packed_linear: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.layers = nn.ModuleList()
        for _ in range(2):
            experts: nn.Module = DenseExperts(num_experts)
            if not dense:
                experts = NVFP4Experts.from_dense(experts.gate_up_proj, experts.down_proj)
            linear = nn.Linear(HIDDEN, HIDDEN)
            self.layers.append(Layer(experts, NVFP4Linear.from_dense(linear) if packed_linear else linear))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0])
        ids = torch.stack([tokens, tokens + 1], 1) % self.num_experts
        weights = torch.full(ids.shape, 0.5, dtype=x.dtype)
        for layer in self.layers:
            x = x + layer.mlp.experts(torch.tanh(layer.q_proj(x)), ids, weights)
        return x


def trained(model: nn.Module, **options: object) -> nn.Module:
    """The model with adapters as after training: no factor is zero."""
    add_lora(model, **({"r": 4, "alpha": 8, "targets": ("experts", "q_proj")} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


def delta(experts: nn.Module, projection: str) -> Tensor:
    a, b = getattr(experts, f"{projection}_lora_a"), getattr(experts, f"{projection}_lora_b")
    return (getattr(experts, f"{projection}_scaling") * (b @ a)).detach()


# what add_lora makes


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
    assert (
        summary.trainable
        == experts + linears
        == sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
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


def test_fault_c22_a_target_that_matches_nothing_is_an_error() -> None:
    model = Toy()
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(
        ValueError, match="target 'gate_proj' matches nothing; the model has 2 packed experts mod"
    ):
        add_lora(model, targets=("experts", "gate_proj"))
    with pytest.raises(ValueError, match="'experts' matches nothing .dense experts must be packed first"):
        add_lora(Toy(dense=True), targets=("q_proj", "experts"))
    assert [p.requires_grad for p in model.parameters()] == before
    assert not adapter_state_dict(model)


@pytest.mark.parametrize("options", [{"r": 0}, {"r": -1}, {"r": 2.0}, {"expert_r": 0}])
def test_a_rank_below_one_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        add_lora(Toy(), targets=("experts",), **options)


def test_a_second_set_of_adapters_is_refused() -> None:
    model = trained(Toy())
    with pytest.raises(
        ValueError, match="has adapters already, layers.0.q_proj for one: call remove_adapters"
    ):
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
def test_fault_c12_factors_keep_their_dtype_under_other_activations(
    x_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    model = trained(Toy().to(x_dtype), dtype=dtype)
    y = model(torch.randn(4, HIDDEN, dtype=x_dtype))
    y.float().square().mean().backward()
    assert y.dtype == x_dtype
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert (
                parameter.dtype == dtype and parameter.grad is not None and parameter.grad.dtype == dtype
            ), name


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


# the layout of the file, against PEFT itself


def peft_adapter(directory: Path, num_experts: int, **config: object) -> PeftModel:
    """An adapter that stock PEFT made, trained and saved on the dense toy; returns the PEFT model."""
    settings: dict[str, object] = {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }  # fmt: skip
    model = get_peft_model(Toy(num_experts, dense=True), LoraConfig(**(settings | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 251 - 125.0)
    model.save_pretrained(directory)
    return model


def peft_delta(model: PeftModel, projection: str, layer: int = 0) -> Tensor:
    wrapper = model.base_model.model.layers[layer].mlp.experts
    while wrapper.parameter_name != projection:
        wrapper = wrapper.base_layer
    return wrapper.get_delta_weight("default").detach()


@pytest.mark.parametrize("num_experts", [3, 4])
def test_fault_c2_rank_is_slowest_in_b(tmp_path: Path, num_experts: int) -> None:
    """Distinct integers, R = 4; with E = R = 4 no shape tells rank and expert apart."""
    reference = peft_adapter(tmp_path, num_experts)
    model = Toy(num_experts)
    load_adapter(model, tmp_path)
    for layer in range(2):
        experts = model.layers[layer].mlp.experts
        assert torch.equal(delta(experts, "gate_up"), peft_delta(reference, "gate_up_proj", layer))
        assert torch.equal(delta(experts, "down"), peft_delta(reference, "down_proj", layer))
    written, stock = adapter_state_dict(model), load_file(tmp_path / "adapter_model.safetensors")
    assert written.keys() == stock.keys() and all(torch.equal(written[k], stock[k]) for k in stock)


@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_one_projection_is_wrapped_once(tmp_path: Path, projection: str) -> None:
    reference = peft_adapter(tmp_path, 3, target_parameters=[f"mlp.experts.{projection}_proj"])
    model = Toy(3)
    load_adapter(model, tmp_path)
    assert torch.equal(
        delta(model.layers[1].mlp.experts, projection), peft_delta(reference, f"{projection}_proj", 1)
    )
    assert adapter_state_dict(model).keys() == load_file(tmp_path / "adapter_model.safetensors").keys()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"use_rslora": True, "r": 16, "lora_alpha": 16},
        {"rank_pattern": {"experts.down_proj": 2, "q_proj": 3}},
        {"rank_pattern": {r"layers\.1\..*": 2}, "alpha_pattern": {"q_proj": 5, "gate_up_proj": 32}},
        {"use_rslora": True, "rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    ],
)
def test_fault_c14_scaling_comes_from_the_config(tmp_path: Path, config: dict[str, object]) -> None:
    reference = peft_adapter(tmp_path / "peft", 3, **config)
    model = Toy(3)
    load_adapter(model, tmp_path / "peft")
    for layer in range(2):
        experts = model.layers[layer].mlp.experts
        torch.testing.assert_close(delta(experts, "gate_up"), peft_delta(reference, "gate_up_proj", layer))
        torch.testing.assert_close(delta(experts, "down"), peft_delta(reference, "down_proj", layer))
        q_proj = reference.base_model.model.layers[layer].q_proj
        assert model.layers[layer].q_proj.scaling == q_proj.scaling["default"]
    save_adapter(model, tmp_path / "ours")
    reread = PeftModel.from_pretrained(Toy(3, dense=True), tmp_path / "ours")
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(peft_delta(reread, name, 1), peft_delta(reference, name, 1))
    if config.get("r") == 16:
        assert model.layers[0].mlp.experts.down_scaling == 4.0


def test_golden_adapter_has_the_recorded_deltas() -> None:
    expected = load_file(GOLDEN / "expected.safetensors")
    base = load_file(GOLDEN / "base_f32.safetensors")
    prefix = "model.layers.0"
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    layer = model.model.layers[0]
    layer.mlp, layer.self_attn = nn.Module(), nn.Module()
    dense = [base[f"{prefix}.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")]
    layer.mlp.experts = NVFP4Experts.from_dense(*dense)
    layer.self_attn.q_proj = nn.Linear(32, 32, bias=False)
    load_adapter(model, GOLDEN / "adapter_3d")
    for projection, weight in zip(("gate_up", "down"), dense, strict=True):
        found = delta(layer.mlp.experts, projection)
        torch.testing.assert_close(found, expected[f"delta.{projection}_proj"])
        torch.testing.assert_close(weight + found, expected[f"merged.{projection}_proj"])
    golden = load_file(GOLDEN / "adapter_3d" / "adapter_model.safetensors")
    written = adapter_state_dict(model)
    assert written.keys() == golden.keys() and all(torch.equal(written[k], golden[k]) for k in golden)


@given(e=st.integers(2, 5), r=st.integers(1, 5), interleaved=st.booleans(), seed=st.integers(0, 9))
def test_stock_rows_and_canonical_rows_are_one_weight(e: int, r: int, interleaved: bool, seed: int) -> None:
    """PEFT's formula on what is written gives the stock module's delta; reading it back is the identity."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    model.experts = NVFP4Experts(e, HIDDEN, INTER)
    model.experts.stock_layout = StockLayout(interleaved=interleaved)
    add_lora(model, r=r, alpha=3, targets=("experts",))
    for name, parameter in model.experts.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, generator=generator)
    state = adapter_state_dict(model)
    a = state["base_model.model.experts.base_layer.lora_A.weight"].reshape(e, r, HIDDEN)
    b = state["base_model.model.experts.base_layer.lora_B.weight"].reshape(2 * INTER, r, e)
    stock = torch.einsum("ore,eri->eoi", b, a) * 3 / r
    ours = delta(model.experts, "gate_up")
    if interleaved:
        stock = torch.cat([stock[:, ::2], stock[:, 1::2]], 1)
    torch.testing.assert_close(stock, ours)
    for site, keys in peft.keys_of(list(iter_sites(model))).items():
        read = peft.from_peft(site, *(state[key] for key in keys))
        assert all(torch.equal(found, kept) for found, kept in zip(read, site.factors, strict=True))


# files


def rewrite(directory: Path, change: Callable[[dict[str, Tensor], dict[str, object]], None]) -> None:
    weights, config_file = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    state, config = load_file(weights), json.loads(config_file.read_text())
    change(state, config)
    save_file(state, weights)
    config_file.write_text(json.dumps(config))


KEY = "base_model.model.layers.1.mlp.experts.base_layer.lora_B.weight"
BROKEN: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "missing": (lambda s, c: s.pop(KEY), f"adapter_model.safetensors lacks {KEY}"),
    "unexpected": (
        lambda s, c: s.update({"x.lora_A.weight": torch.ones(1)}),
        "has the unexpected x.lora_A.weight",
    ),
    "experts": (
        lambda s, c: s.update({KEY: s[KEY][:, :8].clone()}),
        rf"{KEY}: expected shape \[32, 12\] for E = 3 experts and R = 4, got \[32, 8\]",
    ),
    "rank": (lambda s, c: c.update(r=3), r"lora_A.weight: expected shape \[3, 32\] for R = 3, got \[4, 32\]"),
    "dtype": (
        lambda s, c: s.update({KEY: s[KEY].int()}),
        f"{KEY}: expected a floating dtype, got torch.int32",
    ),
    "other linear": (
        lambda s, c: c["target_modules"].append("k_proj"),
        "the adapter's target 'k_proj' matches no linear layer",
    ),
    "other parameter": (
        lambda s, c: c.update(target_parameters=["moe.gate_up_proj"]),
        "the adapter's target 'moe.gate_up_proj' matches no packed expert parameter",
    ),
    "one target less": (
        lambda s, c: c.update(target_modules=[]),
        "has the unexpected .*layers.0.q_proj.lora_A",
    ),
    "regex": (lambda s, c: c.update(target_modules=r".*k_proj"), "target '.*k_proj' matches no linear layer"),
    "all": (lambda s, c: c.update(target_modules="all-linear"), "'all-linear' is not supported"),
    "kind": (lambda s, c: c.update(peft_type="LOHA"), "peft_type is 'LOHA', only 'LORA' is supported"),
    "dora": (lambda s, c: c.update(use_dora=True), "use_dora=True is not supported"),
    "pissa": (lambda s, c: c.update(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
    "layout": (
        lambda s, c: c.update(lora_B_layout="grouped_by_expert"),
        "lora_B_layout='grouped_by_expert' is not",
    ),
    "no rank": (lambda s, c: c.pop("r"), "r=None, lora_alpha=8 must be a rank"),
}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_load_is_strict_and_changes_nothing(tmp_path: Path, case: str, adapted: bool) -> None:
    change, message = BROKEN[case]
    save_adapter(trained(Toy()), tmp_path)
    rewrite(tmp_path, change)
    model = trained(Toy()) if adapted else Toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if adapted and case == "rank":
        message = "layers.0.q_proj: the adapter has rank R = 3, the model's has R = 4"
    if adapted and case == "one target less":
        message = "only the model adapts layers.0.q_proj, layers.1.q_proj"
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_fault_c16_dropout_is_refused_in_words(tmp_path: Path) -> None:
    save_adapter(trained(Toy()), tmp_path)
    rewrite(tmp_path, lambda s, c: c.update(lora_dropout=0.1))
    with pytest.raises(
        ValueError, match="lora_dropout=0.1 is not supported; set it to 0, a trained adapter's output"
    ):
        load_adapter(Toy(), tmp_path)


def test_per_expert_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="the adapter's target '.*_proj' matches no linear layer"):
        load_adapter(Toy(), GOLDEN / "adapter_2d")


@pytest.mark.parametrize("kind", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_and_damaged_files(tmp_path: Path, kind: str) -> None:
    save_adapter(trained(Toy()), tmp_path)
    whole = (tmp_path / kind).read_bytes()
    (tmp_path / kind).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="holds a damaged adapter"):
        load_adapter(Toy(), tmp_path)
    (tmp_path / kind).unlink()
    with pytest.raises(ValueError, match=f"has no {kind}: not an adapter, or its saving was interrupted"):
        load_adapter(Toy(), tmp_path)


@pytest.mark.parametrize("packed_linear", [False, True])
def test_save_and_load_give_the_same_model(tmp_path: Path, packed_linear: bool) -> None:
    torch.manual_seed(1)
    model = trained(Toy(packed_linear=packed_linear), expert_r=2, rslora=True)
    x = torch.randn(5, HIDDEN)
    save_adapter(model, tmp_path / "new" / "folder", base_model_name_or_path="base")
    torch.manual_seed(1)
    fresh = Toy(packed_linear=packed_linear)
    load_adapter(fresh, tmp_path / "new" / "folder")
    assert torch.equal(fresh(x), model(x))
    assert {n for n, p in fresh.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    remove_adapters(fresh)
    trained(fresh, expert_r=2, alpha=99)  # another scaling: the file's must win
    load_adapter(fresh, tmp_path / "new" / "folder")
    assert torch.equal(fresh(x), model(x))
    config = json.loads((tmp_path / "new" / "folder" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 8, True)
    assert config["rank_pattern"] == {"q_proj": 4} and config["base_model_name_or_path"] == "base"
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_saving_without_adapters_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has no adapters"):
        save_adapter(Toy(), tmp_path)
    with pytest.raises(ValueError, match="PEFT has no name for an adapter on the root module"):
        experts = NVFP4Experts(2, HIDDEN, INTER)
        experts.add_lora(2, scaling=1.0)
        adapter_state_dict(experts)


def renames_until(kill_at: int) -> Callable[[Path, Path], None]:
    """os.replace that is interrupted before its rename number `kill_at`."""
    renames = itertools.count()

    def replace(source: Path, target: Path) -> None:
        if next(renames) == kill_at:
            raise KeyboardInterrupt
        shutil.move(source, target)

    return replace


@pytest.mark.parametrize("same_config", [True, False])
def test_a_kill_at_any_rename_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_config: bool
) -> None:
    old, new = trained(Toy()), trained(Toy(), alpha=8 if same_config else 64)
    outcomes = set()
    for kill_at in range(4):
        directory = tmp_path / str(kill_at)
        save_adapter(old, directory)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", renames_until(kill_at))
            save_adapter(new, directory)
        model = Toy()
        try:
            load_adapter(model, directory)
        except ValueError as error:
            assert "has no adapter_config.json" in str(error)
            outcomes.add("refused")
            continue
        found = adapter_state_dict(model)
        is_new = torch.equal(found[KEY], adapter_state_dict(new)[KEY])
        assert is_new or torch.equal(found[KEY], adapter_state_dict(old)[KEY])
        wanted = (new if is_new else old).layers[0].q_proj.scaling
        assert model.layers[0].q_proj.scaling == wanted
        outcomes.add("new" if is_new else "old")
    assert outcomes == ({"old", "new"} if same_config else {"refused", "new"})


def test_names_are_those_of_the_bare_model_under_wrappers(tmp_path: Path) -> None:
    model = trained(Toy())
    names = adapter_state_dict(model).keys()
    compiled = torch.compile(model, backend="eager")
    assert adapter_state_dict(compiled).keys() == names
    save_adapter(compiled, tmp_path)
    load_adapter(compiled, tmp_path)


def test_targets_name_what_is_adapted_and_nothing_else(tmp_path: Path) -> None:
    """An adapter on one of two like-named layers is saved under its full name."""
    model = Toy()
    add_lora(model, r=2, targets=("layers.1.q_proj", "layers.0.mlp.experts.down_proj"))
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["1.q_proj"]
    assert config["target_parameters"] == ["0.mlp.experts.down_proj"]
    reference = PeftModel.from_pretrained(Toy(dense=True), tmp_path)
    stock = {name for name, _ in reference.named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in stock} == adapter_state_dict(model).keys()
