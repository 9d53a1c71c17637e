"""Error texts: journals of what each wrong argument gets, the same from eager, from fake tensors and from a trace."""

# ruff: noqa: E501  (lines of journals are as long as the texts are)

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from samples import Sample, samples
from strategies import Layer, make_layer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_nvfp4.ops.schemas import SCHEMAS

OPS = torch.ops.nvfp4
Change = Callable[[Layer], Layer]


def layer() -> Layer:
    return make_layer(t=7, k=2, e=5, h=32, i=16, ranks=(3, 4), bias=True)


def with_shape(name: str, *shape: int) -> Change:
    return lambda l: l.replaced(**{name: torch.zeros(shape, dtype=l.tensors[name].dtype)})  # noqa: E741


def with_dtype(name: str, dtype: torch.dtype) -> Change:
    return lambda l: l.replaced(**{name: l.tensors[name].to(dtype)})  # noqa: E741


def without(name: str) -> Change:
    return lambda l: l.replaced(**{name: None})  # noqa: E741


def with_option(**options: Any) -> Change:
    return lambda l: Layer(l.tensors, {**l.options, **options})  # noqa: E741


LAYER_CASES: dict[str, Change] = {
    "x of another width": with_shape("x", 7, 48),
    "x with a batch dim": with_shape("x", 1, 7, 32),
    "x of integers": with_dtype("x", torch.int32),
    "ids of another T": with_shape("topk_ids", 6, 2),
    "ids that are floats": with_dtype("topk_ids", torch.float32),
    "K = 0": lambda l: l.replaced(topk_ids=l.topk_ids[:, :0], topk_weights=l.topk_weights[:, :0]),  # noqa: E741
    "b18: weights [T, E]": with_shape("topk_weights", 7, 5),
    "codes of another dtype": with_dtype("gate_up_codes", torch.int8),
    "codes of another E": with_shape("down_codes", 4, 32, 8),
    "down swapped": lambda l: l.replaced(down_codes=l.down_codes.mT.contiguous()),  # noqa: E741
    "odd gate_up": with_shape("gate_up_codes", 5, 31, 16),
    "scales of 32 a block": with_dtype("gate_up_scales", torch.float8_e8m0fnu),
    "scales as bytes": lambda l: l.replaced(gate_up_scales=l.gate_up_scales.view(torch.uint8)),  # noqa: E741
    "scales short": with_shape("gate_up_scales", 5, 32, 1),
    "global scale half": with_dtype("gate_up_global_scale", torch.float16),
    "global scale S = 3": with_shape("gate_up_global_scale", 5, 3),
    "global scale [E]": with_shape("gate_up_global_scale", 5),
    "c21: lora_a of another width": with_shape("gate_up_lora_a", 5, 3, 48),
    "ranks that differ": with_shape("down_lora_b", 5, 32, 3),
    "a alone": without("gate_up_lora_b"),
    "b alone": without("down_lora_a"),
    "bias of another width": with_shape("down_bias", 5, 16),
    "activation": with_option(activation="swish"),
    "limit without a clamp": with_option(activation="gelu", limit=1.0),
    "limit of 0": with_option(limit=0.0),
    "compute": with_option(compute="w4a8"),
    "input scale of 16-bit activations": with_option(down_input_scale=torch.tensor(0.1)),
    "input scale [1]": with_option(compute="w4a4", down_input_scale=torch.ones(1)),
    "input scale of doubles": with_option(compute="w4a4", down_input_scale=torch.tensor(0.1, dtype=torch.float64)),
    "relu2 with a gated weight": with_option(activation="relu2"),
}

SAMPLES = {sample.op: sample for sample in reversed(samples())}
OP_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "route: one-dimensional ids": ("moe_route", {"topk_ids": torch.zeros(3, dtype=torch.int64)}),
    "route: no expert": ("moe_route", {"num_experts": 0}),
    "merge: a of another width": ("merge_lora", {"a": torch.zeros(6, 3, 48)}),
    "linear: rows do not fit": ("grouped_lora_linear", {"rows": torch.zeros(17, dtype=torch.int32)}),
    "linear: rows of int64": ("grouped_lora_linear", {"rows": torch.zeros(18, dtype=torch.int64)}),
    "linear: top_k = 0": ("grouped_lora_linear", {"top_k": 0}),
    "linear: offsets of another E": ("grouped_lora_linear", {"offsets": torch.zeros(3, dtype=torch.int32)}),
    "dgrad: gy of another width": ("grouped_lora_dgrad", {"gy": torch.zeros(6, 32)}),
    "dgrad: v of another M": ("grouped_lora_dgrad", {"v": torch.zeros(17, 5)}),
    "dgrad: v of another R": ("grouped_lora_dgrad", {"v": torch.zeros(18, 3)}),
    "dgrad: v of another dtype": ("grouped_lora_dgrad", {"v": torch.zeros(18, 5, dtype=torch.bfloat16)}),
    "dgrad: v without LoRA": ("grouped_lora_dgrad", {"v": torch.zeros(18, 5), "lora_a": None, "lora_b": None}),
    "dgrad: v of rows in order": (
        "grouped_lora_dgrad",
        {"gy": torch.zeros(18, 48), "rows": None, "top_k": 1, "v": torch.zeros(17, 5)},
    ),
    "wgrad: p of another M": ("grouped_lora_wgrad", {"p": torch.zeros(17, 5)}),
    "wgrad: integers": ("grouped_lora_wgrad", {"p": torch.zeros(18, 5, dtype=torch.int32)}),
    "glu: pre of another width": ("glu_grouped_lora_linear", {"pre": torch.zeros(18, 32)}),
    "glu: pre of another M": ("glu_grouped_lora_linear", {"pre": torch.zeros(17, 64)}),
    "glu backward: no gh": ("glu_backward", {"gh": None}),
    "glu backward: gy of another T": ("glu_backward", {"gy": torch.zeros(5, 48)}),
    "glu backward: lora_b of another width": ("glu_backward", {"lora_b": torch.zeros(4, 32, 3)}),
    "glu backward: lora_b of another E": ("glu_backward", {"lora_b": torch.zeros(3, 64, 3)}),
    "glu backward: lora_b without gpre": ("glu_backward", {"lora_b": torch.zeros(4, 64, 3), "need_gpre": False}),
    "quantize: width": ("quantize", {"x": torch.zeros(2, 24)}),
    "quantize: dtype": ("quantize", {"x": torch.zeros(2, 32, dtype=torch.int32)}),
    "quantize: format": ("quantize", {"format": "nvfp8"}),
    "quantize: global scale": ("quantize", {"global_scale": torch.ones(2, 2)}),
    "dequantize: scales do not fit": ("dequantize", {"scales": torch.ones(6, 64, 3).to(torch.float8_e4m3fn)}),
    "dequantize: global scale": ("dequantize", {"global_scale": torch.ones(3)}),
    "fake_quantize: width": ("fake_quantize", {"x": torch.zeros(2, 24)}),
}


def layer_sample(change: Change) -> Sample:
    changed = change(layer())
    arguments = {k: v for k, v in (changed.tensors | changed.options).items() if v is not None}
    return Sample("moe_lora", "wrong", arguments)


CASES: dict[str, Sample] = {name: layer_sample(change) for name, change in LAYER_CASES.items()}
CASES |= {name: SAMPLES[op].replaced(change) for name, (op, change) in OP_CASES.items()}


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, TypeError)) as info:
        call()
    return f"{type(info.value).__name__}: {info.value}"


class TestTexts(expecttest.TestCase):
    maxDiff = None

    def test_moe_lora(self) -> None:
        lines = [f"{name}\n  {raised(CASES[name].run)}" for name in LAYER_CASES]
        self.assertExpectedInline(
            "\n".join(lines) + "\n",
            """\
x of another width
  ValueError: moe_lora: gate_up_codes has H = 32, but x has H = 48 (gate_up_codes must be [E, 2I, H/2], got [5, 32, 16])
x with a batch dim
  ValueError: moe_lora: x must be [T, H], got [1, 7, 32]
x of integers
  TypeError: moe_lora: x must be float32 or bfloat16 or float16 or float64, got int32
ids of another T
  ValueError: moe_lora: topk_ids has T = 6, but x has T = 7 (topk_ids must be [T, K], got [6, 2])
ids that are floats
  TypeError: moe_lora: topk_ids must be int64 or int32 or int16 or int8 or uint8, got float32
K = 0
  ValueError: moe_lora: K (experts per token) must be at least 1, got 0
b18: weights [T, E]
  ValueError: moe_lora: topk_weights has K = 5, but topk_ids has K = 2 (topk_weights must be [T, K], got [7, 5])
codes of another dtype
  TypeError: moe_lora: gate_up_codes must be uint8, got int8
codes of another E
  ValueError: moe_lora: down_codes has E = 4, but gate_up_codes has E = 5 (down_codes must be [E, H, I/2], got [4, 32, 8])
down swapped
  ValueError: moe_lora: down_codes has H = 8, but x has H = 32 (down_codes must be [E, H, I/2], got [5, 8, 32])
odd gate_up
  ValueError: moe_lora: gate_up_codes must have an even 2I (gate and up), got 31
scales of 32 a block
  ValueError: moe_lora: gate_up_scales has H = 64, but x has H = 32 (gate_up_scales must be [E, 2I, H/B], got [5, 32, 2])
scales as bytes
  TypeError: moe_lora: gate_up_scales must be float8_e4m3fn or float8_e8m0fnu, got uint8
scales short
  ValueError: moe_lora: gate_up_scales has H = 16, but x has H = 32 (gate_up_scales must be [E, 2I, H/B], got [5, 32, 1])
global scale half
  TypeError: moe_lora: gate_up_global_scale must be float32, got float16
global scale S = 3
  ValueError: moe_lora: gate_up_global_scale must be [E, S] with S = 1 or 2, got S = 3
global scale [E]
  ValueError: moe_lora: gate_up_global_scale must be [E, S], got [5]
c21: lora_a of another width
  ValueError: moe_lora: gate_up_lora_a has H = 48, but x has H = 32 (gate_up_lora_a must be [E, R_gate_up, H], got [5, 3, 48])
ranks that differ
  ValueError: moe_lora: down_lora_b has R_down = 3, but down_lora_a has R_down = 4 (down_lora_b must be [E, H, R_down], got [5, 32, 3])
a alone
  ValueError: moe_lora: gate_up_lora_a is given without gate_up_lora_b; LoRA needs both factors
b alone
  ValueError: moe_lora: down_lora_b is given without down_lora_a; LoRA needs both factors
bias of another width
  ValueError: moe_lora: down_bias has H = 16, but x has H = 32 (down_bias must be [E, H], got [5, 16])
activation
  ValueError: moe_lora: activation must be one of silu, gelu_tanh, gelu, swiglu_oai, relu2, got 'swish'
limit without a clamp
  ValueError: moe_lora: limit applies to silu and swiglu_oai, not to 'gelu'
limit of 0
  ValueError: moe_lora: limit must be positive, got 0.0
compute
  ValueError: moe_lora: compute must be one of w4a16, w4a4, got 'w4a8'
input scale of 16-bit activations
  ValueError: moe_lora: down_input_scale is that of 4-bit activations (compute 'w4a4'), got compute 'w4a16'
input scale [1]
  ValueError: moe_lora: down_input_scale must be [], got [1]
input scale of doubles
  TypeError: moe_lora: down_input_scale must be float32, got float64
relu2 with a gated weight
  ValueError: moe_lora: down_codes has I = 16, but gate_up_codes has I = 32 (down_codes must be [E, H, I/2], got [5, 32, 8])
""",
        )

    def test_small_ops(self) -> None:
        lines = [f"{name}\n  {raised(CASES[name].run)}" for name in OP_CASES]
        self.assertExpectedInline(
            "\n".join(lines) + "\n",
            """\
route: one-dimensional ids
  ValueError: moe_route: topk_ids must be [T, K], got [3]
route: no expert
  ValueError: moe_route: num_experts must be at least 1, got 0
merge: a of another width
  ValueError: merge_lora: a has C = 48, but codes has C = 64 (a must be [E, R, C], got [6, 3, 48])
linear: rows do not fit
  ValueError: grouped_lora_linear: rows has M = 17, but x has 6 rows of 3 slots each
linear: rows of int64
  TypeError: grouped_lora_linear: rows must be int32, got int64
linear: top_k = 0
  ValueError: grouped_lora_linear: top_k must be at least 1, got 0
linear: offsets of another E
  ValueError: grouped_lora_linear: codes has E = 4, but offsets has E = 3 (codes must be [E, N, C/2], got [4, 64, 24])
dgrad: gy of another width
  ValueError: grouped_lora_dgrad: codes has N = 48, but gy has N = 32 (codes must be [E, N, C/2], got [4, 48, 16])
dgrad: v of another M
  ValueError: grouped_lora_dgrad: v has M = 17, but rows has M = 18 (v must be [M, R], got [17, 5])
dgrad: v of another R
  ValueError: grouped_lora_dgrad: v has R = 3, but lora_a has R = 5 (v must be [M, R], got [18, 3])
dgrad: v of another dtype
  TypeError: grouped_lora_dgrad: v must be float32 as gy is, got bfloat16
dgrad: v without LoRA
  ValueError: grouped_lora_dgrad: v is given without lora_a and lora_b
dgrad: v of rows in order
  ValueError: grouped_lora_dgrad: v has M = 17, but gy has M = 18
wgrad: p of another M
  ValueError: grouped_lora_wgrad: q_rows has M = 18, but p has M = 17
wgrad: integers
  TypeError: grouped_lora_wgrad: p must be float32 or bfloat16 or float16 or float64, got int32
glu: pre of another width
  ValueError: glu_grouped_lora_linear: codes has I = 32, but pre has I = 16 (codes must be [E, N, I/2], got [4, 48, 16])
glu: pre of another M
  ValueError: glu_grouped_lora_linear: rows has M = 18, but pre has M = 17 (rows must be [M], got [18])
glu backward: no gh
  ValueError: glu_backward: gh may be None only where need_gpre and need_gw are False
glu backward: gy of another T
  ValueError: glu_backward: gy_rows has M = 18, but gy has 5 rows of 3 slots each
glu backward: lora_b of another width
  ValueError: glu_backward: lora_b has I = 16, but pre has I = 32 (lora_b must be [E, 2I, R], got [4, 32, 3])
glu backward: lora_b of another E
  ValueError: glu_backward: lora_b has E = 3, but offsets has E = 4 (lora_b must be [E, 2I, R], got [3, 64, 3])
glu backward: lora_b without gpre
  ValueError: glu_backward: lora_b may be given only where need_gpre is True, as v is that of gpre
quantize: width
  ValueError: nvfp4: C of x [..., C] must be a multiple of B = 16; given [2, 24]
quantize: dtype
  TypeError: x must be one of torch.float32, torch.bfloat16, torch.float16, torch.float64; given torch.int32
quantize: format
  ValueError: format must be one of 'nvfp4', 'mxfp4'; given 'nvfp8'
quantize: global scale
  ValueError: global_scale must be a scalar, [1], or [E, S] with S = 1 (or 2, for an even N) beside [E, N, C]; given [2, 2] for [6, 48]
dequantize: scales do not fit
  ValueError: nvfp4: codes [..., C/2] and scales [..., C/16] must agree; given codes [6, 64, 32] and scales [6, 64, 3]
dequantize: global scale
  ValueError: global_scale must be a scalar, [1], or [E, S] with S = 1 (or 2, for an even N) beside [E, N, C]; given [3] for [6, 64, 64]
fake_quantize: width
  ValueError: nvfp4: C of x [..., C] must be a multiple of B = 16; given [2, 24]
""",
        )


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_get_the_same_text_fault_b18_c21(name: str) -> None:
    text = raised(CASES[name].run)
    with FakeTensorMode() as mode:
        assert raised(CASES[name].map(mode.from_tensor).run) == text


@pytest.mark.parametrize("name", CASES)
def test_a_trace_gets_the_same_text(name: str) -> None:
    sample = CASES[name]
    text = raised(sample.run).split(": ", 1)[1]
    compiled = torch.compile(sample.function(), fullgraph=True, backend="eager")
    with pytest.raises(Exception) as info:  # noqa: B017  Dynamo's own exception, whichever it is
        compiled(sample.tensors)
    assert text in str(info.value), str(info.value)


def test_every_op_has_a_wrong_call() -> None:
    assert {sample.op for sample in CASES.values()} == set(SCHEMAS)


def test_devices_must_agree() -> None:
    there = layer()
    there.tensors["down_codes"] = there.down_codes.to("meta")
    with pytest.raises(ValueError, match="moe_lora: down_codes is on meta, but x is on cpu"):
        there.run()


def test_a_requested_grad_does_not_change_the_text() -> None:
    def run(x: Tensor) -> Tensor:
        return layer().replaced(x=x).run()

    texts = {raised(lambda x=x: run(x)) for x in (torch.zeros(7, 48), torch.zeros(7, 48, requires_grad=True))}
    assert len(texts) == 1
