"""The layer under torch.compile: the same bits as eager, no graph breaks, few graphs, and what the graphs hold."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import expecttest
import pytest
import torch
from samples import assert_same_bits
from strategies import Layer, make_layer
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torch_nvfp4 import SAVE_OPS, NVFP4Experts

E, H, I, K = 4, 32, 16, 2


def moe() -> NVFP4Experts:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*shape, generator=generator) for shape in ((E, 2 * I, H), (E, H, I))]
    module = NVFP4Experts.from_dense(*weights)
    module.add_lora(4, scaling=0.5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


def tokens(t: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(x, ids, weights) with one slot in some that is not routed."""
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(t, H, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(-1, E, (t, K), generator=generator)
    return x, ids, torch.rand(t, K, generator=generator).requires_grad_()


def step(call: Callable[..., Tensor], module: NVFP4Experts, t: int, **options: torch.dtype) -> list[Tensor]:
    """Output and every gradient of one call."""
    x, ids, weights = tokens(t, **options)
    out = call(x, ids, weights)
    wanted = [x, weights, *(p for p in module.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]


# ---- equal to eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layer_gives_the_bits_of_eager_fault_d10(dtype: torch.dtype) -> None:
    module = moe()
    compiled = torch.compile(module, fullgraph=True)
    assert_same_bits(step(compiled, module, 17, dtype=dtype), step(module, module, 17, dtype=dtype))


def test_options_left_at_their_defaults_or_given_are_the_same_fault_d8() -> None:
    layer = make_layer().requires_grad()
    defaults = dict(gate_up_scaling=1.0, down_scaling=1.0, activation="silu", limit=None, compute="w4a16")
    grads = []
    for options in ({}, defaults, {**defaults, "merge_aware": False}):
        run = torch.compile(Layer(layer.tensors, options).run, fullgraph=True, backend="aot_eager")
        grads.append(torch.autograd.grad(run().sum(), layer.differentiable.values()))
        assert len(grads[-1]) == len(layer.differentiable)
    assert_same_bits(grads[1], grads[0])
    assert_same_bits(grads[2], grads[0])


def test_inputs_that_inductor_lays_out_itself_fault_d6() -> None:
    """Producers and consumers whose buffers Inductor may pad or permute, with H no multiple of its alignment."""
    layer = make_layer(t=17, h=80, i=48, ranks=(3, 5))
    w = torch.randn(80, 80, generator=torch.Generator().manual_seed(1)) / 9

    def run(x: Tensor, strided: bool) -> Tensor:
        y = (w @ x.t()).t() if strided else x @ w
        return layer.replaced(x=y * torch.sigmoid(y)).run().t() @ y

    for strided in (False, True):
        compiled = torch.compile(partial(run, strided=strided), fullgraph=True)(layer.x)
        wanted = run(layer.x, strided)
        assert (compiled - wanted).norm() <= 1e-5 * wanted.norm()


def test_first_call_is_like_the_second_fault_d11() -> None:
    module = moe()
    compiled = torch.compile(module, fullgraph=True)
    assert_same_bits(step(compiled, module, 16), step(compiled, module, 16))


def test_poisoned_memory_does_not_show_fault_b7_b21(poison: Callable[[], None]) -> None:
    module = moe()
    compiled = torch.compile(module, fullgraph=True)
    for _ in range(2):
        poison()
        assert all(tensor.isfinite().all() for tensor in step(compiled, module, 17))


# ---- number of graphs


def test_one_dynamic_graph_serves_all_sizes_fault_d16() -> None:
    module = moe()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)

    def run(t: int) -> None:
        x, ids, weights = tokens(t)
        if t > 1:
            for tensor in (x, ids, weights):
                torch._dynamo.mark_dynamic(tensor, 0)
        compiled(x, ids, weights).sum().backward()

    run(17)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in (16, 33, 64):
            run(t)
    assert counter.frame_count == 1
    for t in (0, 1):
        before = counter.frame_count
        run(t)
        with torch._dynamo.config.patch(error_on_recompile=True):
            run(t)
            run(40)
        assert counter.frame_count <= before + 1


@pytest.mark.parametrize("t", [0, 1, 5])
def test_weights_as_arguments_under_dynamic_shapes(t: int) -> None:
    """With dynamic=True E, N, C and R are symbols too."""
    layer = make_layer(t=t, bias=True).requires_grad()
    names = [name for name, tensor in layer.tensors.items() if tensor is not None]

    def run(*tensors: Tensor) -> Tensor:
        return layer.replaced(**dict(zip(names, tensors, strict=True))).run()

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = [layer.tensors[name] for name in names]
    results = []
    for call in (run, compiled):
        out = call(*tensors)
        results.append([out, *torch.autograd.grad(out, layer.differentiable.values(), torch.ones_like(out))])
    assert_same_bits(results[1], results[0])


# ---- autocast, compiled autograd


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_the_activation_alone_fault_d19_c11(enabled: bool, weight_dtype: torch.dtype) -> None:
    layer = make_layer(t=17, weight_dtype=weight_dtype)
    x_dtype = torch.bfloat16 if enabled else torch.float32
    cast = layer.replaced(x=layer.x.to(x_dtype)).requires_grad()
    wanted = cast.run()
    names = list(layer.differentiable)
    wanted_grads = torch.autograd.grad(wanted, cast.differentiable.values(), torch.ones_like(wanted))
    for wrap in (lambda f: f, partial(torch.compile, fullgraph=True, backend="aot_eager")):
        for backward in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            leaves = layer.requires_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = wrap(leaves.run)()
            assert out.dtype == x_dtype
            assert_same_bits([out], [wanted])
            with backward:
                grads = torch.autograd.grad(out, leaves.differentiable.values(), torch.ones_like(out))
            for name, grad, like in zip(names, grads, wanted_grads, strict=True):
                assert grad.dtype == layer.tensors[name].dtype, name
                assert torch.equal(grad, like.to(grad.dtype)), name


def test_autocast_leaves_float64_alone() -> None:
    layer = make_layer(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.run().dtype == torch.float64


def test_compiled_autograd_gives_the_bits_of_autograd() -> None:
    module = moe()
    wanted = step(module, module, 17)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        got = step(module, module, 17)
    assert_same_bits(got, wanted)


# ---- activation checkpointing


class Count(TorchDispatchMode):
    """How often each forward op of the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = dict.fromkeys(SAVE_OPS, 0)

    def __torch_dispatch__(self, op: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if op in self.calls:
            self.calls[op] += 1
        return op(*args, **(kwargs or {}))


def save(ops: tuple[torch._ops.OpOverload, ...]) -> Callable[[], tuple]:
    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


CHECKPOINTS = {
    "full": ({}, dict.fromkeys(SAVE_OPS, 2)),
    "selective": ({"context_fn": save(SAVE_OPS)}, dict.fromkeys(SAVE_OPS, 1)),
    "one of three": (
        {"context_fn": save(SAVE_OPS[:1])},
        {SAVE_OPS[0]: 1, SAVE_OPS[1]: 2, SAVE_OPS[2]: 2},
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_saved_ops_run_once_and_others_twice_fault_d21(name: str) -> None:
    options, calls = CHECKPOINTS[name]
    module = moe()
    run = surrounded(module)
    with Count() as count:
        got = step(partial(checkpoint, run, use_reentrant=False, **options), module, 17)
    assert count.calls == calls
    assert_same_bits(got, step(run, module, 17))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_saved_ops_run_once_and_others_twice_compiled_fault_d21(name: str) -> None:
    options, calls = CHECKPOINTS[name]
    module = moe()
    run = surrounded(module)
    graphs = Graphs()
    compiled = graphs.compile(lambda *a: checkpoint(run, *a, use_reentrant=False, **options))
    got = step(compiled, module, 17)
    targets = [node.target for graph in graphs.aot for node in graph.nodes]
    assert {op: targets.count(op) for op in SAVE_OPS} == calls
    assert_same_bits(got, step(run, module, 17))


def surrounded(module: NVFP4Experts) -> Callable[..., Tensor]:
    """The layer with work after it, so that its result is needed again in the backward."""
    return lambda *args: module(*args).sin().sin()


def test_router_inside_a_checkpoint_with_ties_fault_b23() -> None:
    """No saved or recomputed tensor has a shape that depends on which experts the ids name."""
    module = moe()
    calls = iter([0, 1])

    def run(x: Tensor) -> Tensor:
        # The recomputation flips every tie; the shapes must not care.
        ids = (torch.arange(2 * x.shape[0]).view(-1, 2) + next(calls)) % E
        return module(x, ids, torch.full((x.shape[0], 2), 0.5))

    x, _, _ = tokens(17)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert x.grad.isfinite().all() and next(calls, None) is None


# ---- the graphs


class Graphs:
    """A backend that keeps Dynamo's graph and AOTAutograd's forward and backward graphs."""

    def __init__(self) -> None:
        self.dynamo: list[torch.fx.Graph] = []
        self.aot: list[torch.fx.Graph] = []

    def compile(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, fullgraph=True, backend=self._backend)

    def _backend(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.dynamo.append(module.graph)

        def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
            self.aot.append(graph.graph)
            return graph

        return aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)(module, inputs)


def listing(graph: torch.fx.Graph) -> Iterator[str]:
    """The calls of a graph, one a line, without names of nodes."""
    for node in graph.nodes:
        if node.op == "call_function":
            yield str(node.target).removesuffix(".default")


class TestGraphs(expecttest.TestCase):
    maxDiff = None

    def captured(self) -> Graphs:
        module, graphs = moe(), Graphs()
        x, ids, weights = tokens(17)
        graphs.compile(module)(x, ids, weights).sum().backward()
        return graphs

    def test_dynamo_sees_one_op(self) -> None:
        (graph,) = self.captured().dynamo
        self.assertExpectedInline(
            "\n".join(listing(graph)) + "\n",
            """\
nvfp4.moe_lora
""",
        )

    def test_aot_forward(self) -> None:
        self.assertExpectedInline(
            "\n".join(listing(self.captured().aot[0])) + "\n",
            """\
aten.view.dtype
aten.detach
aten.view.dtype
aten.detach
aten.view.dtype
aten.detach
aten.view.dtype
aten.detach
nvfp4.moe_route
<built-in function getitem>
<built-in function getitem>
<built-in function getitem>
nvfp4.grouped_lora_linear
<built-in function getitem>
<built-in function getitem>
nvfp4.glu_grouped_lora_linear
<built-in function getitem>
<built-in function getitem>
aten.view
aten.unbind.int
<built-in function getitem>
<built-in function getitem>
aten.ge.Scalar
aten.unsqueeze
aten.clamp_min
aten.index_select
aten.scalar_tensor
aten.where.self
aten.add.Tensor
aten.ge.Scalar
aten.unsqueeze
aten.clamp_min
aten.index_select
aten.where.self
aten.add.Tensor
""",
        )

    def test_aot_backward(self) -> None:
        self.assertExpectedInline(
            "\n".join(listing(self.captured().aot[1])) + "\n",
            """\
nvfp4.grouped_lora_dgrad
<built-in function getitem>
<built-in function getitem>
nvfp4.glu_backward
<built-in function getitem>
<built-in function getitem>
<built-in function getitem>
<built-in function getitem>
nvfp4.grouped_lora_wgrad
nvfp4.grouped_lora_wgrad
nvfp4.grouped_lora_dgrad
<built-in function getitem>
nvfp4.grouped_lora_wgrad
nvfp4.grouped_lora_wgrad
aten.index_select
aten.scalar_tensor
aten.where.self
aten.add.Tensor
aten.index_select
aten.where.self
aten.add.Tensor
""",
        )

    def test_what_the_forward_keeps_for_the_backward(self) -> None:
        forward = self.captured().aot[0]
        own = {node for node in forward.nodes if node.op == "placeholder"}
        kept = [n for n in forward.output_node().args[0] if n not in own]
        lines = [f"{n.meta['val'].dtype} {list(n.meta['val'].shape)}" for n in kept]
        self.assertExpectedInline(
            "\n".join(lines) + "\n",
            """\
torch.float32 [17, 32]
torch.float8_e4m3fn [4, 32, 2]
torch.float32 [4, 2]
torch.float8_e4m3fn [4, 32, 1]
torch.float32 [4, 1]
torch.int32 [34]
torch.int32 [4]
torch.float32 [34, 32]
torch.float32 [34, 4]
torch.float32 [34, 4]
torch.bool [17, 1]
torch.int32 [17]
torch.bool [17, 1]
torch.int32 [17]
""",
        )
