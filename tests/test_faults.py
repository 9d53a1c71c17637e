"""Faults that users of comparable projects met, and that have no better place; and the table that lists them all.

A test's name ends in the ids of the rows of docs/faults.md that it covers.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import dense, exact
from strategies import Layer, make_layer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

OPS = torch.ops.nvfp4
IDS = (
    "A1 A3 A4 A5 A7 A8 A10 A11 A13 A14 A16 A18 A21 A22 A24 A26"
    " B1 B2 B4 B5 B6 B7 B8 B10 B12 B14 B16 B18 B19 B21 B23 B25"
    " C1 C2 C4 C5 C7 C10 C11 C12 C14 C16 C17 C19 C21 C22 C23"
    " D1 D2 D4 D6 D8 D10 D11 D12 D14 D16 D19 D21 E1 E2 E5 E6 E8 E9 E11 E13"
).split()


# ---- the table


TESTS = Path(__file__).parent


def table() -> dict[str, str]:
    """id -> its last column, of docs/faults.md."""
    text = (TESTS.parent / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| ([A-E]\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert [row for row, _ in rows] == IDS
    return dict(rows)


def names_of_tests() -> set[str]:
    sources = (file.read_text() for file in TESTS.glob("test_*.py"))
    return {name for source in sources for name in re.findall(r"^ *def (test_\w+)\(", source, re.MULTILINE)}


def test_every_fault_has_a_test_or_says_what_it_waits_for() -> None:
    existing = names_of_tests()
    for row, where in table().items():
        if not where.startswith("waits: "):
            named = re.fullmatch(r"`test_\w+`(, `test_\w+`)*", where)
            assert named and set(re.findall(r"test_\w+", where)) <= existing, f"{row}: {where}"


def test_every_test_that_names_a_fault_is_in_its_row() -> None:
    rows = table()
    for name in names_of_tests():
        ids = re.search(r"fault((?:_[a-e]\d+)+)", name)
        for row in ids[1].upper().split("_")[1:] if ids else ():
            assert f"`{name}`" in rows[row], f"{row} lacks {name}"


# ---- helpers


def grad_of_ones(layer: Layer) -> tuple[Tensor, dict[str, Tensor]]:
    fresh = layer.requires_grad()
    out = fresh.run()
    grads = torch.autograd.grad(out, fresh.differentiable.values(), torch.ones_like(out))
    return out.detach(), dict(zip(fresh.differentiable, grads, strict=True))


def assert_right(layer: Layer) -> None:
    """Output and gradients of the layer in float64 against the specification: no rounding can hide a fault."""
    doubled = layer.replaced(**{name: tensor.double() for name, tensor in layer.differentiable.items()})
    out, grads = grad_of_ones(doubled)
    wanted, leaves = exact(doubled)
    wanted_grads = torch.autograd.grad(wanted, leaves.values(), torch.ones_like(wanted))
    for name, got, right in zip(("output", *grads), (out, *grads.values()), (wanted, *wanted_grads), strict=True):
        assert (got - right).norm() <= 1e-12 * right.norm(), name


def ids_of(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows)


# ---- numerics


@pytest.mark.parametrize("dead", [0.0, 1e-40])
def test_a_dead_expert_leaves_other_tokens_alone_fault_a3(dead: float) -> None:
    ids = ids_of((0, 1), (2, 1), (3, 1), (0, 3), (2, 0))
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    weights[ids == 1] = 0.0
    layer = make_layer(t=5).replaced(topk_ids=ids, topk_weights=weights)
    scales = {name: layer.tensors[name].clone() for name in ("gate_up_global_scale", "down_global_scale")}
    for scale in scales.values():
        scale[1] = dead
    out, grads = grad_of_ones(layer.replaced(**scales))
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads.values())
    without, _ = grad_of_ones(layer.replaced(topk_ids=torch.where(ids == 1, -1, ids)))
    assert torch.equal(out, without)


@pytest.mark.parametrize("tokens", [1, 31, 33, 127, 129])
def test_result_is_independent_of_free_memory_fault_a4_b21(tokens: int, poison: Callable[[], None]) -> None:
    layer = make_layer(t=tokens, k=1, pattern="one_expert", dtype=torch.bfloat16)
    results = []
    for _ in range(2):
        results.append(grad_of_ones(layer))
        poison()
    (first, first_grads), (second, second_grads) = results
    assert torch.equal(first, second) and first.isfinite().all()
    assert all(torch.equal(first_grads[name], second_grads[name]) for name in first_grads)
    assert first.any(1).all(), "every row is written"


def test_width_that_is_no_multiple_of_a_tile_fault_a5(poison: object) -> None:
    assert_right(make_layer(t=3, e=2, h=32, i=5472))


@pytest.mark.parametrize("blocks", range(1, 10))
def test_every_number_of_blocks_with_many_rows_fault_a7(blocks: int) -> None:
    assert_right(make_layer(t=64, k=1, e=2, h=16 * blocks, i=16 * (10 - blocks), ranks=(2, 3)))


@pytest.mark.parametrize("compiled", [False, True])
def test_no_tokens_fault_a11_b14(compiled: bool) -> None:
    layer = make_layer(t=0, bias=True).requires_grad()
    run = torch.compile(layer.run, fullgraph=True, backend="aot_eager") if compiled else layer.run
    out = run()
    assert out.shape == (0, 32)
    out.sum().backward()
    for name, leaf in layer.differentiable.items():
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype and not leaf.grad.any(), name


@pytest.mark.parametrize("pattern", ["none", "one_expert"])
def test_experts_without_tokens_have_zero_gradients_fault_b5_b14(pattern: str, poison: object) -> None:
    layer = make_layer(t=9, k=1, e=5, pattern=pattern, bias=True)
    _, grads = grad_of_ones(layer)
    used = set(layer.topk_ids.unique().tolist()) - {-1}
    for name, grad in grads.items():
        if name not in ("x", "topk_weights"):
            for expert in set(range(5)) - used:
                assert not grad[expert].any(), f"{name} of expert {expert}"


def test_gate_and_up_keep_their_ratio_fault_a14() -> None:
    layer = make_layer(halves=2, ranks=(None, None))
    scale = torch.tensor([[1e-3, 2.14e-3]]).expand(5, 2)
    rows, _, offsets = OPS.moe_route(layer.topk_ids, 5)
    halves = layer.gate_up_codes[:, :16].repeat(1, 2, 1), layer.gate_up_scales[:, :16].repeat(1, 2, 1)
    pre, _ = OPS.grouped_lora_linear(layer.x, rows, offsets, *halves, scale, top_k=2)
    gate, up = pre.chunk(2, 1)
    torch.testing.assert_close(up, gate * 2.14, rtol=1e-6, atol=0)
    assert_right(layer.replaced(gate_up_global_scale=scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_zeros_fault_a26(dtype: torch.dtype) -> None:
    layer = make_layer(dtype=dtype)
    x = layer.x.clone()
    x[::2] = 0
    out, grads = grad_of_ones(layer.replaced(x=x))
    assert not out[::2].any() and out[1::2].any()
    assert all(grad.isfinite().all() for grad in grads.values())


# ---- offsets beyond 31 bits. Only the pages that are touched take memory.


def test_an_expert_beyond_2_31_bytes_fault_b1() -> None:
    layer = make_layer(e=2, ranks=(None, None))
    codes = layer.gate_up_codes
    far = torch.empty(2**31 + 2**20, dtype=torch.uint8).as_strided(codes.shape, (2**31, *codes.stride()[1:]))
    far.copy_(codes)
    out, grads = grad_of_ones(layer)
    far_out, far_grads = grad_of_ones(layer.replaced(gate_up_codes=far))
    assert torch.equal(far_out, out) and torch.equal(far_grads["x"], grads["x"])


@pytest.mark.parametrize("pattern", ["distinct", "one_expert"])
def test_a_token_beyond_2_31_elements_fault_b2_b4(pattern: str) -> None:
    layer = make_layer(t=5, dtype=torch.bfloat16, pattern=pattern)
    far = torch.empty(2**31 + 2**20, dtype=torch.bfloat16).as_strided(layer.x.shape, (2**29, 1))
    far.copy_(layer.x)
    assert far.stride(0) * 4 >= 2**31
    assert torch.equal(layer.replaced(x=far).run(), layer.run())


def test_sizes_beyond_2_31_elements_fault_b1_b2_b4() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    t, k, e, n, h, i = 134_980, 8, 512, 2048, 4096, 1024
    ids, weights = meta(t, k, dtype=torch.int64), meta(t, k)

    def packed(rows: int, columns: int) -> tuple[Tensor, ...]:
        codes = meta(e, rows, columns // 2, dtype=torch.uint8)
        return codes, meta(e, rows, columns // 16, dtype=torch.float8_e4m3fn), meta(e, 1, dtype=torch.float32)

    assert t * k * n > 2**31 and e * n * h > 2**31
    out = OPS.moe_lora(meta(t, h), ids, weights, *packed(n, h), *packed(h, i))
    assert out.shape == (t, h)
    pre, _ = OPS.grouped_lora_linear(
        meta(t, h), meta(t * k, dtype=torch.int32), meta(e, dtype=torch.int32), *packed(n, h), top_k=k
    )
    assert pre.shape == (t * k, n)


# ---- routing


@pytest.mark.parametrize("unrouted", [-1, 5, 2**31 - 1])
@pytest.mark.parametrize("weight", [0.0, torch.nan])
def test_an_unrouted_slot_has_no_gradient_fault_b8(unrouted: int, weight: float) -> None:
    ids = ids_of((0, unrouted), (2, unrouted), (unrouted, 3))
    weights = torch.where(ids == unrouted, weight, torch.tensor(0.5))
    layer = make_layer(t=3, bias=True).replaced(topk_ids=ids, topk_weights=weights)
    out, grads = grad_of_ones(layer)
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads.values())
    assert not grads["topk_weights"][ids == unrouted].any() and grads["topk_weights"][ids != unrouted].all()


@pytest.mark.parametrize("column", [0, 1])
def test_unrouted_slots_add_nothing_fault_b10(column: int, poison: Callable[[], None]) -> None:
    layer = make_layer(t=7, bias=True)
    ids = layer.topk_ids.clone()
    ids[1:3, column] = -1
    ids[4] = -1
    x = layer.x.clone()
    x[4] = torch.nan  # nothing reads a token that is routed nowhere
    layer.run()
    poison()
    out, grads = grad_of_ones(layer.replaced(topk_ids=ids, x=x))
    assert not out[4].any() and not grads["x"][4].any()
    assert all(grad.isfinite().all() for grad in grads.values())
    zeroed = torch.where(ids == -1, 0.0, layer.topk_weights)
    expected = layer.replaced(topk_weights=zeroed).run()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out[[0, 3, 5, 6]], layer.run()[[0, 3, 5, 6]], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ids", ["none routed", "beside a token of NaN"])
def test_an_unrouted_token_is_exactly_zero_fault_b10(ids: str, poison: object) -> None:
    """Also where the rows that a masked gather could land on hold NaN."""
    layer = make_layer(t=7, pattern="none", bias=True)
    if ids == "beside a token of NaN":
        layer.x[0] = torch.nan
        layer.topk_ids[0] = 0
    out, grads = grad_of_ones(layer)
    for result in (out, grads["x"], grads["topk_weights"]):
        assert torch.equal(result[1:], torch.zeros_like(result[1:]))


def test_sizes_that_kernels_pad_fault_b19() -> None:
    small = make_layer(t=3, k=2, e=1, ranks=(None, None), pattern="one_expert", dtype=torch.bfloat16)
    packed = {}
    for name, n in (("gate_up", 5760), ("down", 2880)):
        packed[f"{name}_codes"] = torch.full((1, n, 1440), 0x21, dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.ones(1, n, 180).to(torch.float8_e4m3fn)
        packed[f"{name}_global_scale"] = torch.ones(1, 1)
    layer = small.replaced(x=torch.ones(3, 2880, dtype=torch.bfloat16), **packed)
    with FakeTensorMode() as mode:
        names = [name for name, tensor in layer.tensors.items() if tensor is not None]
        fake = layer.replaced(**{name: mode.from_tensor(layer.tensors[name]) for name in names}).run()
    compiled = torch.compile(layer.run, fullgraph=True, backend="aot_eager")()
    for out in (layer.run(), compiled, fake):
        assert out.shape == (3, 2880) and out.stride() == (2880, 1)


@pytest.mark.parametrize("rows", [1, 127, 129, 255])
def test_every_row_is_written_fault_b21(rows: int, poison: Callable[[], None]) -> None:
    layer = make_layer(t=rows, k=1, e=3, pattern="repeated")
    order, _, offsets = OPS.moe_route(layer.topk_ids, 3)
    weight = [layer.tensors[f"gate_up_{part}"] for part in ("codes", "scales", "global_scale", "lora_a", "lora_b")]
    y, u = OPS.grouped_lora_linear(layer.x, order, offsets, *weight)
    gx, v = OPS.grouped_lora_dgrad(y, None, offsets, *weight)
    for result in (y, u, gx, v):
        assert result.shape[0] == rows and result.isfinite().all()


# ---- LoRA


@pytest.mark.parametrize("sizes", [{"h": 128, "i": 64}, {"h": 128, "i": 128}], ids=["2I=H", "I=H"])
def test_square_weights_are_not_transposed_fault_c1(sizes: dict[str, int]) -> None:
    assert_right(make_layer(t=4, e=3, **sizes))


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 12, 24, 48])
def test_every_rank_fault_c5(rank: int) -> None:
    assert_right(make_layer(ranks=(rank, rank), dtype=torch.bfloat16))


def test_each_expert_uses_its_own_factors_fault_c7() -> None:
    """Unsorted ids: the delta of expert e alone, on the rows of expert e alone."""
    ids = ids_of((3, 0), (1, 3), (0, 2), (2, 1), (3, 1))
    layer = make_layer(t=5, e=4, ranks=(4, 4)).replaced(topk_ids=ids)
    assert_right(layer)
    for e in range(4):
        b = layer.gate_up_lora_b.clone()
        b[e] = 0
        changed = (layer.replaced(gate_up_lora_b=b).run() != layer.run()).any(1)
        assert torch.equal(changed, (ids == e).any(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_sees_the_activation_itself_fault_c10(dtype: torch.dtype) -> None:
    """With W = 0 the delta is all there is: its error is that of the activation dtype at every magnitude of a token."""
    layer = make_layer(t=7, dtype=dtype)
    x = layer.x * torch.logspace(-3, 3, 7).unsqueeze(1).to(dtype)
    rows, _, offsets = OPS.moe_route(layer.topk_ids, 5)
    a, b = layer.gate_up_lora_a, layer.gate_up_lora_b
    zero = torch.zeros_like(layer.gate_up_codes)
    y, _ = OPS.grouped_lora_linear(
        x, rows, offsets, zero, layer.gate_up_scales, layer.gate_up_global_scale, a, b, scaling=1.0, top_k=2
    )
    experts = layer.topk_ids.flatten()[rows.long()]
    for row, e in enumerate(experts.tolist()):
        wanted = b[e].double() @ (a[e].double() @ x[int(rows[row]) // 2].double())
        assert (y[row].double() - wanted).norm() <= 8 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("lora_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_factors_of_any_dtype_fault_c12(dtype: torch.dtype, lora_dtype: torch.dtype) -> None:
    layer = make_layer(dtype=dtype, lora_dtype=lora_dtype)
    out, grads = grad_of_ones(layer)
    assert out.dtype == dtype
    assert all(grad.dtype == layer.tensors[name].dtype for name, grad in grads.items())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer.requires_grad().run()
    copies = [t for t in kept if t.shape == layer.x.shape and t.dtype != dtype]
    assert not copies, "no copy of x in another dtype"


def test_nothing_of_the_size_of_all_experts_is_made_fault_c17() -> None:
    """Neither the decoded weight nor b @ a of all experts, in any dtype, forward or backward."""
    e, h, i = 16, 128, 64
    layer = make_layer(t=8, k=2, e=e, h=h, i=i, ranks=(4, 4))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        grad_of_ones(layer)
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert 0 < largest < e * h * i * 2, "half of gate_up's [E, 2I, H] in bf16"


def test_dense_reference_is_not_the_kernels_own_decoder() -> None:
    """The oracle above decodes by table look-up in float64: one known byte, one known scale."""
    layer = make_layer(e=1, ranks=(None, None), halves=1)
    codes = torch.full_like(layer.gate_up_codes, 0x2F)  # low nibble 15 = -6, high nibble 2 = 1
    scales = torch.full(layer.gate_up_scales.shape, 0.5).to(torch.float8_e4m3fn)
    known = layer.replaced(gate_up_codes=codes, gate_up_scales=scales, gate_up_global_scale=torch.tensor([[4.0]]))
    assert torch.equal(dense(known, "gate_up")[0, 0, :2], torch.tensor([-12.0, 2.0], dtype=torch.float64))
