"""Runs code that Inductor generated for a GPU, on CPU tensors under Triton's interpreter.

A program of its own, as `interpreted_kernels.py`: `python interpreted_graphs.py FILE`, where FILE holds a list of
(dtype of the layer, source, inputs, outputs) with the outputs that the same graphs gave on the CPU. Memory is NaN
before it is written.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import inspect
import sys
import tempfile
import types
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import interpreted_kernels
import torch
import triton
import triton.language as tl
from torch import Tensor

import torch_nvfp4  # noqa: F401  (registers the ops)

BLOCKS = {"XBLOCK": 64, "YBLOCK": 16}
DROPPED = (
    "from torch._inductor.async_compile import AsyncCompile",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream",
    "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda",
)


@triton.jit
def nearbyint(x):
    """x to the nearest whole number, ties to even, by fp32's own addition."""
    return (x + 12582912.0) - 12582912.0


tl.nearbyint = nearbyint  # of libdevice, which the interpreter lacks


class AsyncCompile:
    """Stands in for Inductor's: kernels become functions that launch them in the interpreter."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def triton(self, name: str, source: str, device_str: str) -> Any:
        before, _, body = source.replace("triton_helpers.set_driver_to_gpu()", "").partition("@triton_heuristics")
        body = body[body.index("@triton.jit") :].replace("libdevice.", "tl.")
        kernel = getattr(load(before + body, self._directory / f"{name}.py"), name)
        return types.SimpleNamespace(run=template(kernel) if "_tem_" in name else pointwise(kernel))

    def wait(self, scope: dict[str, Any]) -> None:
        pass


def load(source: str, path: Path, **names: Any) -> types.ModuleType:
    """The module of a source, which may use these names. (Triton reads kernels from files.)"""
    path.write_text(source)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    vars(module).update(names)
    spec.loader.exec_module(module)
    return module


def template(kernel: Any) -> Callable[..., None]:
    def run(*args: Any, stream: int) -> None:
        *args, x, y, z = args
        kernel[x, y, z](*args)

    return run


def pointwise(kernel: Any) -> Callable[..., None]:
    """A generated pointwise kernel or reduction: its grid and blocks follow from the sizes it gets."""
    names = list(inspect.signature(kernel.fn).parameters)

    def run(*args: Any, stream: int) -> None:
        given = dict(zip(names, args, strict=False))
        blocks = {name: BLOCKS[name] for name in names if name in BLOCKS}
        if "R0_BLOCK" in names:
            blocks["R0_BLOCK"] = triton.next_power_of_2(given["r0_numel"])
        if given["xnumel"] == 1:
            blocks["XBLOCK"] = 1  # a reduction of everything
        sizes = (("xnumel", "XBLOCK"), ("ynumel", "YBLOCK"))
        grid = tuple(triton.cdiv(given[numel], blocks[block]) for numel, block in sizes if numel in given)
        kernel[grid](**given, **blocks)

    return run


def poisoned(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    memory = torch.empty_strided(size, stride, dtype=dtype)
    storage = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
    storage.fill_(0xFF if dtype.is_floating_point else 0x7F)
    return memory


def run(source: str, inputs: list[Any], directory: Path) -> list[Any]:
    for line in DROPPED:
        assert line in source, line
        source = source.replace(line, "")
    source = source.replace("with torch.cuda._DeviceGuard(0):", "if True:").replace("torch.cuda.set_device(0)", "pass")
    module = load(
        source, directory / "graph.py", AsyncCompile=lambda: AsyncCompile(directory), get_raw_stream=lambda device: 0,
        empty_strided_cuda=poisoned,
    )  # fmt: skip
    with torch.no_grad():
        return list(module.call(list(inputs)))


def compare(number: int, got: Any, wanted: Any, dtype: torch.dtype) -> None:
    """`dtype`: what the layer computes in, whatever an output is kept in."""
    if not isinstance(wanted, Tensor):
        assert got == wanted, number
    elif not wanted.is_floating_point():
        assert torch.equal(got, wanted), number
    elif wanted.itemsize > 1:  # else a float8 weight that is passed through
        interpreted_kernels.compare(f"output {number}", got, wanted, dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    interpreted_kernels.use_cpu_tensors()
    for dtype, source, inputs, outputs in torch.load(sys.argv[1], weights_only=False):
        with tempfile.TemporaryDirectory() as directory:
            for number, (got, wanted) in enumerate(zip(run(source, inputs, Path(directory)), outputs, strict=True)):
                compare(number, got, wanted, dtype)
        print("one graph agrees", flush=True)
    print("all agree")
