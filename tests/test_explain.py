"""`torch_nvfp4.explain`: which path ran for each op, from its own eyes on a CPU and on a GPU."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import torch_nvfp4
from torch_nvfp4._explain.sort import observed_ops, plain_ops
from torch_nvfp4._explain.watch import Launch, OpRun, PlainOps, Watch
from torch_nvfp4.lowering import configs, multiply
from torch_nvfp4.lowering.weight import Weight
from torch_nvfp4.ops import observe

E, H, I, T, K, R = 4, 64, 32, 16, 2, 4
CARD = torch_nvfp4.Card("made-up card", flops=1e12, bandwidth=1e12)


@pytest.fixture(autouse=True)
def _small(one_thread: None) -> Iterator[None]:
    yield


def experts(device: str = "cpu") -> torch_nvfp4.NVFP4Experts:
    layer = torch_nvfp4.NVFP4Experts.from_dense(torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 8)
    layer.add_lora(R, scaling=2.0)
    return layer.to(device)


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.randn(T, E).softmax(-1).topk(K)
    return torch.randn(T, H).to(device, dtype), ids.to(device), weights.to(device)


def test_eager_on_a_cpu() -> None:
    layer, (x, ids, weights) = experts(), inputs()
    told = torch_nvfp4.explain(layer, x, ids, weights, card=CARD)
    assert isinstance(told, torch_nvfp4.Explanation)
    assert (told.device, told.compiled, told.backward, told.layers, told.kernels) == ("CPU", False, True, 1, {})
    calls = {op.op: op.calls for op in told.ops if op.op != "plain torch"}
    assert calls == {
        "moe_route": 1, "grouped_lora_linear": 1, "glu_grouped_lora_linear": 1, "grouped_lora_dgrad": 1,
        "glu_backward": 1, "grouped_lora_wgrad": 4,
    }  # fmt: skip
    assert {op.path for op in told.ops} == {"CPU kernel", "plain torch"}

    by_name = {op.op: op for op in told.ops}
    m = T * K
    assert by_name["grouped_lora_linear"].flops == 2 * m * (2 * I * H + R * (2 * I + H))
    packed = sum(t.nbytes for t in layer.packed("down"))
    factors = layer.down_lora_a.nbytes + layer.down_lora_b.nbytes
    read = 4 * m * 2 * I + weights.nbytes + 4 * (m + E) + packed + factors
    assert by_name["glu_grouped_lora_linear"].nbytes == read + 4 * m * (H + R)
    assert told.floor_ms == pytest.approx(1e3 * max(told.flops, told.nbytes) / 1e12) and told.share_of_floor is None

    text = str(told)
    assert text.startswith("CPU, eager, forward + backward, 1 layer\n")
    assert "CPU kernel: the tensors are on the CPU" in text and "floor of made-up card" in text
    assert all(p.grad is None for p in layer.parameters())


def test_forward_alone_and_one_token() -> None:
    layer = experts().requires_grad_(False)
    told = torch_nvfp4.explain(layer, *inputs())
    one = torch_nvfp4.explain(layer, *(t[:1] for t in inputs()))
    assert not told.backward and {op.op for op in told.ops} >= {"moe_route", "grouped_lora_linear"}
    # One token chooses 2 of 4 experts: half of the weights are read.
    assert one.nbytes < told.nbytes - layer.packed_bytes // 2 + 100


def test_compiled_on_a_cpu() -> None:
    layer = experts()
    compiled = torch.compile(layer, fullgraph=True)
    told = torch_nvfp4.explain(compiled, *inputs())
    assert told.compiled and told.backward and told.notes == ()
    assert {op.path for op in told.ops} == {"CPU kernel"}
    assert all("no lowering took it" in op.why for op in told.ops)
    assert told.kernels and all(name.startswith("cpp_fused") for name in told.kernels)
    again = torch_nvfp4.explain(compiled, *inputs())
    assert again.compiled and "compiled before" in again.notes[0]
    assert [op.calls for op in again.ops] == [op.calls for op in told.ops]


def test_lowered_op_on_a_cpu() -> None:
    packed = torch.ops.nvfp4.quantize(torch.randn(64, 64))
    told = torch_nvfp4.explain(torch.compile(lambda *p: torch.ops.nvfp4.dequantize(*p) * 2), *packed)
    (op,) = told.ops
    assert (op.op, op.path, op.calls, op.launches) == ("dequantize", "Inductor", 1, 1)
    assert op.kernels[0].startswith("cpp_fused_dequantize") and op.nbytes > 64 * 64 * 2


def test_outer_graphs_and_inputs_stay_as_they_are() -> None:
    (x, ids, weights), w = inputs(), torch.eye(H, requires_grad=True)
    outer = x @ w
    torch_nvfp4.explain(experts(), outer, ids, weights)
    outer.sum().backward()
    assert w.grad is not None


def nothing(x: Tensor) -> Tensor:
    return x + 1


def test_refusals() -> None:
    with pytest.raises(TypeError, match="explain needs a module or function, got int"):
        torch_nvfp4.explain(3)  # type: ignore[arg-type]
    for fn in (nothing, torch.compile(nothing)):
        with pytest.raises(ValueError, match="no nvfp4 op ran in nothing"):
            torch_nvfp4.explain(fn, torch.ones(2))
    with pytest.raises(ValueError, match="not meta or fake"):
        torch_nvfp4.explain(experts().to("meta"), *(t.to("meta") for t in inputs()))
    with observe.observing(object()), pytest.raises(RuntimeError, match="observes the ops"):  # type: ignore[arg-type]
        torch_nvfp4.explain(nothing, torch.ones(2))
    assert observe.current is None


def test_a_failing_function_leaves_nobody_watching() -> None:
    with pytest.raises(ValueError, match="x must be"):
        torch_nvfp4.explain(experts(), *(t[:, None] for t in inputs()))
    assert observe.current is None


def test_explain_is_imported_when_it_is_asked_for() -> None:
    code = "import sys, torch_nvfp4; a = 'torch_nvfp4._explain' in sys.modules; torch_nvfp4.explain; sys.exit(a)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'explian'"):
        torch_nvfp4.explian  # noqa: B018


def test_launches_of_code_for_a_gpu() -> None:
    from torch_nvfp4.lowering.generated import launches

    source = """
triton_tem_fused_grouped_lora_linear_0 = async_compile.triton('x', '''
@triton_heuristics.template(num_stages=3, num_warps=8, triton_meta={})
def f(arg):
    BLOCK_M : tl.constexpr = 128
''', device_str='cuda')
def call(args):
        # Topologically Sorted Source Nodes: [a], Original ATen: [nvfp4.grouped_lora_linear]
        raw_stream0 = get_raw_stream(0)
        triton_tem_fused_grouped_lora_linear_0.run(buf2, arg1_1, stream=raw_stream0)
        buf3 = empty_strided_cuda((), (), torch.bfloat16)
        buf4 = torch.ops.nvfp4.moe_route.default(arg0_1, 4)
        # Topologically Sorted Source Nodes: [m, add], Original ATen: [aten.mul, aten.add]
        extern_kernels.addmm(buf1, buf2, out=buf4)
        return (buf4, )
def benchmark_compiled_module():
    triton_tem_fused_grouped_lora_linear_0.run(1)
"""
    template, extern = launches(source)
    assert template.is_template and template.ops == ("nvfp4.grouped_lora_linear",)
    assert template.constants == {"num_stages": "3", "num_warps": "8", "BLOCK_M": "128"}
    assert extern.is_extern and extern.kernel == "extern_kernels.addmm" and extern.ops == ("aten.mul", "aten.add")


class Kernel:
    """As much of a Triton kernel as an observer looks at."""

    arg_names = ("x", "n", "odd", "TOKENS", "bias")
    params = tuple(
        SimpleNamespace(name=name, is_constexpr=name.isupper(), do_not_specialize=False) for name in arg_names
    )

    @staticmethod
    def fn() -> None: ...


def test_ops_that_generated_code_took() -> None:
    from torch_nvfp4.lowering.generated import GeneratedLaunch

    sizes, seen = Watch(), Watch()
    sizes.runs = [OpRun("grouped_lora_linear", "cuda", 7, 11), OpRun("moe_route", "cuda", 0, 2)]
    seen.runs = [OpRun("moe_route", "cuda", 0, 2)]
    seen.launch(Kernel, (torch.ones(4), 32, 7, 16, None), {"num_warps": 4})
    (launch,) = seen.loose
    assert launch.config == "TOKENS=16 num_warps=4" and launch.nbytes == 16
    assert dict(launch.integers) == {"n": "16", "odd": ""} and dict(launch.constants)["bias"] == "None"

    made = GeneratedLaunch("triton_tem_fused_0", {"ROWS": "64", "E": "4"}, ("nvfp4.grouped_lora_linear",), False)
    lowered, route = observed_ops(seen, sizes, [made], compiled=True)
    assert (lowered.path, lowered.kernels, lowered.flops) == ("Inductor template", ("triton_tem_fused_0 ROWS=64",), 7)
    assert (route.path, route.calls) == ("plain torch", 1)
    (extern,) = plain_ops(seen, PlainOps(), compiled=True)
    assert (extern.op, extern.nbytes, extern.launches) == ("fn", 0, 1)


def test_the_way_of_a_product_of_4_bit_rows() -> None:
    def told(kernel: str, module: str, b: str) -> tuple[str, str]:
        product = Launch(kernel, f"torch_nvfp4.lowering.kernels.{module}", (("B", b),), (), 0)
        quantised = Launch("quantize_rows", "torch_nvfp4.lowering.kernels.rows", (), (), 0)
        watch = Watch()
        watch.runs = [OpRun("grouped_lora_linear", "cuda", 7, 11, [quantised, product])]
        (op,) = observed_ops(watch, watch, [], compiled=False)
        return op.path, op.why

    assert told("block_scaled_linear", "block_scaled", "16")[0] == "block-scaled product"
    path, why = told("grouped_linear", "grouped_gemm", "16")
    assert path == "emulated w4a4" and "sm_100, sm_103, sm_120" in why
    path, why = told("grouped_product", "hopper", "32")
    assert path == "emulated w4a4" and "MXFP4" in why


def test_what_keeps_a_product_from_a_card_s_own_kernel() -> None:
    """Choosing a way tells the op that runs, and nobody while code is generated."""
    weight = Weight(torch.empty(E, 2 * I, H // 2), torch.empty(E, 2 * I, H // 16), torch.ones(E, 2), 16)
    x = SimpleNamespace(dtype=torch.float32, device=SimpleNamespace(index=0))

    def choose(*_: Any) -> Tensor:
        assert multiply.choose_path(x, T, weight) is multiply.Path.LOOP  # type: ignore[arg-type]
        observe.current.launch(SimpleNamespace(arg_names=[], fn=choose), (), {})  # type: ignore[union-attr]
        return torch.empty(0)

    watch = Watch()
    card = dict(family=lambda _: 9, device_limits=lambda _: (227 << 10, True))
    with mock.patch.multiple(configs, **card), observe.observing(watch):
        choose()
        watch.op("moe_route", choose, (torch.empty(1, device="meta"), E), {})
    watch.runs[0].device = "cuda"
    (op,) = observed_ops(watch, watch, [], compiled=False)
    assert op.path == "Triton kernel"
    assert op.why.startswith("the tensors are on a CUDA device; Hopper's own products take bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_on_a_gpu(compiled: bool) -> None:
    layer: Any = experts("cuda")
    told = torch_nvfp4.explain(
        torch.compile(layer, fullgraph=True) if compiled else layer, *inputs("cuda", torch.bfloat16), card=CARD
    )
    assert told.compiled == compiled and told.backward and told.launches > 0
    assert told.measured_ms is not None and told.share_of_floor is not None
    assert {op.path for op in told.ops} <= {"Triton kernel", "Inductor", "Inductor template", "plain torch"}
    print(told)
    if not compiled:
        assert any(kernel.startswith("shrink") for op in told.ops for kernel in op.kernels)
