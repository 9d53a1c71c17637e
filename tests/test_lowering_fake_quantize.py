"""The lowering of `fake_quantize`: eager's bits, fused with its neighbours, and on a GPU with an exact division."""

import re
from collections.abc import Callable
from pathlib import Path

import fakecuda
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import VALUE_KINDS, hostile_values
from test_lowering import assert_same_bits
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torch_nvfp4  # noqa: F401  (registers the ops)
from torch_nvfp4 import format as formats

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPE = (4, 6, 64)
SCALES = (None, (), (4, 1), (4, 2))

pytestmark = pytest.mark.usefixtures("one_thread")


def fake_quantize(x: Tensor, global_scale: Tensor | None = None, format: str = "nvfp4") -> Tensor:
    return torch.ops.nvfp4.fake_quantize(x, global_scale, format=format)


compiled = torch.compile(fake_quantize, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_eager(dtype: torch.dtype) -> None:
    @settings(max_examples=25)
    @given(
        st.sampled_from(VALUE_KINDS), st.integers(0, 2**31), st.integers(-140, 100),
        st.sampled_from(SCALES), st.sampled_from((1.0, 1e-3, 2.0**-20, 1e-40, 0.0, -1.0, float("nan"), float("inf"))),
        st.sampled_from(("nvfp4", "mxfp4")),
    )  # fmt: skip
    @example("spread", 0, 0, None, 1.0, "nvfp4")
    @example("ties", 0, 0, (4, 2), 1.0, "nvfp4")
    @example("spread", 0, -130, None, 1.0, "mxfp4")
    def run(kind: str, seed: int, exponent: int, scale: tuple[int, ...] | None, factor: float, format: str) -> None:
        x = hostile_values(kind, SHAPE, exponent, dtype, torch.Generator().manual_seed(seed))
        given_scale = None
        if scale is not None and format == "nvfp4":
            given_scale = torch.rand(scale, generator=torch.Generator().manual_seed(seed)) * factor
        wanted = formats.fake_quantize(x, given_scale, format, check_finite=False)
        assert_same_bits(compiled(x, given_scale, format), wanted)

    run()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 2, 32)], ids=str)
def test_nothing_to_quantise(shape: tuple[int, ...]) -> None:
    assert_same_bits(compiled(torch.zeros(shape)), torch.zeros(shape))


def test_symbolic_rows_do_not_recompile() -> None:
    step = torch.compile(lambda x, scale: (fake_quantize(x), fake_quantize(x, scale)), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (17, 16, 33):
            x, scale = torch.randn(rows, 2, 32), torch.rand(rows, 2)
            for tensor in (x, scale):
                torch._dynamo.mark_dynamic(tensor, 0)
            for got, wanted in zip(step(x, scale), (fake_quantize(x), fake_quantize(x, scale)), strict=True):
                assert_same_bits(got, wanted)


def around(x: Tensor, global_scale: Tensor, y: Tensor) -> Tensor:
    return fake_quantize(x * 2, global_scale) * y


def around_computed(x: Tensor, y: Tensor) -> Tensor:
    return fake_quantize(x * 2) * y


def around_mxfp4(x: Tensor, y: Tensor) -> Tensor:
    return fake_quantize(x * 2, format="mxfp4") * y


def test_one_loop_nest_with_what_stands_around() -> None:
    x, y = torch.randn(2, 64, 256)
    scale = torch.tensor(1e-3)
    step = torch.compile(around, fullgraph=True)
    got, (code,) = run_and_get_code(step, x, scale, y)
    assert_same_bits(got, around(x, scale, y))
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert not re.search(r"torch\.ops\.\w+\.[\w.]+\(", code)


def test_a_gradient_straight_through_with_the_mask_of_a_given_scale() -> None:
    x = (torch.randn(8, 64) * 10).requires_grad_()
    grad, scale = torch.randn(8, 64), torch.tensor(1 / 448)  # saturates at 6
    compiled(x, scale).backward(grad)
    masked, x.grad = x.grad, None
    assert torch.equal(masked, torch.where(formats.saturation_mask(x.detach(), scale), 0, grad))
    assert (masked == 0).any()
    compiled(x).backward(grad)
    assert torch.equal(x.grad, grad)


SCALE = torch.tensor([1e-3])
ON_GPU: list[tuple[Callable[..., Tensor], int, int]] = [(around, 1, 1), (around_mxfp4, 1, 1), (around_computed, 3, 2)]


def graph_inputs(fn: Callable[..., Tensor], dtype: torch.dtype, rows: int = 32) -> list[Tensor]:
    x, y = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    return [x, SCALE, y] if fn is around else [x, y]


@pytest.mark.parametrize(("fn", "kernels", "buffers"), ON_GPU, ids=lambda value: getattr(value, "__name__", ""))
def test_on_a_gpu_it_is_one_kernel_that_divides_exactly(
    fn: Callable[..., Tensor], kernels: int, buffers: int
) -> None:  # fmt: skip
    """(Three where the global scale is computed: its two reductions come first.)"""
    code = fakecuda.generate(fn, *graph_inputs(fn, torch.bfloat16))
    found = fakecuda.triton_kernels(code)
    assert len(found) <= kernels and code.count("= empty_strided_cuda(") <= buffers + 1
    assert not re.search(r"torch\.ops\.[\w.]+\(", code)
    name, kernel = list(found.items())[-1]
    assert name.startswith("triton_per_fused") and "fake_quantize" in name and "mul" in name
    for name, kernel in found.items():
        assert " / " not in kernel and "float8" not in kernel
        ptx = fakecuda.compile_to_ptx(name, kernel, (9, 0))
        assert set(re.findall(r"div\.[\w.]+", ptx)) <= {"div.rn.f32"}
        assert "fma." not in ptx and ".ftz" not in ptx


def test_generated_gpu_kernels_give_the_values(tmp_path: Path) -> None:
    """In Triton's interpreter."""
    saved = []
    for fn, _, _ in ON_GPU:
        given_ = graph_inputs(fn, torch.float32, rows=12)
        saved.append((torch.float32, fakecuda.generate(fn, *given_), given_, [fn(*given_)]))
    fakecuda.assert_interpreted_graphs_agree(saved, tmp_path)
