"""4-bit activations under a calibrated scale in place of one for each row: numbers, modules, checkpoints."""

from pathlib import Path

import pytest
import torch
from golden_models import GOLDEN, QWEN, load, logits, read_config, write
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from samples import assert_same_bits
from strategies import make_layer
from torch import Tensor

import torch_nvfp4.hf  # noqa: F401  (registers the loader)
from torch_nvfp4.checkpoint import convert_folder, open_checkpoint, use_input_scales
from torch_nvfp4.format import dequantize, quantize
from torch_nvfp4.nn import PROJECTIONS, NVFP4Experts, NVFP4Linear, set_numerics
from torch_nvfp4.ops.rows import quantize_rows

pytestmark = pytest.mark.usefixtures("one_thread")
W4A16 = "ckpt_modelopt_qwen3_moe-W4A16_NVFP4_CFG"


def rows(seed: int, m: int, blocks: int) -> Tensor:
    return torch.randn(m, 16 * blocks, generator=torch.Generator().manual_seed(seed)) * 3


# ---- the rows


@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 4), st.floats(2**-20, 1.0, width=32))
def test_rows_are_those_of_quantize_under_that_global_scale(seed: int, m: int, blocks: int, scale: float) -> None:
    x, given_scale = rows(seed, m, blocks), torch.tensor(scale)
    codes, scales, row_scale = quantize_rows(x, given_scale)
    assert_same_bits((codes, scales), quantize(x, given_scale)[:2])
    assert torch.equal(row_scale, given_scale.expand(m))


@given(st.integers(0, 99), st.floats(2**-20, 2**-7, width=32))
def test_what_is_beyond_the_calibrated_largest_value_saturates(seed: int, scale: float) -> None:
    x, given_scale = rows(seed, 4, 2), torch.tensor(scale)
    limit = 6 * (448 * given_scale)
    values = dequantize(*quantize_rows(x, given_scale)[:2], given_scale, torch.float32)
    assert bool((values.abs() <= limit).all())
    beyond = x.abs() > limit
    assert torch.equal(values[beyond], torch.where(x[beyond] > 0, limit, -limit))


def test_a_row_whose_largest_value_is_the_calibrated_one_comes_out_as_without() -> None:
    x = rows(0, 1, 3)
    without = quantize_rows(x)
    assert_same_bits(quantize_rows(x, without[2][0])[:2], without[:2])


def test_values_that_underflow_are_zeros_and_nan_stays_in_its_block() -> None:
    x = rows(1, 2, 2)
    x[0, 3] = torch.nan
    for scale in (1e-3, 3e38):
        values = dequantize(*quantize_rows(x, torch.tensor(scale))[:2], torch.tensor(scale), torch.float32)
        assert values[0, :16].isnan().all() and values[0, 16:].isfinite().all() and values[1].isfinite().all()
    assert not values[1].any()


# ---- the layer


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_the_layer_is_that_of_rows_quantised_so(activation: str) -> None:
    """Without LoRA the products see the quantised rows alone: W4A16 of the values that these stand for."""
    layer = make_layer(ranks=(None, None), t=9, activation=activation)
    scale = torch.tensor(0.0007)
    x = dequantize(*quantize_rows(layer.x, scale)[:2], scale, torch.float32)
    routed = torch.ops.nvfp4.moe_route(layer.topk_ids, layer.gate_up_codes.shape[0])
    weight = [layer.tensors[f"gate_up_{part}"] for part in ("codes", "scales", "global_scale")]
    top_k = layer.topk_ids.shape[1]
    run = torch.ops.nvfp4.grouped_lora_linear
    got, _ = run(layer.x, routed[0], routed[2], *weight, top_k=top_k, compute="w4a4", input_scale=scale)
    wanted, _ = run(x, routed[0], routed[2], *weight, top_k=top_k)
    assert (got - wanted).norm() <= 4 * torch.finfo(torch.float32).eps * wanted.norm()  # the scale meets another factor


def test_the_layers_scales_are_those_of_its_small_ops() -> None:
    layer = make_layer(t=9)
    scales = {f"{p}_input_scale": torch.tensor(s) for p, s in zip(PROJECTIONS, (0.0007, 0.002), strict=True)}
    got = torch.ops.nvfp4.moe_lora(*layer.args, **layer.options, compute="w4a4", **scales)
    plain = torch.ops.nvfp4.moe_lora(*layer.args, **layer.options, compute="w4a4")
    one = {
        name: torch.ops.nvfp4.moe_lora(*layer.args, **layer.options, compute="w4a4", **{name: s})
        for name, s in scales.items()
    }
    results = [got, plain, *one.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


# ---- modules


def test_modules_use_their_scales_in_w4a4_alone_and_keep_them_through_casts() -> None:
    torch.manual_seed(0)
    experts = NVFP4Experts.from_dense(torch.randn(4, 64, 32), torch.randn(4, 32, 32))
    x, ids, weights = torch.randn(7, 32), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    plain = experts(x, ids, weights)
    experts.set_input_scales(0.0007, torch.tensor([0.0123]))
    assert torch.equal(experts(x, ids, weights), plain) and "calibrated" not in repr(experts)
    set_numerics(experts, compute="w4a4")
    assert repr(experts).endswith("w4a4, calibrated)")
    wanted = experts(x, ids, weights)
    direct = torch.ops.nvfp4.moe_lora(
        x, ids, weights, *experts.packed("gate_up"), *experts.packed("down"), compute="w4a4",
        gate_up_input_scale=torch.tensor(0.0007), down_input_scale=torch.tensor(0.0123),
    )  # fmt: skip
    assert torch.equal(wanted, direct)
    assert torch.equal(experts.half().float()(x, ids, weights), wanted)
    assert not any("input_scale" in name for name in experts.state_dict())
    experts.set_input_scales(None, None)
    assert not torch.equal(experts(x, ids, weights), wanted) and repr(experts).endswith("w4a4)")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-60, torch.ones(2)])
def test_a_scale_that_is_none_is_refused(scale: Tensor | float) -> None:
    linear = NVFP4Linear(32, 16)
    with pytest.raises(ValueError, match="an input scale must be one finite, positive number, got"):
        linear.set_input_scales(scale)
    with pytest.raises(ValueError, match="1 input scales are needed, got 2"):
        linear.set_input_scales(0.1, 0.1)


def test_a_layer_with_scales_compiles_whole() -> None:
    torch.manual_seed(0)
    experts = NVFP4Experts.from_dense(torch.randn(4, 64, 32), torch.randn(4, 32, 32))
    experts.add_lora(3, scaling=0.5)
    set_numerics(experts, compute="w4a4")
    experts.set_input_scales(0.0007, 0.0123)
    x, ids, weights = torch.randn(7, 32), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    wanted = experts(x, ids, weights)
    assert torch.equal(torch.compile(experts, fullgraph=True, backend="aot_eager")(x, ids, weights), wanted)


# ---- checkpoints


def test_a_checkpoints_scales_are_used_the_largest_of_each_product() -> None:
    model, checkpoint = load(GOLDEN / QWEN), open_checkpoint(GOLDEN / QWEN)
    plain = logits(model)
    count = use_input_scales(model)
    assert count == len(checkpoint.experts) + len(checkpoint.linears)
    for path in checkpoint.experts:
        scales, module = checkpoint.input_scale(path), model.get_submodule(path)
        assert scales is not None and module.compute == "w4a4"
        for name, wanted in (("gate_up", scales[:, :2].max()), ("down", scales[:, 2].max())):
            assert torch.equal(getattr(module, f"{name}_input_scale").view(torch.float32), wanted)
    for path in checkpoint.linears:
        assert torch.equal(model.get_submodule(path).input_scale.view(torch.float32), checkpoint.input_scale(path))
    calibrated = logits(model)
    assert use_input_scales(model, on=False) == count
    by_row = logits(model)
    assert not torch.equal(calibrated, by_row) and not torch.equal(calibrated, plain)
    assert (calibrated - plain).norm() < 0.5 * plain.norm()


def test_a_checkpoint_without_scales_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = load(GOLDEN / W4A16)
    with pytest.raises(ValueError, match="it was not loaded from a checkpoint with calibrated scales of activations"):
        use_input_scales(model)
    assert {m.compute for m in model.modules() if isinstance(m, NVFP4Experts)} == {"w4a16"}
    with pytest.raises(ValueError, match="has no packed module"):
        use_input_scales(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("how", ["algorithm", "bits"])
def test_scales_of_8_bit_activations_are_refused(how: str, tmp_path: Path) -> None:
    """They are amax / 448, and NVFP4's amax / 2688."""
    tensors, config = load_file(GOLDEN / QWEN / "model.safetensors"), read_config(GOLDEN / QWEN)
    declared = config["quantization_config"]
    if how == "algorithm":
        declared["quant_algo"] = "W4A8_NVFP4_FP8"
    else:
        declared["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": False}
    write(tmp_path, tensors, config, declared)
    model = load(tmp_path)
    with pytest.raises(ValueError, match="its checkpoint's scales are those of 8-bit activations"):
        use_input_scales(model)
    convert_folder(tmp_path, tmp_path / "other", layout="compressed-tensors")
    other = open_checkpoint(tmp_path / "other")
    assert all(other.form(path).input_scales is None for path in (*other.experts, *other.linears))
    group = other.config["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] is None


@pytest.mark.parametrize(("scale", "refused"), [(None, False), (0.0, False), (-1e-3, True), (torch.inf, True)])
def test_an_expert_may_lack_its_scale_but_not_have_a_wrong_one(
    scale: float | None, refused: bool, tmp_path: Path
) -> None:
    """Experts that saw no token have none, or 0: the largest of the others counts."""
    tensors, config = load_file(GOLDEN / QWEN / "model.safetensors"), read_config(GOLDEN / QWEN)
    (path,) = open_checkpoint(GOLDEN / QWEN).experts
    name = f"{path}.0.down_proj.input_scale"
    down = [n for n in tensors if n.startswith(path) and n.endswith(".down_proj.input_scale")]
    others = [tensors[n] for n in down if n != name]
    if scale is None:
        del tensors[name]
    else:
        tensors[name] = torch.full_like(tensors[name], scale)
    write(tmp_path, tensors, config, config["quantization_config"])
    model = load(tmp_path)
    experts = model.get_submodule(path)
    if refused:
        with pytest.raises(ValueError, match="has no positive, finite scale of activations for each product"):
            use_input_scales(model)
        assert experts.compute == "w4a16" and experts.down_input_scale is None
    else:
        use_input_scales(model)
        assert experts.down_input_scale.view(torch.float32) == max(others)
