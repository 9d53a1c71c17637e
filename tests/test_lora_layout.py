"""The layout of adapter files, against PEFT itself and against recorded PEFT results."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lora_toy import HIDDEN, INTER, Toy, delta
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from torch_nvfp4._lora import peft
from torch_nvfp4._lora.sites import iter_sites
from torch_nvfp4.lora import (
    StockLayout,
    adapter_state_dict,
    add_lora,
    load_adapter,
    save_adapter,
)
from torch_nvfp4.nn import NVFP4Experts

GOLDEN = Path(__file__).parent / "golden" / "peft_qwen3_moe"


pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert torch.equal(delta(model.layers[1].mlp.experts, projection), peft_delta(reference, f"{projection}_proj", 1))
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
        read = peft.split_experts(*(state[key] for key in keys), e, interleaved and site.projection == "gate_up")
        assert all(torch.equal(found, kept) for found, kept in zip(read, site.factors, strict=True))
