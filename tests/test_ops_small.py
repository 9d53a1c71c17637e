"""The small ops one by one: routing against the specification, products against float64 formulas, row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense
from strategies import ID_PATTERNS, STRIDES, Layer, make_layer, strided, topk_ids
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torch_nvfp4 import format as formats
from torch_nvfp4.ops import reference
from torch_nvfp4.ops.validation import ACTIVATIONS, LIMITED_ACTIVATIONS, is_gated

OPS = torch.ops.nvfp4
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def assert_near(got: Tensor, wanted: Tensor, terms: int, computed: torch.dtype | None = None) -> None:
    """Equal up to the rounding of a sum of `terms` fp32 products (fp64 for fp64) and one rounding to got's dtype."""
    inner = 2.0**-52 if (computed or got.dtype) == torch.float64 else 2.0**-23
    allowed = torch.finfo(got.dtype).eps + 4 * terms**0.5 * inner
    assert got.isfinite().all()
    error, norm = (got.double() - wanted).norm(), wanted.norm()
    assert error <= allowed * norm, f"error {error:.3e}, allowed {allowed * norm:.3e}"


@st.composite
def routed_layers(draw: st.DrawFn) -> tuple[Layer, Tensor, Tensor]:
    """A layer with LoRA and bias, its rows and its offsets."""
    activation = draw(st.sampled_from(ACTIVATIONS))
    rank = draw(st.sampled_from((1, 2, 4, 8, 12, 24, 48)))
    layer = make_layer(
        t=draw(st.sampled_from((1, 2, 7, 17))),
        k=draw(st.integers(1, 3)),
        e=draw(st.integers(1, 5)),
        h=draw(st.sampled_from((32, 48, 80))),
        i=draw(st.sampled_from((16, 32, 48))),
        ranks=(rank, rank),
        activation=activation,
        limit=draw(st.sampled_from((None, 0.5))) if activation in LIMITED_ACTIVATIONS else None,
        dtype=draw(st.sampled_from(DTYPES)),
        bias=True,
        pattern=draw(st.sampled_from(ID_PATTERNS)),
        stride_of=lambda tensor: strided(tensor, draw(st.sampled_from(STRIDES))),
        seed=draw(st.integers(0, 2**31)),
    )
    rows, _, offsets = OPS.moe_route(layer.topk_ids, layer.gate_up_codes.shape[0])
    return layer, rows, offsets


def weight(layer: Layer, name: str) -> list[Tensor]:
    return [layer.tensors[f"{name}_{part}"] for part in ("codes", "scales", "global_scale", "lora_a", "lora_b")]


def factors(layer: Layer, name: str) -> tuple[Tensor, Tensor]:
    return layer.tensors[f"{name}_lora_a"].double(), layer.tensors[f"{name}_lora_b"].double()


def owned_rows(offsets: Tensor) -> list[tuple[int, int]]:
    """(row, expert) of every routed row."""
    ends = offsets.tolist()
    return [(row, reference.expert_of_row(row, ends)) for row in range(ends[-1])]


def random_like(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(dtype)


# ---- routing


@given(
    t=st.integers(0, 9), k=st.integers(1, 4), e=st.integers(1, 6),
    pattern=st.sampled_from(ID_PATTERNS), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_moe_route_is_the_specification_fault_b12(t: int, k: int, e: int, pattern: str, seed: int) -> None:
    ids = topk_ids(torch.Generator().manual_seed(seed), t, k, e, pattern)
    rows, inverse, offsets = OPS.moe_route(ids, e)
    assert (rows.tolist(), inverse.tolist(), offsets.tolist()) == reference.moe_route(ids, e)
    assert sorted(rows.tolist()) == list(range(t * k))
    assert offsets[-1] == ((ids >= 0) & (ids < e)).sum()
    assert {r.dtype for r in (rows, inverse, offsets)} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_extreme_ids_are_not_routed_fault_b12(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    ids = torch.tensor([[limits.min, 0], [2, limits.max], [1, -1]], dtype=dtype)
    rows, inverse, offsets = OPS.moe_route(ids, 3)
    assert offsets.tolist() == [1, 2, 3] and inverse.tolist() == [-1, 0, 2, -1, 1, -1]
    assert rows.tolist()[:3] == [1, 4, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_more_experts_than_a_narrow_id_can_name(dtype: torch.dtype) -> None:
    ids = torch.tensor([[5, 127], [0, 5]], dtype=dtype)
    rows, inverse, offsets = OPS.moe_route(ids, 300)
    assert rows.tolist() == [2, 0, 3, 1] and offsets[-1] == 4 and offsets[126] == 3 and offsets[127] == 4


def test_uint8_255_is_an_expert_where_there_are_256() -> None:
    ids = torch.tensor([[255, 0]], dtype=torch.uint8)
    assert OPS.moe_route(ids, 256)[1].tolist() == [1, 0]
    assert OPS.moe_route(ids, 255)[1].tolist() == [-1, 0]


# ---- formats


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_dequantize_and_fake_quantize_are_those_of_format(format: str, dtype: torch.dtype) -> None:
    x = random_like(6, 64, dtype)
    packed = OPS.quantize(x, format=format)
    for got, wanted in zip(packed, formats.quantize(x, format=format), strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(OPS.dequantize(*packed, dtype=dtype), formats.dequantize(*packed, dtype))
    assert torch.equal(OPS.fake_quantize(x, format=format), formats.dequantize(*packed, dtype))


def test_fake_quantize_passes_the_gradient_straight_but_where_it_saturates() -> None:
    x = torch.tensor([[-900.0, -3.0, 0.0, 0.2, 2688.0, 2689.0, 9000.0, 1.0] * 2], requires_grad=True)
    grad = torch.arange(1.0, 17.0).view(1, 16)
    OPS.fake_quantize(x, torch.tensor(1.0)).backward(grad)
    assert torch.equal(x.grad, torch.where(x.abs() > 2688, 0, grad))
    x.grad = None
    OPS.fake_quantize(x).backward(grad)
    assert torch.equal(x.grad, grad)


# ---- products


@given(routed_layers())
def test_grouped_lora_linear_row_by_row_fault_c5(case: tuple[Layer, Tensor, Tensor]) -> None:
    layer, rows, offsets = case
    k, scaling = layer.topk_ids.shape[1], 2.0
    y, u = OPS.grouped_lora_linear(
        layer.x, rows, offsets, *weight(layer, "gate_up"), layer.gate_up_bias, scaling=scaling, top_k=k
    )
    routed = owned_rows(offsets)
    if not routed:
        return
    (a, b), w = factors(layer, "gate_up"), dense(layer, "gate_up")
    tokens = [layer.x[int(rows[row]) // k].double() for row, _ in routed]
    wanted_u = torch.stack([scaling * (a[e] @ x) for x, (_, e) in zip(tokens, routed, strict=True)])
    wanted = [
        reference.project(x, w[e], a[e], b[e], layer.gate_up_bias[e].double(), scaling)
        for x, (_, e) in zip(tokens, routed, strict=True)
    ]
    assert_near(u[: len(routed)], wanted_u, a.shape[2])
    assert_near(y[: len(routed)], torch.stack(wanted), 4 * a.shape[2])


@given(routed_layers(), st.booleans())
def test_grouped_lora_dgrad_row_by_row(case: tuple[Layer, Tensor, Tensor], gather: bool) -> None:
    layer, rows, offsets = case
    t, k = layer.topk_ids.shape
    gy = random_like(t if gather else t * k, layer.down_codes.shape[1], layer.x.dtype)
    gathered = dict(top_k=k) if gather else {}
    gx, v = OPS.grouped_lora_dgrad(
        gy, rows if gather else None, offsets, *weight(layer, "down"), scaling=0.5, **gathered
    )
    only_v = OPS.grouped_lora_dgrad(
        gy, rows if gather else None, offsets, *weight(layer, "down"), scaling=0.5, need_gx=False, **gathered
    )
    routed = owned_rows(offsets)
    assert only_v[0].shape == (0, gx.shape[1]) and torch.equal(only_v[1][: len(routed)], v[: len(routed)])
    from_v, no_v = OPS.grouped_lora_dgrad(
        gy, rows if gather else None, offsets, *weight(layer, "down"), v, scaling=0.5, **gathered
    )
    assert no_v.shape == (0, v.shape[1]) and torch.equal(from_v[: len(routed)], gx[: len(routed)])
    if not routed:
        return
    (a, b), w = factors(layer, "down"), dense(layer, "down")
    gradients = [gy[int(rows[row]) // k if gather else row].double() for row, _ in routed]
    wanted_v = [0.5 * (g @ b[e]) for g, (_, e) in zip(gradients, routed, strict=True)]
    wanted = [g @ w[e] + v_m @ a[e] for g, v_m, (_, e) in zip(gradients, wanted_v, routed, strict=True)]
    assert_near(v[: len(routed)], torch.stack(wanted_v), b.shape[1])
    assert_near(gx[: len(routed)], torch.stack(wanted), 4 * b.shape[1])


@given(case=routed_layers(), out_dtype=st.sampled_from(DTYPES))
def test_grouped_lora_wgrad_is_zero_without_rows_fault_b5_b6(
    case: tuple[Layer, Tensor, Tensor], out_dtype: torch.dtype, poison: object
) -> None:
    layer, rows, offsets = case
    t, k = layer.topk_ids.shape
    p = random_like(t * k, 5, layer.x.dtype)
    got = OPS.grouped_lora_wgrad(p, None, layer.x, rows, offsets, dtype=out_dtype, top_k=k)
    wanted = torch.zeros(got.shape, dtype=torch.float64)
    for row, e in owned_rows(offsets):
        wanted[e] += torch.outer(p[row].double(), layer.x[int(rows[row]) // k].double())
    assert got.dtype == out_dtype
    counts = offsets.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert not got[counts == 0].any(), "exactly 0, not merely small"
    assert_near(got, wanted, t * k, computed=layer.x.dtype)


@given(routed_layers())
def test_glu_grouped_lora_linear_row_by_row(case: tuple[Layer, Tensor, Tensor]) -> None:
    layer, rows, offsets = case
    activation = dict(activation=layer.options["activation"], limit=layer.options["limit"])
    pre = random_like(rows.shape[0], layer.gate_up_codes.shape[1], layer.x.dtype)
    y, u = OPS.glu_grouped_lora_linear(
        pre, layer.topk_weights, rows, offsets, *weight(layer, "down"), layer.down_bias, scaling=0.5, **activation
    )
    (a, b), w = factors(layer, "down"), dense(layer, "down")
    router = layer.topk_weights.double().flatten()
    wanted, wanted_u = [], []
    for row, e in owned_rows(offsets):
        h = reference.activate(pre[row].double(), **activation) * router[int(rows[row])]
        h = h.to(pre.dtype).double()  # a tensor of its own in the activation dtype, as the layer documents
        wanted_u.append(0.5 * (a[e] @ h))
        bias = layer.down_bias[e].double() * router[int(rows[row])]
        wanted.append(reference.project(h, w[e], a[e], b[e], bias, 0.5))
    if wanted:
        assert_near(u[: len(wanted)], torch.stack(wanted_u), 64 * a.shape[2])
        assert_near(y[: len(wanted)], torch.stack(wanted), 64 * a.shape[2])


@given(routed_layers())
def test_glu_backward_is_torchs_own_derivative(case: tuple[Layer, Tensor, Tensor]) -> None:
    layer, rows, offsets = case
    t, k = layer.topk_ids.shape
    activation = dict(activation=layer.options["activation"], limit=layer.options["limit"])
    m, i = rows.shape[0], layer.down_codes.shape[2] * 2
    pre = random_like(m, layer.gate_up_codes.shape[1], layer.x.dtype)
    gh = random_like(m, i, layer.x.dtype)
    gy = random_like(t, layer.down_codes.shape[1], layer.x.dtype)
    gpre, h, gw, v = OPS.glu_backward(
        pre, layer.topk_weights, gh, rows, offsets, gy, rows, layer.down_bias, layer.gate_up_lora_b, scaling=2.0,
        **activation,
    )  # fmt: skip
    leaf_pre = pre.double().requires_grad_()
    leaf_w = layer.topk_weights.detach().double().requires_grad_()
    routed = owned_rows(offsets)
    if not routed:
        assert not gw.any()
        return
    wanted_h = torch.stack([
        reference.activate(leaf_pre[row], **activation) * leaf_w.flatten()[int(rows[row])] for row, _ in routed
    ])  # fmt: skip
    bias = sum(
        leaf_w.flatten()[int(rows[row])] * (gy[int(rows[row]) // k].double() @ layer.down_bias[e].double())
        for row, e in routed
    )
    total = (wanted_h * gh[: len(routed)].double()).sum() + bias
    wanted_gpre, wanted_gw = torch.autograd.grad(total, (leaf_pre, leaf_w))
    assert_near(h[: len(routed)], wanted_h.detach(), 64)
    assert_near(gpre[: len(routed)], wanted_gpre[: len(routed)], 64)
    assert_near(gw, wanted_gw, 64 * i)
    b = layer.gate_up_lora_b.double()
    wanted_v = [2.0 * (gpre[row].double() @ b[e]) for row, e in routed]  # of gpre as it is rounded
    assert_near(v[: len(routed)], torch.stack(wanted_v), b.shape[1])
    unrouted = rows[len(routed) :].long()
    assert not gw.flatten()[unrouted].any()


def test_what_is_not_needed_has_no_rows() -> None:
    layer = make_layer(bias=True)
    rows, _, offsets = OPS.moe_route(layer.topk_ids, 5)
    pre, gh = random_like(14, 32, torch.float32), random_like(14, 16, torch.float32)
    every = OPS.glu_backward(pre, layer.topk_weights, gh, rows, offsets)
    for name, at in (("need_gpre", 0), ("need_h", 1), ("need_gw", 2)):
        some = OPS.glu_backward(pre, layer.topk_weights, gh, rows, offsets, **{name: False})
        assert some[at].shape == (0, every[at].shape[1])
        for other in {0, 1, 2} - {at}:
            assert torch.equal(some[other], every[other])


# ---- FLOPs


def test_flop_formulas_count_two_per_multiply_add() -> None:
    t, k, h, i, r_up, r_down = 7, 2, 32, 16, 3, 4
    m, n = t * k, 2 * i
    layer = make_layer(t=t, k=k, h=h, i=i, ranks=(r_up, r_down)).requires_grad()
    with FlopCounterMode(display=False) as counter:
        out = layer.run()
        forward = counter.get_total_flops()
        out.sum().backward()
    assert is_gated(layer.options["activation"])
    up, down = n * h + r_up * (n + h), h * i + r_down * (h + i)
    assert forward == 2 * m * (up + down)
    factors = 2 * m * (r_up * n + r_up * h + r_down * h + r_down * i)  # dA and dB of both projections
    assert counter.get_total_flops() == forward + 2 * m * (up + down) + factors
    by_op = counter.get_flop_counts()["Global"]
    assert {op.__name__.split(".")[0]: flops for op, flops in by_op.items()} == {
        "grouped_lora_linear": 2 * m * up,
        "glu_grouped_lora_linear": 2 * m * down,
        "glu_backward": 2 * m * r_up * n,
        "grouped_lora_dgrad": 2 * m * (up + down - r_up * n),
        "grouped_lora_wgrad": factors,
    }
