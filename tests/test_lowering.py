"""The lowering of `dequantize`: fused, with eager's bits; and when and how lowerings are registered."""

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

from torch_nvfp4 import MXFP4, NVFP4, Format, lowering
from torch_nvfp4.lowering import table

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OP_CALL = r"torch\.ops\.nvfp4\.[\w.]+\("


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ops.nvfp4.dequantize(codes, scales, global_scale, dtype=dtype)


def dequantize_all(
    inputs: list[tuple[Tensor, ...]], dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
) -> list[Tensor]:
    return [dequantize(*packed, dtype) for packed in inputs for dtype in dtypes]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape, actual.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert torch.equal(actual.isnan(), expected.isnan())
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    assert torch.equal(actual.nan_to_num().view(integer), expected.nan_to_num().view(integer))


def random_bytes(shape: list[int], layout: str) -> Tensor:
    """Random uint8 of a shape: contiguous, or with gaps along every dim."""
    if layout == "contiguous":
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.randint(0, 256, [2 * size for size in shape], dtype=torch.uint8)[(slice(None, None, 2),) * len(shape)]


def packed(fmt: Format, shape: list[int], scale_shape: list[int], layout: str = "contiguous") -> tuple[Tensor, ...]:
    """A packed tensor of random bytes, its value of shape `shape`. Every scale byte occurs, NaN too."""
    *lead, columns = shape
    codes = random_bytes([*lead, columns // 2], layout)
    scales = random_bytes([*lead, columns // fmt.block_size], layout).view(fmt.scale_dtype)
    global_scale = torch.rand(scale_shape) + 0.1 if fmt is NVFP4 else torch.ones(scale_shape)
    return codes, scales, global_scale


def test_every_code_under_every_scale_byte_has_the_bits_of_eager() -> None:
    inputs = []
    for fmt, global_scale in ((NVFP4, 0.37), (MXFP4, 1.0)):
        codes = torch.arange(256, dtype=torch.uint8).view(1, 256).expand(256, 256)
        scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 512 // fmt.block_size)
        inputs.append((codes, scales.contiguous().view(fmt.scale_dtype), torch.tensor(global_scale)))

    compiled, (code,) = run_and_get_code(torch.compile(dequantize_all, fullgraph=True), inputs, DTYPES)
    assert not re.search(OP_CALL, code)
    for actual, expected in zip(compiled, dequantize_all(inputs, DTYPES), strict=True):
        assert_same_bits(actual, expected)


@given(sizes=st.tuples(*[st.integers(2, 5)] * 3), layout=st.sampled_from(["contiguous", "gaps"]))
@example((3, 4, 5), "contiguous")  # in the first of each layout no two sizes are equal: one graph then serves all
@example((3, 4, 5), "gaps")
@settings(max_examples=12)
def test_symbolic_sizes_and_strides_have_the_bits_of_eager(sizes: tuple[int, int, int], layout: str) -> None:
    experts, half_rows, blocks = sizes
    rows, columns = 2 * half_rows, 32 * blocks
    inputs = [
        packed(NVFP4, [columns], [], layout),
        packed(NVFP4, [experts, rows, columns], [experts, 2], layout),
        packed(MXFP4, [experts, rows, columns], [1], layout),
    ]
    compiled = torch.compile(dequantize_all, fullgraph=True, dynamic=True)
    for actual, expected in zip(compiled(inputs), dequantize_all(inputs), strict=True):
        assert_same_bits(actual, expected)


def test_symbolic_rows_do_not_recompile() -> None:
    compiled = torch.compile(dequantize, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (17, 16, 33, 64):
            codes, scales, global_scale = packed(NVFP4, [rows, 64], [1])
            torch._dynamo.mark_dynamic(codes, 0)
            torch._dynamo.mark_dynamic(scales, 0)
            assert_same_bits(compiled(codes, scales, global_scale), dequantize(codes, scales, global_scale))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [[0, 4, 32], [2, 0, 32], [2, 4, 0], [0, 0, 0]], ids=str)
def test_nothing_to_decode(shape: list[int], dynamic: bool) -> None:
    inputs = packed(NVFP4, shape, [shape[0], 2])
    assert_same_bits(torch.compile(dequantize, fullgraph=True, dynamic=dynamic)(*inputs), dequantize(*inputs))


def test_global_scales_with_a_size_of_one() -> None:
    inputs = [packed(NVFP4, [1, 2, 32], [1, 2]), packed(NVFP4, [3, 2, 32], [3, 1])]
    compiled = torch.compile(dequantize_all, fullgraph=True, dynamic=True)
    for actual, expected in zip(compiled(inputs), dequantize_all(inputs), strict=True):
        assert_same_bits(actual, expected)


def test_fuses_with_what_reads_it() -> None:
    def multiply_add(codes: Tensor, scales: Tensor, global_scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return dequantize(codes, scales.view(torch.float8_e4m3fn), global_scale) * x + y

    codes, scales, global_scale = packed(NVFP4, [64, 256], [1])
    bytes_ = scales.view(torch.uint8) & 0x77  # no NaN; held as bytes, as modules do
    x, y = torch.randn(2, 64, 256, dtype=torch.bfloat16)
    actual, (code,) = run_and_get_code(torch.compile(multiply_add, fullgraph=True), codes, bytes_, global_scale, x, y)
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert not re.search(r"torch\.ops\.\w+\.[\w.]+\(", code)
    assert len(re.findall(r"= empty_strided\w*\(", code.split("def call(")[1])) == 1  # the result

    # Not rounded to bf16 before the multiplication.
    weight = dequantize(codes, bytes_.view(torch.float8_e4m3fn), global_scale, torch.float32)
    assert torch.equal(actual, (weight * x.float() + y.float()).to(torch.bfloat16))


LAZY = """
import sys
import torch
from torch._subclasses import FakeTensorMode

def loaded():
    modules = ("torch._inductor.lowering", "torch_nvfp4.lowering.table")
    return [name for name in modules if name in sys.modules]

import torch_nvfp4
import torch_nvfp4.lowering
packed = torch.ops.nvfp4.quantize(torch.randn(4, 32))
torch.ops.nvfp4.dequantize(*packed)
with FakeTensorMode(allow_non_fake_inputs=True):
    torch.ops.nvfp4.dequantize(*packed)
assert not loaded(), loaded()

torch.compile(lambda *packed: torch.ops.nvfp4.dequantize(*packed), backend="eager", fullgraph=True)(*packed)
assert len(loaded()) == 2, loaded()
assert torch.ops.nvfp4.dequantize.default in sys.modules["torch._inductor.lowering"].lowerings
"""


def test_only_tracing_for_compilation_loads_inductor(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_registered_once_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    tags: list[str] = []
    barrier = threading.Barrier(8)
    monkeypatch.setattr(lowering, "_registered", False)
    monkeypatch.setattr(table, "register_all", lambda: calls.append(threading.get_ident()))

    def trace_often() -> None:
        barrier.wait()
        for _ in range(3):
            lowering.ensure_registered()
        tags.append(torch.compiler.config.cache_key_tag)

    threads = [threading.Thread(target=trace_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert [tag.count(lowering.cache_tag()) for tag in tags] == [1] * 8


def test_the_tag_of_the_user_stays() -> None:
    with torch.compiler.config.patch(cache_key_tag="mine"):
        lowering.ensure_registered()
        lowering.ensure_registered()
        assert torch.compiler.config.cache_key_tag == f"mine;{lowering.cache_tag()}"


def test_edited_lowerings_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = packed(NVFP4, [4, 32], [1])

    def compile_again() -> tuple[int, int]:
        """Hits and misses of the outer cache; what misses there must miss in the inner one too."""
        torch._dynamo.reset()
        counters.clear()
        torch.compile(dequantize, fullgraph=True)(*inputs)
        inner, outer = counters["inductor"], counters["aot_autograd"]
        assert inner["fxgraph_cache_miss"] == outer["autograd_cache_miss"]
        return outer["autograd_cache_hit"], outer["autograd_cache_miss"]

    with fresh_cache(), torch.compiler.config.patch(cache_key_tag=""):
        assert compile_again() == (0, 1)
        assert compile_again() == (1, 0)
        torch.compiler.config.cache_key_tag = ""
        monkeypatch.setattr(lowering, "cache_tag", lambda: "torch_nvfp4.lowering=edited")
        assert compile_again() == (0, 1)


def test_every_source_file_is_part_of_the_hash(tmp_path: Path) -> None:
    sources = Path(lowering.__file__).parent
    copied = Path(shutil.copytree(sources, tmp_path / "lowering", ignore=shutil.ignore_patterns("__pycache__")))
    seen = {lowering.source_hash(copied)}
    assert seen == {lowering.source_hash(sources)}
    for path in sorted(copied.glob("*.py")):
        path.write_bytes(path.read_bytes() + b"\n")
        seen.add(lowering.source_hash(copied))
    (copied / "grouped.py.jinja").write_text("")
    seen.add(lowering.source_hash(copied))
    assert len(seen) == len(list(copied.glob("*.py"))) + 2
