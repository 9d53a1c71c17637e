"""What Inductor makes of the lowerings on a GPU, read from the code it generates without one."""

import re

import fakecuda
import pytest
import torch
from torch import Tensor

import torch_nvfp4  # noqa: F401  (registers the ops)


def multiply_add(codes: Tensor, scales: Tensor, global_scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.ops.nvfp4.dequantize(codes, scales.view(torch.float8_e4m3fn), global_scale)
    return weight * x + y


def inputs(scale_dtype: torch.dtype) -> list[Tensor]:
    x = torch.ones(64, 128, dtype=torch.bfloat16)
    scales = torch.zeros(64, 8, dtype=torch.uint8).view(scale_dtype)
    return [torch.zeros(64, 64, dtype=torch.uint8), scales, torch.ones(1), x, x.clone()]


@pytest.mark.parametrize("held_as", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_dequantize_is_one_kernel_without_float8(capability: tuple[int, int], held_as: torch.dtype) -> None:
    code = fakecuda.generate(multiply_add, *inputs(held_as), capability=capability)
    ((name, kernel),) = fakecuda.triton_kernels(code).items()
    assert name.startswith("triton_poi_fused_add_dequantize_mul")
    assert "fp8" not in kernel and "float8" not in kernel

    # Around the kernel: no op of the library, no buffer but the result, views of bytes at most.
    assert set(re.findall(r"torch\.ops\.([\w.]+)\(", code)) <= {"aten.view.dtype"}
    assert code.count("= empty_strided_cuda(") == 1

    ptx = fakecuda.compile_to_ptx(name, kernel, capability)
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert ".ftz" not in ptx  # MXFP4's smallest scale is subnormal


def test_bytes_viewed_as_float8_cost_no_call_where_triton_knows_float8() -> None:
    code = fakecuda.generate(multiply_add, *inputs(torch.uint8), capability=(9, 0))
    assert not re.search(r"torch\.ops\.[\w.]+\(", code)
