"""The modules: packed bytes survive everything a user does to a module, and the numbers are those of float64."""

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from torch_nvfp4 import NVFP4Experts, NVFP4Linear
from torch_nvfp4.format import get_format, quantize
from torch_nvfp4.nn import LoRAFactors, MixedLoRA, set_numerics
from torch_nvfp4.ops import reference

E, H, I, T, K, R = 3, 64, 32, 5, 2, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def experts(format: str = "nvfp4", bias: bool = True, lora: bool = True, activation: str = "silu") -> NVFP4Experts:
    n = I if activation == "relu2" else 2 * I
    gate_up = normal(E, n, H)
    gate_up[:, n // 2 :] *= 2.14  # gate and up then need global scales of their own
    biases = dict(gate_up_bias=normal(E, n, seed=1), down_bias=normal(E, H, seed=2)) if bias else {}
    module = NVFP4Experts.from_dense(gate_up, normal(E, H, I, seed=3), **biases, activation=activation, format=format)
    if lora:
        module.add_lora(R, scaling=0.5)
        fill_lora(module)
    return module


def linear(format: str = "nvfp4", bias: bool = True, lora: bool = True) -> NVFP4Linear:
    torch.manual_seed(1)
    module = NVFP4Linear.from_dense(nn.Linear(H, 24, bias=bias), format)
    if lora:
        module.add_lora(R, scaling=0.5)
        fill_lora(module)
    return module


def fill_lora(module: nn.Module) -> None:
    """LoRA begins as a no-op with random A; make it the same each time, and one that shows."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora" in name:
                parameter.copy_(normal(*parameter.shape, seed=4) * 0.1)


def zeroed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def packed(module: nn.Module) -> dict[str, Tensor]:
    parts = ("codes", "scales", "global_scale")
    return {name: p.detach().clone() for name, p in module.named_parameters() if name.endswith(parts)}


def assert_packed_is(module: nn.Module, before: dict[str, Tensor]) -> None:
    assert before
    for name, wanted in before.items():
        got = module.get_parameter(name)
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), name
        assert not got.requires_grad, name


def call(module: nn.Module, dtype: torch.dtype = torch.float32, **lora: Any) -> Tensor:
    x = normal(T, H, seed=5).to(dtype)
    if isinstance(module, NVFP4Linear):
        return module(x)
    ids = torch.tensor([[0, 2], [1, 0], [2, 2], [-1, 1], [0, E]])
    return module(x, ids, torch.linspace(0.1, 1, T * K).view(T, K), **lora)


MAKERS = {"experts": experts, "linear": linear}
each_module = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
each_format = pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])


# ---- bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each_format
@each_module
def test_changing_dtype_leaves_packed_bytes(make: type, format: str, dtype: torch.dtype) -> None:
    changes = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
    for change in (lambda m: m.to(dtype), lambda m: m.to(dtype=dtype), lambda m: getattr(m, changes[dtype])()):
        module = make(format)
        before = packed(module)
        wrapped = change(nn.Sequential(module))
        assert_packed_is(wrapped[0], before)
        assert all(p.dtype == dtype for n, p in module.named_parameters() if "lora" in n or "bias" in n)
        assert call(module, dtype).dtype == dtype
        assert_packed_is(wrapped.to(torch.float32)[0], before)  # and back


@each_format
@each_module
def test_state_dict_round_trip(make: type, format: str, tmp_path: Path) -> None:
    module = make(format)
    wanted = call(module)
    save_file(module.state_dict(), tmp_path / "state.safetensors")
    for state in (module.state_dict(), load_file(tmp_path / "state.safetensors")):
        fresh = zeroed(make(format))
        fresh.load_state_dict(state, strict=True)
        assert_packed_is(fresh, packed(module))
        assert torch.equal(call(fresh), wanted)


@each_module
def test_an_average_of_parameters_can_leave_packed_bits_alone(make: type) -> None:
    """As docs/transformers.md has it."""
    module = make()
    mean = AveragedModel(module, avg_fn=lambda mean, new, n: mean.lerp(new, 0.01) if mean.is_floating_point() else new)
    before = call(mean.module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora" in name:
                parameter.add_(1)
    for _ in range(3):
        mean.update_parameters(module)
    assert_packed_is(mean.module, packed(module))
    assert not torch.equal(call(mean.module), before)


@pytest.mark.parametrize("assign", [False, True])
@each_format
@each_module
def test_a_state_dict_may_have_the_dtypes_that_the_bits_stand_for(make: type, format: str, assign: bool) -> None:
    module = make(format)
    fmt = get_format(format)
    meaning = {"scales": fmt.scale_dtype, "global_scale": torch.float32}
    state = module.state_dict()
    for name in packed(module):
        for kind, dtype in meaning.items():
            if name.endswith(f"_{kind}"):
                state[name] = state[name].view(dtype)
    fresh = zeroed(make(format))
    fresh.load_state_dict(state, assign=assign)
    assert_packed_is(fresh, packed(module))
    assert torch.equal(call(fresh), call(module))


@each_module
def test_a_state_dict_of_other_dtypes_is_refused(make: type) -> None:
    module, before = make(), packed(make())
    for kind, dtype in {"global_scale": torch.bfloat16, "_scales": torch.float8_e5m2, "codes": torch.float32}.items():
        state = module.state_dict()
        name = next(name for name in before if name.endswith(kind))
        state[name] = state[name].to(dtype)
        with pytest.raises(RuntimeError, match=f"{name}: the state dict has {dtype}, and packed bits are torch"):
            module.load_state_dict(state)
        assert_packed_is(module, before)


@pytest.mark.parametrize("shape", [(4, H // 2), (0, H + 1), ()])
def test_a_linear_layer_refuses_another_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"x must be \[..., C\] with C = {H}, got"):
        linear()(torch.zeros(shape))


@each_module
def test_a_state_dict_without_adapters_does_not_fit_one_with(make: type) -> None:
    with pytest.raises(RuntimeError, match="lora_a"):
        make().load_state_dict(make(lora=False).state_dict())


@each_module
def test_deepcopy_is_independent(make: type) -> None:
    module = make()
    twin = copy.deepcopy(module)
    assert torch.equal(call(twin), call(module))
    assert_packed_is(twin, packed(module))
    with torch.no_grad():
        twin.get_parameter(next(iter(packed(twin)))).fill_(0x55)
    assert not torch.equal(call(twin), call(module))


@each_format
@each_module
def test_meta_device_then_real(make: type, format: str) -> None:
    module = make(format, lora=False)
    state, wanted = module.state_dict(), call(module)

    def on_meta() -> nn.Module:
        if isinstance(module, NVFP4Linear):
            return NVFP4Linear(H, 24, bias=True, format=format, device="meta")
        return NVFP4Experts(E, H, I, bias=True, format=format, device="meta")

    assigned = on_meta()
    assigned.load_state_dict(state, assign=True)
    emptied = on_meta().to_empty(device="cpu")
    emptied.load_state_dict(state)
    with torch.device("meta"):
        by_context = on_meta()
    assert all(p.is_meta for p in by_context.parameters())
    for built in (assigned, emptied):
        assert_packed_is(built, packed(module))
        assert torch.equal(call(built), wanted)


@pytest.fixture
def process_group() -> Iterator[None]:
    with tempfile.NamedTemporaryFile() as file:
        store = torch.distributed.FileStore(file.name, 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


@each_module
def test_ddp_leaves_packed_bytes_and_gives_the_same_gradients(make: type, process_group: None) -> None:
    module, plain = make(), make()
    before = packed(module)
    wrapped = DistributedDataParallel(module)
    call_through = call(plain)
    call_through.sum().backward()
    x = normal(T, H, seed=5)
    ids = torch.tensor([[0, 2], [1, 0], [2, 2], [-1, 1], [0, E]])
    rest = () if isinstance(module, NVFP4Linear) else (ids, torch.linspace(0.1, 1, T * K).view(T, K))
    wrapped(x, *rest).sum().backward()
    assert_packed_is(module, before)
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("counts", ["none routed", "no tokens"])
def test_a_rank_without_tokens_still_has_every_gradient_fault_b14(counts: str, process_group: None) -> None:
    module = experts()
    wrapped = DistributedDataParallel(module)
    t = 0 if counts == "no tokens" else T
    out = wrapped(normal(t, H), torch.full((t, K), -1), torch.ones(t, K))
    out.sum().backward()
    for name, p in module.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and p.grad.shape == p.shape and not p.grad.any(), name


# ---- what a module is


class TestRepr(expecttest.TestCase):
    def test_extra_repr(self) -> None:
        clamped = NVFP4Experts(2, 32, 64, activation="swiglu_oai", limit=7.0, bias=True, format="mxfp4")
        modules = [clamped, experts(), NVFP4Experts(2, 32, 64), linear(), linear(bias=False, lora=False)]
        self.assertExpectedInline(
            "\n".join(map(repr, modules)) + "\n",
            """\
NVFP4Experts(E=2, H=32, I=64, swiglu_oai, limit=7.0, mxfp4, bias)
NVFP4Experts(E=3, H=64, I=32, silu, nvfp4, bias, gate_up_lora r=4, down_lora r=4)
NVFP4Experts(E=2, H=32, I=64, silu, nvfp4)
NVFP4Linear(64, 24, bias=True, nvfp4, lora r=4)
NVFP4Linear(64, 24, bias=False, nvfp4)
""",
        )


@each_format
def test_from_dense_quantises_each_half_of_each_expert_fault_a14(format: str) -> None:
    gate_up, down = normal(E, 2 * I, H), normal(E, H, I, seed=1)
    gate_up[:, I:] *= 2.14
    module = NVFP4Experts.from_dense(gate_up, down, format=format)
    halves = {"gate_up": (slice(0, I), slice(I, 2 * I)), "down": (slice(0, H),)}
    for name, weight in (("gate_up", gate_up), ("down", down)):
        codes, scales, global_scale = module.packed(name)
        assert global_scale.shape == (E, len(halves[name]))
        for e in range(E):
            for s, rows in enumerate(halves[name]):
                wanted = quantize(weight[e, rows], format=format)
                assert torch.equal(codes[e, rows], wanted[0])
                assert torch.equal(scales[e, rows].view(torch.uint8), wanted[1].view(torch.uint8))
                assert global_scale[e, s] == wanted[2][0]
    if format == "nvfp4":
        ratio = module.packed("gate_up")[2].select(1, 1) / module.packed("gate_up")[2].select(1, 0)
        amax = gate_up.view(E, 2, -1).abs().amax(-1)
        torch.testing.assert_close(ratio, amax[:, 1] / amax[:, 0])
    error = (module.dequantize("gate_up", torch.float32) - gate_up).norm() / gate_up.norm()
    assert error < (0.11 if format == "nvfp4" else 0.14)


def test_down_has_one_global_scale_and_relu2_has_no_halves() -> None:
    module = experts(activation="relu2")
    assert module.packed("gate_up")[2].shape == module.packed("down")[2].shape == (E, 1)
    assert call(module).shape == (T, H)


@each_module
def test_only_adapters_require_gradients(make: type) -> None:
    assert {n for n, p in make().named_parameters() if p.requires_grad} == {
        n for n, _ in make().named_parameters() if "lora" in n
    }
    assert not [n for n, p in make(lora=False).named_parameters() if p.requires_grad]
    assert not list(make().buffers())


@each_module
def test_packed_gives_views(make: type) -> None:
    module = make()
    views = module.packed() if isinstance(module, NVFP4Linear) else (*module.packed("gate_up"), *module.packed("down"))
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert {v.untyped_storage().data_ptr() for v in views} <= storages
    assert module.packed_bytes == sum(v.numel() * v.element_size() for v in views)


@each_module
def test_train_and_eval_are_the_same(make: type) -> None:
    module = make()
    assert torch.equal(call(module.train()), call(module.eval()))


# ---- numbers


@pytest.mark.parametrize("lead", [(), (1,), (0,), (5,), (2, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("lora", [False, True])
@each_format
def test_linear_is_the_float64_product(format: str, lora: bool, lead: tuple[int, ...]) -> None:
    module = linear(format, lora=lora)
    x = normal(*lead, H, seed=6).requires_grad_()
    out = module(x)
    assert out.shape == (*lead, 24)
    codes, scales, global_scale = (p.unsqueeze(0) for p in module.packed())
    weight = reference.dense_weight(codes, scales, global_scale)[0]
    if lora:
        weight = weight + 0.5 * module.lora_b.double() @ module.lora_a.double()
    torch.testing.assert_close(out.double(), x.double() @ weight.T + module.bias.double(), rtol=1e-5, atol=1e-5)
    grad = normal(*out.shape, seed=7)
    out.backward(grad)
    torch.testing.assert_close(x.grad.double(), grad.double() @ weight, rtol=1e-5, atol=1e-5)
    if lora:
        flat_x, flat_grad = x.detach().reshape(-1, H).double(), grad.reshape(-1, 24).double()
        ga = 0.5 * module.lora_b.double().T @ flat_grad.T @ flat_x
        gb = 0.5 * flat_grad.T @ flat_x @ module.lora_a.double().T
        torch.testing.assert_close(module.lora_a.grad.double(), ga, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(module.lora_b.grad.double(), gb, rtol=1e-4, atol=1e-4)


def test_adapters_begin_as_a_no_op_with_pefts_spread() -> None:
    module = experts(lora=False)
    before = call(module)
    module.add_lora(R, scaling=2.0)
    assert torch.equal(call(module), before)
    a = module.gate_up_lora_a.detach()
    bound = 1 / H**0.5
    assert not module.gate_up_lora_b.any() and a.abs().max() <= bound and a.std() > 0.4 * bound
    assert not torch.equal(a[0], a[1])


# ---- refusals


class TestErrors(expecttest.TestCase):
    maxDiff = None

    def test_texts(self) -> None:
        gate_up, down = normal(E, 2 * I, H), normal(E, H, I)
        bad = gate_up.clone()
        bad[1, 2, 3] = torch.nan
        factors, mixed = LoRAFactors(normal(E, R, I), normal(E, H, R), 1.0), torch.zeros(T, dtype=torch.int32)
        calls = {
            "activation": lambda: NVFP4Experts(E, H, I, activation="swish"),
            "format": lambda: NVFP4Experts(E, H, I, format="fp4"),
            "hidden": lambda: NVFP4Experts(E, 24, I),
            "intermediate": lambda: NVFP4Experts(E, H, 16, format="mxfp4"),
            "experts": lambda: NVFP4Experts(0, H, I),
            "transposed": lambda: NVFP4Experts.from_dense(gate_up, down.mT),
            "gated": lambda: NVFP4Experts.from_dense(gate_up, down, activation="relu2"),
            "one bias": lambda: NVFP4Experts.from_dense(gate_up, down, down_bias=normal(E, H)),
            "from_dense activation": lambda: NVFP4Experts.from_dense(gate_up, down, activation="swish"),
            "not finite": lambda: NVFP4Experts.from_dense(bad, down),
            "rank": lambda: experts(lora=False).add_lora(0, scaling=1.0),
            "twice": lambda: experts().add_lora(2, scaling=1.0),
            "projection": lambda: experts(lora=False).add_lora(2, scaling=1.0, projections=("gateup",)),  # type: ignore[arg-type]
            "adapter": lambda: call(experts(), lora={"up": factors}),
            "mixed": lambda: call(experts(), lora=MixedLoRA([{}, {"down": factors, "w2": factors}], mixed)),
            "linear width": lambda: NVFP4Linear(24, 8),
            "linear from a width": lambda: NVFP4Linear.from_dense(nn.Linear(24, 8)),
            "linear rank": lambda: linear(lora=False).add_lora(0, scaling=1.0),
            "linear twice": lambda: linear().add_lora(2, scaling=1.0),
        }
        lines = []
        for name, wrong in calls.items():
            with pytest.raises(ValueError) as info:
                wrong()
            lines.append(f"{name}: {info.value}")
        self.assertExpectedInline(
            "\n".join(lines) + "\n",
            """\
activation: activation must be one of silu, gelu_tanh, gelu, swiglu_oai, relu2, got 'swish'
format: format must be one of 'nvfp4', 'mxfp4'; given 'fp4'
hidden: hidden_size must be a positive multiple of B = 16 (nvfp4), got 24
intermediate: intermediate_size must be a positive multiple of B = 32 (mxfp4), got 16
experts: num_experts must be at least 1, got 0
transposed: gate_up must be [E, N, H] and down [E, H, I], got [3, 64, 64] and [3, 32, 64]
gated: gate_up must have N = I = 32 rows for 'relu2', got 64
one bias: gate_up_bias and down_bias must be given together
from_dense activation: gate_up must have N = I = 32 rows for 'swish', got 64
not finite: x must be finite in float32; 1 of 128 blocks have a NaN or infinity
rank: r must be at least 1, got 0
twice: gate_up already has LoRA factors
projection: projections are gate_up, down, got 'gateup'
adapter: projections are gate_up, down, got 'up'
mixed: projections are gate_up, down, got 'w2'
linear width: in_features must be a positive multiple of B = 16, got 24
linear from a width: in_features must be a positive multiple of B = 16, got 24
linear rank: r must be at least 1, got 0
linear twice: the layer already has LoRA factors
""",
        )


def test_each_token_uses_the_adapter_that_it_chooses() -> None:
    """Output and gradients are those of the tokens of each adapter alone; each row's products are computed once."""
    torch.manual_seed(3)
    experts = NVFP4Experts.from_dense(torch.randn(4, 32, 32), torch.randn(4, 32, 16))

    def factors(e: int, n: int, c: int, r: int) -> LoRAFactors:
        return LoRAFactors(torch.randn(e, r, c).requires_grad_(), torch.randn(e, n, r).requires_grad_(), 0.5)

    adapters = [
        {"gate_up": factors(4, 32, 32, 2), "down": factors(4, 32, 16, 3)},
        {"down": factors(4, 32, 16, 1)},
        {"gate_up": factors(4, 32, 32, 2)},  # nobody's choice
    ]
    x, weights = torch.randn(9, 32, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2], [-1, 1], [0, 4], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
    chosen = torch.tensor([0, 1, -1, 1, 0, 0, 3, 1, -7])
    leaves = [x, weights, *(t for adapter in adapters for f in adapter.values() for t in (f.a, f.b))]
    run = torch.compile(experts, fullgraph=True, backend="aot_eager")
    y = run(x, ids, weights, lora=MixedLoRA(adapters, chosen))
    grads = torch.autograd.grad(y.square().sum(), leaves)
    parts = []
    for token in range(9):
        i = int(chosen[token])
        one = slice(token, token + 1)
        parts.append(experts(x[one], ids[one], weights[one], lora=adapters[i] if 0 <= i < 3 else {}))
    expected = torch.cat(parts)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    wanted = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    for found, grad in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if grad is None else grad, rtol=1e-4, atol=1e-2)
    assert not grads[-1].any() and not grads[-2].any()
    assert experts(x[:0], ids[:0], weights[:0], lora=MixedLoRA(adapters, chosen[:0])).shape == (0, 32)
    for wrong in (chosen[:8], chosen[:, None], chosen.float(), chosen > 0):
        with pytest.raises(ValueError, match=r"lora.ids must be \[T\] = \[9\] integers, got"):
            experts(x, ids, weights, lora=MixedLoRA(adapters, wrong))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_merge_aware_modules_compute_with_the_merged_weight(compiled: bool) -> None:
    torch.manual_seed(0)
    experts = NVFP4Experts.from_dense(torch.randn(4, 64, 32), torch.randn(4, 32, 32))
    linear = NVFP4Linear.from_dense(torch.nn.Linear(32, 16))
    model = torch.nn.ModuleList([experts, linear])
    for module in model:
        module.add_lora(3, scaling=0.5)
    for name, factor in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(factor, std=0.3)
    assert (
        set_numerics(model, merge_aware=True) == 2 and "merge-aware" in repr(experts) and "merge-aware" in repr(linear)
    )
    x, ids = torch.randn(7, 32), torch.randint(0, 4, (7, 2))
    weights = torch.rand(7, 2)
    run = torch.compile(model[0], fullgraph=True, backend="aot_eager") if compiled else experts
    y, z = run(x, ids, weights), linear(x)
    for projection in ("gate_up", "down"):
        codes, scales = torch.ops.nvfp4.merge_lora(*experts.packed(projection), *experts._factors(projection))
        getattr(experts, f"{projection}_codes").copy_(codes)
        getattr(experts, f"{projection}_scales").copy_(scales.view(torch.uint8))
    codes, scales, global_scale = (part.unsqueeze(0) for part in linear.packed())
    merged = torch.ops.nvfp4.merge_lora(codes, scales, global_scale, linear.lora_a[None], linear.lora_b[None], 0.5)
    assert torch.equal(y, experts(x, ids, weights, lora={}))
    dense = torch.ops.nvfp4.dequantize(*merged, global_scale, dtype=torch.float32)[0]
    torch.testing.assert_close(z, torch.nn.functional.linear(x, dense, linear.bias))
    assert set_numerics(model, merge_aware=False, compute="w4a4") == 2 and ", w4a4" in repr(experts)
    assert not torch.equal(linear(x), z)
    with pytest.raises(ValueError, match="compute must be one of w4a16, w4a4, got 'w8'"):
        set_numerics(model, compute="w8")
    with pytest.raises(ValueError, match="has no packed module"):
        set_numerics(torch.nn.Linear(2, 2), merge_aware=True)
