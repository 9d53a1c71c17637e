"""Lowerings of the grouped ops: which ways there are, when they are timed, under which key; symbolic T; fallbacks."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fakecuda
import pytest
import torch
from strategies import make_layer
from torch import Tensor
from torch._inductor.select_algorithm import create_inputs_key

from torch_nvfp4 import lowering
from torch_nvfp4.lowering import configs
from torch_nvfp4.ops import routing

E, K = 4, 2
AMPERE, HOPPER, CONSUMER = (8, 0), (9, 0), (12, 0)


pytestmark = pytest.mark.usefixtures("one_thread")


def linear_inputs(t: int, dtype: torch.dtype = torch.bfloat16, c: int = 64, fmt: str = "nvfp4") -> list[Tensor | None]:
    layer = make_layer(t=t, k=K, e=E, h=c, i=32, dtype=dtype, fmt=fmt)
    rows, _, offsets = routing.moe_route(layer.topk_ids, E)
    parts = ("codes", "scales", "global_scale", "lora_a", "lora_b")
    return [layer.x, rows, offsets, *(layer.tensors[f"gate_up_{part}"] for part in parts)]


def linear(*tensors: Tensor | None) -> Tensor:
    return torch.ops.nvfp4.grouped_lora_linear(*tensors, scaling=2.0, top_k=K)[0]


def with_dynamic_rows(inputs: list[Tensor | None]) -> list[Tensor | None]:
    for tensor in inputs[:2]:
        assert tensor is not None
        torch._dynamo.mark_dynamic(tensor, 0)
    return inputs


def calls(code: str) -> list[str]:
    return re.findall(r"(triton_tem_\w+\.run\(.*|extern_kernels\.\w+\(.*|torch\.ops\.nvfp4\.[\w.]+\(.*)\)", code)


TURING = (7, 5)


@pytest.mark.parametrize(("dtype", "capability"), [(torch.float64, AMPERE), (torch.float16, TURING)], ids=str)
def test_without_a_triton_kernel_the_op_stays_a_call(dtype: torch.dtype, capability: fakecuda.Capability) -> None:
    (call,) = calls(fakecuda.generate(linear, *linear_inputs(8, dtype), capability=capability))
    assert call.startswith("torch.ops.nvfp4.grouped_lora_linear.default(")


@pytest.mark.parametrize("capability", [AMPERE, CONSUMER, HOPPER], ids=str)
def test_one_launch_gathers_and_shrinks_and_one_multiplies(capability: fakecuda.Capability) -> None:
    """C = 48 is no width for the kernel that is Hopper's own, so every card runs templates here."""
    code = fakecuda.generate(linear, *linear_inputs(8, c=48), capability=capability)
    first, second = calls(code)
    for (name, kernel), body in zip(fakecuda.triton_kernels(code).items(), ("shrink", "grouped_linear"), strict=True):
        assert f"import {body} as body" in kernel
        assert fakecuda.compile_to_ptx(name, kernel, capability)
    assert first.startswith("triton_tem") and second.startswith("triton_tem")


@pytest.mark.parametrize(
    ("dtype", "fmt", "capability", "waits"),
    [
        (torch.bfloat16, "nvfp4", HOPPER, True), (torch.float16, "mxfp4", HOPPER, True),
        (torch.float32, "nvfp4", HOPPER, False), (torch.bfloat16, "nvfp4", (10, 0), False),
        (torch.bfloat16, "nvfp4", AMPERE, False),
    ],
    ids=str,
)  # fmt: skip
def test_templates_wait_for_asynchronous_products_where_eager_does(
    dtype: torch.dtype, fmt: str, capability: fakecuda.Capability, waits: bool
) -> None:
    """Also for fp16 with MXFP4, whose fp32 products are asynchronous ones in TF32; C = 96 is not Hopper's own."""
    code = fakecuda.generate(linear, *linear_inputs(8, dtype, 96, fmt), capability=capability)
    (_, product) = fakecuda.triton_kernels(code).values()
    assert f"WGMMA : tl.constexpr = {waits}" in product


def test_many_rows_on_hopper_are_left_to_the_launcher() -> None:
    first, second = calls(fakecuda.generate(linear, *linear_inputs(256), capability=HOPPER))
    assert first.startswith("triton_tem") and "extern_kernels.nvfp4_linear_product(" in second


def test_code_that_cannot_call_python_has_templates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering.ensure_registered()
    monkeypatch.setattr("torch_nvfp4.lowering.products.calls_python", lambda: False)
    assert all(call.startswith("triton_tem") for call in calls(fakecuda.generate(linear, *linear_inputs(256))))


def test_the_code_for_a_symbolic_t_holds_no_number_of_rows() -> None:
    def source(t: int) -> str:
        code = fakecuda.generate(linear, *with_dynamic_rows(linear_inputs(t)), capability=AMPERE)
        assert all(re.search(r"\bs\d+\b", call) for call in calls(code))
        code = re.split(r"async_compile = AsyncCompile\(\)|def get_args|def benchmark", code)[1]
        return re.sub(r"#.*", "", code)

    assert source(37) == source(41)


class Tuning:
    """Stands in for Inductor's selection: takes one of the choices, and remembers what it was asked."""

    def __init__(self, pick: Callable[[list[Any]], Any]) -> None:
        self.pick = pick
        self.choices: list[list[str]] = []
        self.keys: set[str] = set()
        self.generators: list[dict[int, Callable[..., Tensor]]] = []

    def __call__(self, name: str, choices: list[Any], nodes: Any, layout: Any, **options: Any) -> Any:
        if len(choices) == 1:
            return choices[0].output_node(), choices[0]
        self.choices.append([choice.name for choice in choices])
        self.keys.add(f"{name} {create_inputs_key(nodes)}")
        # Called here, while sizes are what they are said to be.
        inputs = {i: make(SimpleNamespace(get_device=lambda: "cpu")) for i, make in options["input_gen_fns"].items()}
        for tensor in inputs.values():
            assert tensor.dtype == torch.int32
            if tensor.numel() == E:
                assert tensor.diff().min() >= 0
                assert int(tensor[-1]) * nodes[0].get_size()[1] > 0
        choice = self.pick(choices)
        return choice.output_node(), choice


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[Any]], Any]], Tuning]:
    lowering.ensure_registered()
    from torch_nvfp4.lowering import compat

    def begin(pick: Callable[[list[Any]], Any]) -> Tuning:
        stand_in = Tuning(pick)
        monkeypatch.setattr(compat, "autotune_select_algorithm", stand_in)
        monkeypatch.setattr(compat, "tunes", lambda: True)
        monkeypatch.setattr("torch_nvfp4.lowering.products.tunes", lambda: True)
        return stand_in

    return begin


@pytest.mark.parametrize("capability", [AMPERE, HOPPER], ids=str)
def test_timed_ways_are_few_and_the_losers_leave_nothing(capability: fakecuda.Capability, tuning: Any) -> None:
    for pick in (0, -1, 1):
        timed = tuning(lambda choices, pick=pick: choices[pick])
        code = fakecuda.generate(linear, *linear_inputs(64), capability=capability)
        (choices,) = timed.choices
        assert 3 <= len(choices) <= 5 and choices[0] == "nvfp4_linear_product"
        assert len(calls(code)) == 2
        assert code.split("def call(")[1].count("= empty_strided_cuda(") <= 3  # u, the gathered rows, y


def test_the_winner_decides_the_column_order(tuning: Any) -> None:
    """Hopper's own kernel reads another order than the loop: the gather is made after the choice."""
    for pick, order in ((0, 2), (1, 1), (-1, 1)):
        tuning(lambda choices, pick=pick: choices[pick])
        code = fakecuda.generate(linear, *linear_inputs(64), capability=HOPPER)
        gather = next(iter(fakecuda.triton_kernels(code).values()))
        assert re.search(rf"^ +ORDER : tl.constexpr = {order}$", gather, re.MULTILINE)


def test_keys_of_timings_do_not_depend_on_a_symbolic_t(tuning: Any) -> None:
    timed = tuning(lambda choices: choices[0])
    for t in (101, 103, 130):
        fakecuda.generate(linear, *with_dynamic_rows(linear_inputs(t)), capability=AMPERE)
    assert len(timed.choices) == 3 and len(timed.keys) == 1


def test_classes_of_rows_are_few_and_their_tiles_fit() -> None:
    for e, k in ((1, 1), (8, 2), (128, 8)):
        rows = [configs.rows_per_expert(t * k, e) for t in range(1, 32_769)]
        assert {configs.representative_rows(r) for r in rows} <= set(configs.ROW_CLASSES)
        for limit in (99 << 10, 163 << 10, 227 << 10):
            for dtype in (torch.float32, torch.bfloat16):
                for r in configs.ROW_CLASSES:
                    ways = [*configs.linear_candidates(r, dtype, limit), *configs.dgrad_candidates(r, dtype, limit)]
                    assert len(ways) == len(set(ways)) <= 6
                    assert dtype == torch.float32 or all(way.shared_memory(2) <= limit for way in ways)


@pytest.mark.parametrize("need_gpre", [False, True])
def test_v_has_the_rows_of_pre_where_there_is_no_factor(need_gpre: bool) -> None:
    layer = make_layer(t=8, k=K, e=E, i=32)
    rows, _, offsets = routing.moe_route(layer.topk_ids, E)
    pre, gh = (torch.randn(8 * K, n).bfloat16() for n in (64, 32))

    def all_of(*tensors: Tensor) -> Any:
        return torch.ops.nvfp4.glu_backward(*tensors, need_gpre=need_gpre, need_h=False)

    code = fakecuda.generate(all_of, pre, layer.topk_weights, gh, rows, offsets, capability=AMPERE)
    (returned,) = re.findall(r"^\s*return \((.*)\)$", code.split("def call(")[1], re.MULTILINE)
    v = returned.rstrip(", ").split(", ")[-1]
    assert f"{v} = empty_strided_cuda(({8 * K}, 0)," in code
