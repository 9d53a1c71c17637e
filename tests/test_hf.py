"""The transformers seam: packing every architecture, running it, going back, refusing in words."""

import gc
import textwrap
import weakref
from pathlib import Path
from types import SimpleNamespace

import expecttest
import pytest
import torch
import torch.nn.functional as F
from hf_models import (
    ARCHITECTURES,
    ONE_LAYER,
    TARGETS,
    assert_same_grads,
    logits,
    make_model,
    quantized_and_dense,
    randomize_adapters,
    token_ids,
    train_step,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import torch_nvfp4.hf
from torch_nvfp4.hf import dequantize_experts, quantize_experts
from torch_nvfp4.lora import add_lora, remove_adapters
from torch_nvfp4.nn import NVFP4Experts

EXPERTS = "model.layers.1.mlp.experts"  # layer 0 of DeepSeek-V3 is dense
TIGHT = dict(rtol=1e-5, atol=5e-6)  # fp32 sums in another order


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_model_is_the_dense_model_with_dequantised_weights(architecture: str) -> None:
    packed, dense = quantized_and_dense(architecture)
    original = make_model(architecture)
    assert isinstance(packed.get_submodule(EXPERTS), NVFP4Experts)
    assert type(dense.get_submodule(EXPERTS)) is type(original.get_submodule(EXPERTS))
    torch.testing.assert_close(logits(packed), logits(dense), **TIGHT)
    assert (logits(packed) - logits(original)).abs().max() > 1e-2, "quantising must have changed something"
    for name, weight in original.state_dict().items():
        restored = dense.state_dict()[name]
        assert restored.shape == weight.shape and restored.dtype == weight.dtype
        if ".experts." in name and not name.endswith("bias"):
            assert 0 < (restored - weight).norm() / weight.norm() < 0.12, name
        else:
            assert torch.equal(restored, weight), name


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("intermediate", [32, 64])
def test_fault_c1_square_weights_keep_their_orientation(architecture: str, intermediate: int, format: str) -> None:
    """H = 64 with 2I = H or I = H: gate_up or down is square, and only the flags say what is transposed."""
    name = "intermediate_size" if architecture == "gpt_oss" else "moe_intermediate_size"
    model = make_model(architecture, **ONE_LAYER[architecture], hidden_size=64, **{name: intermediate})
    path = "model.layers.0.mlp.experts"
    originals = {name: p.detach() for name, p in model.get_submodule(path).named_parameters()}
    found = logits(quantize_experts(model, format))
    torch.testing.assert_close(found, logits(dequantize_experts(model)), **TIGHT)
    for name, weight in originals.items():
        assert F.cosine_similarity(weight, model.get_parameter(f"{path}.{name}"), dim=-1).min() > 0.9


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_model_keeps_its_dtype(architecture: str) -> None:
    packed = quantize_experts(make_model(architecture, dtype=torch.bfloat16))
    assert logits(packed).dtype == torch.bfloat16 and logits(packed).isfinite().all()
    assert dequantize_experts(packed).get_parameter(f"{EXPERTS}.down_proj").dtype == torch.bfloat16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_generation(architecture: str) -> None:
    packed, dense = quantized_and_dense(architecture)
    settings = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
    prompt = dict(input_ids=token_ids(), attention_mask=torch.ones_like(token_ids()))
    assert torch.equal(packed.generate(**prompt, **settings), dense.generate(**prompt, **settings))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_gradient_checkpointing(architecture: str) -> None:
    model = quantize_experts(make_model(architecture)).train()
    add_lora(model, r=3, targets=TARGETS[architecture])
    randomize_adapters(model)
    expected = {name: grad.clone() for name, grad in train_step(model).items()}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_grads(train_step(model), expected)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_router_logits_and_auxiliary_loss(architecture: str) -> None:
    packed, dense = quantized_and_dense(architecture)
    call = dict(input_ids=token_ids(), labels=token_ids(), output_router_logits=True, use_cache=False)
    found, expected = packed(**call), dense(**call)
    assert len(found.router_logits) == 2 and found.aux_loss > 0
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, **TIGHT)
    torch.testing.assert_close(found.loss, expected.loss, **TIGHT)
    torch.testing.assert_close(found.router_logits[1], expected.router_logits[1], **TIGHT)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_sentinel_ids_are_not_routed(architecture: str) -> None:
    packed, dense = (model.get_submodule(EXPERTS) for model in quantized_and_dense(architecture))
    x, weights = torch.randn(4, 32), torch.rand(4, 2)
    ids = torch.tensor([[0, 5], [-1, 2], [6, -1], [3, 4]])
    routed = (ids >= 0) & (ids < 5)
    expected = dense(x, torch.where(routed, ids, 0), torch.where(routed, weights, 0))
    found = packed(x, ids, weights)
    torch.testing.assert_close(found, expected, **TIGHT)
    assert torch.equal(found[2], torch.zeros(32))
    assert torch.equal(torch_nvfp4.hf.nvfp4_experts_forward(packed, x, ids, weights), found)


def test_dense_weights_are_freed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gpt_oss", num_hidden_layers=4)
    dense = [weakref.ref(p) for name, p in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    size = sum(ref().numel() for ref in dense[:2])
    alive = []
    pack = NVFP4Experts.from_dense

    def counting(gate_up: Tensor, down: Tensor, **options: object) -> NVFP4Experts:
        alive.append(sum(ref().numel() for ref in dense if ref() is not None))
        return pack(gate_up, down, **options)

    monkeypatch.setattr(NVFP4Experts, "from_dense", counting)
    gc.disable()  # freed at once, not when the collector comes round
    try:
        quantize_experts(model)
        assert alive == [4 * size, 3 * size, 2 * size, size]
        assert all(ref() is None for ref in dense)
    finally:
        gc.enable()
    assert not any(p.is_meta for p in model.parameters())


def test_registered_implementation_refuses_dense_experts() -> None:
    assert ALL_EXPERTS_FUNCTIONS["nvfp4"] is torch_nvfp4.hf.nvfp4_experts_forward
    model = make_model("qwen3_moe")
    model.set_experts_implementation("nvfp4")
    with pytest.raises(RuntimeError, match="Qwen3MoeExperts holds dense weights: call torch_nvfp4.hf.quantize_exp"):
        logits(model)
    quantize_experts(model)
    found = logits(model)
    dequantize_experts(model)
    torch.testing.assert_close(logits(model), found, **TIGHT)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_a_model_loaded_from_a_folder(tmp_path: Path, architecture: str) -> None:
    """Per-expert tensors (Mixtral's w1, w2, w3) and stacked ones, as transformers writes and reads them."""
    made = make_model(architecture)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="nvfp4").eval()
    assert torch.equal(logits(quantize_experts(loaded)), logits(quantize_experts(made)))


def test_adapters_are_not_merged_or_lost_silently() -> None:
    model = quantize_experts(make_model("qwen3_moe"))
    bare = logits(model)
    add_lora(model, r=2, targets=("experts",))
    randomize_adapters(model)
    with pytest.raises(ValueError, match="layers.0.mlp.experts.gate_up_proj has an adapter, which would be lost"):
        dequantize_experts(model)
    remove_adapters(model)
    torch.testing.assert_close(logits(dequantize_experts(model)), bare, **TIGHT)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has no packed experts"):
        dequantize_experts(model)


# experts of other models: what the flags and the code say decides


def other_experts(
    *, act: object = F.silu, apply_gate: object = None, limit: float | None = None, **flags: bool
) -> nn.Module:
    """A parent with a decorated experts module, E = 3, H = 32, I = 16, run by transformers' batched_mm."""
    transposed, gated = flags.get("is_transposed", False), flags.get("has_gate", True)
    bias, rows = flags.get("has_bias", False), 32 if flags.get("has_gate", True) else 16

    class OtherExperts(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.num_experts, self.act_fn, self.limit = 3, act, limit
            name = "gate_up_proj" if gated else "up_proj"
            for key, n, c in ((name, rows, 32), ("down_proj", 32, 16)):
                shape = (3, c, n) if transposed else (3, n, c)
                setattr(self, key, nn.Parameter(torch.randn(shape) / 4))
                if bias:
                    setattr(self, f"{key}_bias", nn.Parameter(torch.randn(3, n)))

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            raise AssertionError("batched_mm runs instead")

    if apply_gate is not None:
        OtherExperts._apply_gate = apply_gate
    parent = nn.Module()
    decorated = use_experts_implementation(**flags)(OtherExperts) if flags else use_experts_implementation(OtherExperts)
    parent.block = decorated(SimpleNamespace(_experts_implementation="batched_mm"))
    return parent


def clamped_silu(self: nn.Module, pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def clamped_after_silu(self: nn.Module, pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


FITTING = {
    "gelu": (dict(act=F.gelu), "gelu"),
    "gelu tanh": (dict(act=nn.GELU("tanh")), "gelu_tanh"),
    "clamped": (dict(apply_gate=clamped_silu, limit=7.0), "silu"),
    "transposed": (dict(is_transposed=True), "silu"),
    "interleaved": (
        dict(is_concatenated=False, apply_gate=lambda s, p: s.act_fn(p[..., ::2]) * p[..., 1::2]), "silu",
    ),
    "bias": (dict(has_bias=True, is_transposed=True), "silu"),
    "not gated": (dict(has_gate=False, act=lambda x: F.relu(x).square()), "relu2"),
}  # fmt: skip


@pytest.mark.parametrize("case", FITTING)
def test_other_experts_that_fit_are_packed(case: str) -> None:
    options, activation = FITTING[case]
    parent = other_experts(**options)
    quantize_experts(parent)
    packed = parent.block
    assert (packed.activation, packed.limit) == (activation, options.get("limit"))
    x, ids, weights = 3 * torch.randn(6, 32), torch.tensor([[0, 1], [1, 2], [2, 0]] * 2), torch.rand(6, 2)
    found = packed(x, ids, weights)
    dequantize_experts(parent)
    torch.testing.assert_close(found, parent.block(x, ids, weights), rtol=1e-5, atol=1e-4)


def doctored(change: object, **options: object) -> nn.Module:
    parent = other_experts(**options)
    change(parent)
    return parent


class Refusals(expecttest.TestCase):
    def text(self, model: nn.Module, format: str = "nvfp4") -> str:
        before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
        with self.assertRaises(ValueError) as caught:
            quantize_experts(model, format)
        after = model.state_dict()
        self.assertTrue(all(torch.equal(after[name], value) for name, value in before.items()))
        return str(caught.exception)

    def test_texts(self) -> None:
        def share(parent: nn.Module) -> None:
            parent.other = nn.Module()
            parent.other.weight = parent.block.down_proj

        def shrink(parent: nn.Module) -> None:
            parent.block.gate_up_proj = nn.Parameter(torch.randn(3, 32, 24))
            parent.block.down_proj = nn.Parameter(torch.randn(3, 24, 16))

        undecorated = nn.Module()
        undecorated.moe = nn.Module()
        undecorated.moe.gate_up_proj = nn.Parameter(torch.zeros(2, 16, 16))
        undecorated.moe.down_proj = nn.Parameter(torch.zeros(2, 16, 16))
        float8 = nn.Parameter(torch.zeros(3, 32, 32).to(torch.float8_e4m3fn), requires_grad=False)
        models = {
            "no experts": nn.Linear(2, 2),
            "packed": quantize_experts(other_experts()),
            "no flags": undecorated,
            "activation": other_experts(act=F.relu),
            "gate": other_experts(apply_gate=clamped_after_silu, limit=7.0),
            "norm": doctored(lambda p: setattr(p.block, "has_post_expert_norm", True)),
            "layout": doctored(lambda p: setattr(p.block, "is_transposed", True)),
            "extra": doctored(lambda p: p.block.register_parameter("scale", nn.Parameter(torch.ones(1)))),
            "meta": other_experts().to("meta"),
            "dtype": doctored(lambda p: p.block.register_parameter("gate_up_proj", float8)),
            "width": doctored(shrink),
            "shared": doctored(share),
            "hooked": doctored(lambda p: p.block.register_forward_hook(lambda *a: None)),
            "root": other_experts().block,
        }
        texts = {name: self.text(model) for name, model in models.items()}
        texts["format"] = self.text(other_experts(), "mxfp4")
        lines = [textwrap.fill(f"{name}: {text}", 100, subsequent_indent="  ") for name, text in texts.items()]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
no experts: nothing to quantize in Linear: no module holds stacked expert weights
packed: nothing to quantize in Module: its experts are packed already
no flags: cannot pack Module at moe: it does not carry the flags of transformers' experts interface
  (has_gate, has_bias, is_transposed, is_concatenated)
activation: cannot pack OtherExperts at block: its activation (_default_apply_gate, act_fn relu) is
  none that NVFP4Experts computes
gate: cannot pack OtherExperts at block: its activation (clamped_after_silu, act_fn silu) is none
  that NVFP4Experts computes
norm: cannot pack OtherExperts at block: it normalises the experts' outputs (has_post_expert_norm)
layout: cannot pack OtherExperts at block: the weights' shapes [3, 32, 32] and [3, 32, 16] do not
  fit is_transposed=True
extra: cannot pack OtherExperts at block: its flags promise the parameters gate_up_proj, down_proj,
  it holds gate_up_proj, down_proj, scale
meta: cannot pack OtherExperts at block: gate_up_proj is on the meta device; load the weights first
dtype: cannot pack OtherExperts at block: gate_up_proj has dtype torch.float8_e4m3fn, expected
  float32, bfloat16 or float16
width: cannot pack OtherExperts at block: H = 24 and I = 16 must be multiples of B = 16 (nvfp4)
shared: cannot pack expert weights that are shared: block.down_proj, other.weight are one tensor
hooked: cannot pack OtherExperts at block: it has forward hooks, which replacing it would drop (load
  the model on one device)
root: cannot pack OtherExperts at the root: it is the model itself and can be replaced only inside a
  parent
format: cannot pack OtherExperts at block: H = 32 and I = 16 must be multiples of B = 32 (mxfp4)""",
        )
