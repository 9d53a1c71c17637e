"""Stock PEFT calls on packed models: adapters, files and refusals, against PEFT on the dense model."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_models import GOLDEN
from hf_models import (
    ONE_LAYER,
    assert_same_grads,
    logits,
    quantized_and_dense,
    randomize_adapters,
    token_ids,
    train_step,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from torch_nvfp4.hf import dequantize_experts, quantize_experts
from torch_nvfp4.lora import add_lora, disable_adapters, export_adapter, load_adapter, remove_adapters, save_adapter
from torch_nvfp4.nn import NVFP4Experts, NVFP4Linear, set_numerics

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SAME = dict(rtol=0, atol=1e-5)  # fp32 models; logits are of order 1
ADAPTER = GOLDEN / "peft_qwen3_moe"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:`(is_gradient_checkpointing|gradient_checkpointing_enable)` is dep:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:Already unmerged. Nothing to do"),
    # PEFT 0.21 honours a pattern that names a parameter, and says that it did not
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def packed_and_dense(architecture: str = "qwen3_moe", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One layer, packed experts and q_proj, and the stock model with the same weights."""
    packed, dense = quantized_and_dense(architecture, **ONE_LAYER[architecture], **changes)
    for path, module in list(packed.named_modules()):
        if path.endswith("q_proj"):
            packed.set_submodule(path, NVFP4Linear.from_dense(module))
            with torch.no_grad():
                dense.get_submodule(path).weight.copy_(packed.get_submodule(path).dequantize(torch.float32))
    return packed, dense


def config(**changes: Any) -> LoraConfig:
    settings = dict(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"], target_parameters=BOTH)
    return LoraConfig(**(settings | changes))


def adapted(model: nn.Module, **changes: Any) -> PeftModel:
    peft_model = get_peft_model(model, config(**changes))
    randomize_adapters(peft_model)
    return peft_model.eval()


def golden_models() -> tuple[nn.Module, nn.Module]:
    """The golden base with packed experts, and dense with the dequantised ones."""
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json_file(ADAPTER / "base_config.json"))
    model.load_state_dict(load_file(ADAPTER / "base_f32.safetensors"))
    packed = quantize_experts(model.eval())
    return packed, dequantize_experts(copy.deepcopy(packed))


def golden_grads(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    found = model(input_ids=ids, use_cache=False).logits
    found.logsumexp(-1).mean().backward()
    named = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return found.detach(), named


@pytest.mark.parametrize("form", ["adapter_3d", "adapter_2d"])
def test_golden_adapters_compute_and_train_as_in_stock_peft(form: str) -> None:
    packed, dense = golden_models()
    golden = load_file(ADAPTER / "expected.safetensors")
    (found, grads), (expected, expected_grads) = (
        golden_grads(PeftModel.from_pretrained(model, ADAPTER / form, is_trainable=True), golden["input_ids"])
        for model in (packed, dense)
    )
    torch.testing.assert_close(found, expected, **SAME)
    assert_same_grads(grads, expected_grads)
    # the recorded values are of the unquantised base: quantising moves them by a few per cent
    assert 0 < (found - golden["logits"]).norm() / golden["logits"].norm() < 0.15
    if form == "adapter_3d":
        recorded = {key.removeprefix("grad."): grad for key, grad in golden.items() if key.startswith("grad.")}
        assert recorded.keys() == grads.keys()
        for key, grad in recorded.items():
            assert torch.cosine_similarity(grads[key].flatten(), grad.flatten(), dim=0) > 0.9, key


def test_golden_adapter_is_saved_as_it_was_read(tmp_path: Path) -> None:
    packed, _ = golden_models()
    PeftModel.from_pretrained(packed, ADAPTER / "adapter_3d").save_pretrained(tmp_path)
    written, read = (load_file(p / "adapter_model.safetensors") for p in (tmp_path, ADAPTER / "adapter_3d"))
    assert written.keys() == read.keys() and all(torch.equal(written[key], read[key]) for key in read)


def test_a_golden_adapter_of_the_other_layout_is_saved_as_one_that_stock_peft_loads(tmp_path: Path) -> None:
    """PEFT fuses gate and up, each with an A, to twice the rank, and saves that."""
    packed, dense = golden_models()
    ids = load_file(ADAPTER / "expected.safetensors")["input_ids"]
    ours = PeftModel.from_pretrained(packed, ADAPTER / "adapter_2d")
    ours.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(dense, tmp_path)
    found, expected = (model(input_ids=ids, use_cache=False).logits for model in (ours, stock))
    torch.testing.assert_close(found, expected, **SAME)


OPTIONS: dict[str, dict[str, Any]] = {
    "both": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"experts.down_proj": 2, "q_proj": 4}, "alpha_pattern": {"gate_up_proj": 9}},
    "gate_up alone": {"target_parameters": BOTH[:1]},
    "down alone": {"target_parameters": BOTH[1:]},
    "experts alone": {"target_modules": []},
    "linear alone": {"target_parameters": None},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("option", OPTIONS)
def test_stock_peft_loads_what_a_packed_model_saved_and_the_other_way(
    tmp_path: Path, architecture: str, option: str
) -> None:
    packed, dense = packed_and_dense(architecture)
    bare = logits(packed)
    ours = adapted(packed, **OPTIONS[option])
    ours.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(dense, tmp_path, is_trainable=True).eval()
    expected = logits(stock)
    torch.testing.assert_close(logits(ours), expected, **SAME)
    assert_same_grads(train_step(ours), train_step(stock))
    assert (expected - bare).abs().max() > 0.01, "the adapter must show"
    with ours.disable_adapter():
        assert torch.equal(logits(ours), bare)
    again = PeftModel.from_pretrained(packed_and_dense(architecture)[0], tmp_path).eval()
    assert torch.equal(logits(again), logits(ours))


def test_several_adapters(tmp_path: Path) -> None:
    packed, dense = packed_and_dense("gpt_oss")
    bare, found, expected = logits(packed), {}, {}
    models = []
    for model in (packed, dense):
        peft_model = get_peft_model(model, config(), adapter_name="first")
        peft_model.add_adapter("second", config(r=2, use_rslora=True))
        generator = torch.Generator().manual_seed(3)
        for name, parameter in sorted(peft_model.named_parameters()):
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1, generator=generator)
        models.append(peft_model.eval())
    for model, results in zip(models, (found, expected), strict=True):
        for chosen in ("second", "first"):
            model.set_adapter(chosen)
            results[chosen] = logits(model)
        model.base_model.set_adapter(["first", "second"])
        results["both"] = logits(model)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **SAME, msg=lambda text, n=name: f"{n}: {text}")
    assert len({tuple(values.flatten().tolist()) for values in found.values()}) == 3
    ours = models[0]
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled), found["both"], **SAME)
    ours.delete_adapter("second")
    torch.testing.assert_close(logits(ours), found["first"], **SAME)
    assert torch.equal(logits(ours.unload()), bare)
    assert isinstance(packed.model.layers[0].mlp.experts, NVFP4Experts)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_each_sample_of_a_batch_uses_the_adapter_that_it_names(architecture: str) -> None:
    """Of experts, of a packed layer and of a plain one; against each sample alone with its adapter."""
    packed, _ = packed_and_dense(architecture)
    bare = logits(packed)
    model = adapted(packed)
    model.add_adapter("second", config(r=2, use_rslora=True))
    randomize_adapters(model)
    for name, parameter in model.named_parameters():
        if ".second." in name:
            nn.init.normal_(parameter, std=0.2)
    model.eval()
    expected = {"__base__": bare}
    for name in ("default", "second"):
        model.set_adapter(name)
        expected[name] = logits(model)
    assert not torch.allclose(expected["default"], expected["second"])
    for names in (["default", "second"], ["second", "__base__"], ["second", "second"], ["__base__", "__base__"]):
        found = logits(model, adapter_names=names)
        torch.testing.assert_close(found, torch.stack([expected[n][i] for i, n in enumerate(names)]), **SAME)
    with pytest.raises(ValueError, match="non-existing adapter"):
        logits(model, adapter_names=["default", "third"])
    with pytest.raises(ValueError, match="Length of `adapter_names`|adapter_names names 5 samples"):
        logits(model, adapter_names=["default"] * 5)


@pytest.mark.parametrize("numerics", [{"merge_aware": True}, {"compute": "w4a4"}])
def test_each_sample_of_a_batch_is_computed_with_the_numerics_that_are_set(numerics: dict[str, Any]) -> None:
    """Of experts and of a packed layer; merge-aware, each adapter makes another packed weight."""
    packed, _ = packed_and_dense()
    model = adapted(packed)
    model.add_adapter("second", config(r=2, lora_alpha=9))
    randomize_adapters(model)
    usual = logits(model)
    set_numerics(model, **numerics)
    q_proj = model.base_model.model.model.layers[0].self_attn.q_proj
    x, expected, of_layer = torch.randn(3, 5, 32), {}, {}
    for name in ("default", "second"):
        model.set_adapter(name)
        expected[name], of_layer[name] = logits(model), q_proj(x)
    with model.disable_adapter():
        expected["__base__"], of_layer["__base__"] = logits(model), q_proj(x)
        assert torch.equal(q_proj(x, adapter_names=["second"] * 3), of_layer["__base__"])
    model.set_adapter("default")
    assert not torch.allclose(usual, expected["default"], **SAME)
    for names in (["default", "second"], ["second", "__base__"], ["second", "second"]):
        found = logits(model, adapter_names=names)
        torch.testing.assert_close(found, torch.stack([expected[n][i] for i, n in enumerate(names)]), **SAME)
    names = ["second", "__base__", "default"]
    found = q_proj(x, adapter_names=names)
    torch.testing.assert_close(found, torch.stack([of_layer[n][i] for i, n in enumerate(names)]), **SAME)
    assert q_proj(x[:0], adapter_names=[]).shape == found[:0].shape


class Watch(TorchDispatchMode):
    """Names of the ops that run, and the largest floating-point result of any."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.ops.append(op.name())
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return result


def test_adapters_run_in_the_grouped_ops_and_no_dense_weight_is_ever_made() -> None:
    packed, _ = packed_and_dense(num_experts=64, num_experts_per_tok=1)
    model = adapted(packed, target_modules=["q_proj"]).train()
    with Watch() as watch:
        model(input_ids=token_ids()[:1, :4], labels=token_ids()[:1, :4], use_cache=False).loss.backward()
    assert sum(name == "nvfp4::grouped_lora_linear" for name in watch.ops) == 2  # gate_up, q_proj
    assert "nvfp4::glu_grouped_lora_linear" in watch.ops and "nvfp4::dequantize" not in watch.ops
    factors = max(p.numel() for p in model.parameters() if p.requires_grad)
    assert watch.largest <= factors < 64 * 32 * 16  # [E, N, C] of the smaller projection


def test_dropout_works_on_linear_layers() -> None:
    model = adapted(packed_and_dense()[0], target_parameters=None, lora_dropout=0.5)
    expected = logits(model)
    assert torch.equal(logits(model), expected)
    model.train()
    assert not torch.equal(logits(model), logits(model))


def test_dropout_has_no_place_in_a_merge_aware_forward() -> None:
    """Nor does it change what trains without it, or what is evaluated."""
    model = adapted(packed_and_dense()[0], target_modules=["q_proj"], target_parameters=None, lora_dropout=1e-9)
    usual = logits(model)
    set_numerics(model, merge_aware=True)
    merged = logits(model)
    assert not torch.allclose(merged, usual, **SAME)
    model.train()
    with pytest.raises(ValueError, match="lora_dropout drops inputs of the adapter alone.*set lora_dropout=0, or set_"):
        logits(model)
    with model.disable_adapter():
        logits(model)
    set_numerics(model, compute="w4a4", merge_aware=False)
    found = logits(model)  # the base's product has 4-bit activations, as without dropout
    torch.testing.assert_close(found, logits(model.eval()), **SAME)


def test_dropouts_mask_is_the_same_when_a_checkpoint_recomputes() -> None:
    model = adapted(packed_and_dense()[0], target_parameters=None, lora_dropout=0.5).train()
    torch.manual_seed(4)
    expected = train_step(model)
    model.gradient_checkpointing_enable()
    torch.manual_seed(4)
    assert_same_grads(train_step(model), expected)
    torch.manual_seed(5)
    other = train_step(model)
    assert not all(torch.allclose(other[name], expected[name]) for name in expected)


def test_a_cloned_reference_adapter() -> None:
    """As trainers of preferences keep one: a copy that stays while the other trains."""
    model = adapted(packed_and_dense()[0])
    model.add_adapter("ref", model.peft_config["default"])
    state = model.state_dict()
    for name in [name for name in state if ".default." in name]:
        state[name.replace(".default.", ".ref.")].copy_(state[name])
    before = logits(model)
    model.set_adapter("ref")
    assert torch.equal(logits(model), before)
    model.set_adapter("default")
    grads = train_step(model)
    assert grads and not any(".ref." in name for name in grads)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in grads:
                parameter -= grads[name]
    assert not torch.allclose(logits(model), before)
    model.set_adapter("ref")
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_dropout": 0.1}, "ParamWrapper does not work with lora_dropout"),
        ({"use_dora": True, "target_parameters": None}, "use_dora=True is not supported on packed weights"),
        ({"use_dora": True, "target_modules": []}, "ParamWrapper does not work with use_dora"),
        ({"lora_bias": True, "target_parameters": None}, "lora_bias=True is not supported on packed weights"),
        ({"bias": "all"}, "bias='all' is not supported on packed weights: their biases are frozen"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported on packed weights"),
        ({"target_modules": "all-linear"}, "'all-linear' does not see packed linear layers: name the layers"),
        ({"target_modules": ["experts"]}, "packed experts: name them in target_parameters, as 'experts.gate_up_proj'"),
    ],
)
def test_what_cannot_work_is_refused_in_words(changes: dict[str, Any], text: str) -> None:
    packed, _ = packed_and_dense()
    with pytest.raises(ValueError, match=text):
        get_peft_model(packed, config(**changes))
    names = {name for name, _ in packed.named_parameters()}
    assert not any(name.endswith(("gate_up_proj", "down_proj", "q_proj.weight")) for name in names)


@pytest.mark.parametrize("modules", [["q_proj", "o_proj"], [], ["o_proj", "gate"]])
def test_merging_is_refused_and_no_byte_changes(modules: list[str]) -> None:
    """o_proj and the router are plain and could be merged: they are not, for the rest could not follow."""
    model = adapted(packed_and_dense()[0], target_modules=modules)
    expected, before = logits(model), {name: p.clone() for name, p in model.state_dict().items()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="cannot be merged into packed weights.*merge it into the dense model"):
            merge()
    model.unmerge_adapter()
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(model), expected)


def test_plain_layers_beside_packed_ones_merge() -> None:
    packed, _ = packed_and_dense()
    model = adapted(packed, target_modules=["o_proj", "gate"], target_parameters=None)
    expected = logits(model)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, **SAME)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected, **SAME)
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, **SAME)


def test_adapters_of_add_lora_are_not_mixed_with_pefts() -> None:
    packed, _ = packed_and_dense()
    add_lora(packed, r=2, targets=("experts",))
    with pytest.raises(ValueError, match="experts.* has an adapter of add_lora: save_adapter, then remove_adapters"):
        get_peft_model(packed, config(target_parameters=None))
    _, dense = packed_and_dense()
    add_lora(dense, r=2, targets=("q_proj",))
    with pytest.raises(ValueError, match="q_proj has an adapter of add_lora"):
        get_peft_model(dense, config(target_parameters=None))


@pytest.mark.parametrize("is_packed", [True, False])
def test_adapters_of_pefts_are_not_mixed_with_add_lora(is_packed: bool, tmp_path: Path) -> None:
    model = adapted(packed_and_dense()[0 if is_packed else 1])
    model.save_pretrained(tmp_path)
    before = set(model.state_dict())
    for change in (add_lora, partial(add_lora, targets="experts"), partial(load_adapter, directory=tmp_path),
                   partial(save_adapter, directory=tmp_path), partial(export_adapter, directory=tmp_path),
                   remove_adapters, lambda model: disable_adapters(model).__enter__()):  # fmt: skip
        with pytest.raises(ValueError, match=r"has PEFT's adapters: .*take them off with its unload\(\) first"):
            change(model)
    assert set(model.state_dict()) == before
    if is_packed:
        add_lora(model.unload(), targets="experts")


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute in the model")
def test_a_second_adapter_of_one_name_is_refused() -> None:
    model, before = packed_and_dense()[0], set()
    for adapter in ("default", "other"):
        get_peft_model(model, config(), adapter_name=adapter)
        assert before < (before := set(model.state_dict()))
        with pytest.raises(ValueError, match=f"an adapter '{adapter}' of PEFT's already: take it off with unload"):
            get_peft_model(model, config(), adapter_name=adapter)
        assert set(model.state_dict()) == before


def test_a_packed_layer_that_is_named_like_an_experts_projection(tmp_path: Path) -> None:
    """`save_adapter` names shared experts by their parameter; PEFT finds it although the layer is packed."""
    packed, dense = quantized_and_dense("qwen2_moe", **ONE_LAYER["qwen2_moe"])
    add_lora(packed, r=2, alpha=4, targets=("experts", "shared_expert.down_proj"))
    randomize_adapters(packed)
    save_adapter(packed, tmp_path)
    again, _ = quantized_and_dense("qwen2_moe", **ONE_LAYER["qwen2_moe"])
    path = "model.layers.0.mlp.shared_expert.down_proj"
    again.set_submodule(path, NVFP4Linear.from_dense(again.get_submodule(path)))
    with torch.no_grad():
        dense.get_submodule(path).weight.copy_(again.get_submodule(path).dequantize(torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)
        ours, stock = (PeftModel.from_pretrained(model, tmp_path).eval() for model in (again, dense))
    torch.testing.assert_close(logits(ours), logits(stock), **SAME)


def test_models_without_packed_modules_are_pefts_alone() -> None:
    _, dense = packed_and_dense()
    model = get_peft_model(dense, config())
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    assert type(wrapper).__module__ == "peft.tuners.lora.layer"
