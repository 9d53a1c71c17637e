"""Inductor's CUDA code, generated on a machine that has no GPU, for tests to look at. Nothing is launched.

    code = generate(fn, *cpu_inputs, capability=(8, 0))
    forward, backward = generate_training(fn, *cpu_inputs)
    kernels = triton_kernels(code)

`fn` is traced on real CPU tensors (Dynamo, autograd, AOTAutograd). The graph that then reaches Inductor is
copied with every fake tensor moved to `cuda`, lowered and scheduled as on that GPU, and its source kept, not
loaded.
What would ask the driver (torch.cuda, Dynamo's device interface, Triton's driver) answers for a made-up GPU.
These are internals of torch: each new version needs a look at the patches.
"""

import contextlib
import copy
import functools
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
import triton.runtime
from torch._dynamo import device_interface
from torch._guards import detect_fake_mode
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DEVICE = torch.device("cuda", 0)
Capability = tuple[int, int]
SHARED_MEMORY = {(8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}  # elsewhere 99 KiB


@dataclass(frozen=True)
class Graph:
    """A graph that reached Inductor: its source for the GPU, and what went in and came out when it ran on the CPU."""

    source: str
    inputs: list[Any]
    outputs: list[Any]


def generate(fn: Callable[..., Any], *inputs: Any, capability: Capability = (9, 0), **compile_options: Any) -> str:
    """The source of the module that Inductor makes of `fn` on a GPU; forward only, `fn` must be one graph."""
    (graph,), _ = _generate(fn, inputs, capability, compile_options)
    return graph.source


def generate_training(
    fn: Callable[..., torch.Tensor], *inputs: Any, capability: Capability = (9, 0), **compile_options: Any
) -> tuple[Graph, Graph]:
    """The forward and the backward graph of `fn`, which returns one tensor that takes a gradient."""
    graphs, out = _generate(fn, inputs, capability, compile_options)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype))
    forward, backward = graphs
    return forward, backward


def _generate(
    fn: Callable[..., Any], inputs: Any, capability: Capability, compile_options: dict[str, Any]
) -> tuple[list[Graph], Any]:
    """(the graphs that ran so far, what `fn` returned); a backward is added when it runs."""
    graphs: list[Graph] = []
    sources: list[str] = []

    def keep_source(graph: GraphLowering) -> Any:
        wrapper, _kernels = graph.codegen()
        sources.append(wrapper.value)
        return types.SimpleNamespace(
            call=lambda _: None, __file__=None, key="not loaded", recursively_apply_fns=None, runner=None
        )

    def lower(graph: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Callable[..., Any]:
        moved, moved_inputs = _on_gpu(graph, example_inputs)
        with _fake_cuda(capability), mock.patch.object(GraphLowering, "compile_to_module", keep_source):
            compile_fx.compile_fx_inner(moved, moved_inputs, **options)
        source = sources.pop()

        def run(*args: Any) -> Any:  # the graph itself, on the CPU
            outputs = graph.forward(*args)
            graphs.append(Graph(source, list(args), list(outputs)))
            return outputs

        return compile_fx.make_boxed_func(run)

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, example_inputs, inner_compile=lower)

    torch._dynamo.reset()
    out = torch.compile(fn, backend=backend, fullgraph=True, **compile_options)(*inputs)
    return graphs, out


def triton_kernels(source: str) -> dict[str, str]:
    """Name and source of each Triton kernel in what `generate` returns."""
    found = re.finditer(r"async_compile\.triton\('(\w+)', '''(.*?)'''", source, re.DOTALL)
    return {match[1]: match[2] for match in found}


def compile_to_ptx(name: str, kernel: str, capability: Capability) -> str:
    """The PTX of one of `triton_kernels` in its first config, after a full build for that GPU with ptxas."""
    with _fake_cuda(capability):
        autotuner = getattr(PyCodeCache.load(kernel), name)
        meta = autotuner.triton_meta
        source = ASTSource(autotuner.fn, meta["signature"], autotuner.configs[0].kwargs, meta["configs"][0])
        return triton.compile(source, target=_target(capability)).asm["ptx"]


def _on_gpu(graph: torch.fx.GraphModule, inputs: Any) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A copy of a graph of aten ops whose fake tensors and device arguments are on the GPU."""
    mode = detect_fake_mode([*inputs, *(node.meta.get("val") for node in graph.graph.nodes)])
    assert isinstance(mode, FakeTensorMode)
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the original is kept for its id

    def move(x: Any) -> Any:
        if isinstance(x, torch.device) and x.type == "cpu":
            return DEVICE
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in moved:
            with mode:
                twin = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=DEVICE)
            moved[id(x)] = (twin, x)
        return moved[id(x)][0]

    copied = copy.copy(graph)
    copied.graph = torch.fx.Graph(copied)
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.graph.nodes:
        twin = nodes[node] = copied.graph.node_copy(node, nodes.__getitem__)
        twin.args = tuple(map(move, twin.args))
        twin.kwargs = {name: move(value) for name, value in twin.kwargs.items()}
        twin.meta = {key: tree_map(move, value) for key, value in node.meta.items() if key != "tensor_meta"}
    copied.recompile()
    return copied, [move(x) for x in inputs]


@contextlib.contextmanager
def _fake_cuda(capability: Capability) -> Iterator[None]:
    """While active, torch, Inductor and Triton believe in one GPU of this compute capability."""
    properties = types.SimpleNamespace(
        name="made-up GPU",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=SHARED_MEMORY.get(capability, 99 << 10),
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "is_tf32_supported": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "is_initialized": True,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
            in_interface = name.removeprefix("_")
            if in_interface in vars(device_interface.CudaInterface):
                value = staticmethod(getattr(torch.cuda, name))
                stack.enter_context(mock.patch.object(device_interface.CudaInterface, in_interface, value))
        driver = types.SimpleNamespace(get_current_target=lambda: _target(capability))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(mock.patch.dict(device_interface.caching_worker_device_properties, clear=True))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True, compile_threads=1))
        _forget_devices()
        stack.callback(_forget_devices)
        yield


def _target(capability: Capability) -> GPUTarget:
    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)


def _forget_devices() -> None:
    """Drop what functools caches remember of the devices there are."""
    theirs = ("torch.utils._triton", "torch._inductor.utils", "torch._inductor.runtime.hints")
    ours = ("torch_nvfp4.lowering.configs", "torch_nvfp4.lowering.hopper", "torch_nvfp4.ops.cuda")
    for module in (*theirs, *(name for name in ours if name in sys.modules)):
        for value in vars(sys.modules[module]).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
    DeviceProperties.create.cache_clear()


def assert_interpreted_graphs_agree(graphs: list[Any], folder: Path) -> None:
    """Graphs `(dtype, source, inputs, outputs)` run in Triton's interpreter, in a process of their own."""
    torch.save(graphs, folder / "graphs.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "interpreted_graphs.py", str(folder / "graphs.pt")]
    here = Path(__file__).parent
    run = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "all agree"
