"""The CUDA kernels against the float64 specification: values, every gradient, hostile routing, strides and memory."""

from typing import Any

import oracle
import pytest
import torch
from cuda_layers import on_cuda, random_grad, run, without_sync
from hypothesis import given, settings
from hypothesis import strategies as st
from mxfp4_bytes import check_every_scale
from oracle import assert_as_close_as_plain, exact, plain
from strategies import ID_PATTERNS, STRIDES, Layer, make_layer, merges, packed_experts, strided
from torch import Tensor

from torch_nvfp4.format import dequantize
from torch_nvfp4.lowering import configs, merge, rows, scratch
from torch_nvfp4.ops import cpu, routing
from torch_nvfp4.ops.merge import merge_lora
from torch_nvfp4.ops.rows import quantize_rows
from torch_nvfp4.ops.validation import ACTIVATIONS, LIMITED_ACTIVATIONS

pytestmark = pytest.mark.gpu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Few sizes: each new one is a new kernel to compile. 96 and 32 leave a ragged last tile in every kernel.
SIZES = {"nvfp4": ((48, 16), (32, 16), (96, 160)), "mxfp4": ((32, 32), (96, 160))}


@st.composite
def cuda_layers(draw: st.DrawFn, dtype: torch.dtype, fmt: str, tokens: tuple[int, ...] = (0, 1, 2, 7, 40)) -> Layer:
    activation = draw(st.sampled_from(ACTIVATIONS))
    h, i = draw(st.sampled_from(SIZES[fmt]))
    rank = st.sampled_from((None, 1, 3, 5))
    # The slope jumps at the limit, and in half precision values round to its other side: no gradient to compare.
    limits = (None, 0.5) if dtype == F32 and activation in LIMITED_ACTIVATIONS else (None,)
    return make_layer(
        t=draw(st.sampled_from(tokens)), k=draw(st.sampled_from((1, 3))), e=draw(st.integers(1, 6)), h=h, i=i,
        ranks=(draw(rank), draw(rank)), activation=activation,
        limit=draw(st.sampled_from(limits)),
        dtype=dtype, lora_dtype=draw(st.sampled_from((F32, dtype))), weight_dtype=draw(st.sampled_from((F32, dtype))),
        id_dtype=draw(st.sampled_from((torch.int64, torch.int32, torch.int16))), bias=draw(st.booleans()),
        pattern=draw(st.sampled_from(ID_PATTERNS)), halves=draw(st.sampled_from((1, 2))), fmt=fmt,
        stride_of=lambda tensor: strided(tensor, draw(st.sampled_from(STRIDES))), seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


def check_against_float64(layer: Layer) -> None:
    cuda = on_cuda(layer)
    grad = random_grad(layer)
    cuda_grad = grad.cuda()
    got = without_sync(lambda: run(cuda, cuda_grad))
    got = {name: tensor.cpu() for name, tensor in got.items()}
    exact_out, exact_leaves = exact(layer)
    plain_out, plain_leaves = plain(layer)
    assert_as_close_as_plain("output", got["output"], plain_out, exact_out, layer.x.dtype)
    if not exact_out.requires_grad:
        assert all(not g.any() for name, g in got.items() if name != "output")
        return
    exact_grads, plain_grads = (
        grads_of(exact_out, exact_leaves, grad),
        grads_of(plain_out, plain_leaves, grad),
    )
    for name, wanted in exact_grads.items():
        assert got[name].dtype == layer.tensors[name].dtype and got[name].shape == layer.tensors[name].shape
        assert_as_close_as_plain(name, got[name], plain_grads[name], wanted, layer.x.dtype)


def grads_of(out: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype), allow_unused=True)
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, found, strict=True)}


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_output_and_every_gradient_match_float64(
    dtype: torch.dtype, fmt: str, poison: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == F32:  # of results of a few numbers, the plain layer gets some right by luck
        monkeypatch.setattr(oracle, "ROUNDINGS", 4.0)

    @settings(max_examples=15)
    @given(cuda_layers(dtype, fmt))
    def check(layer: Layer) -> None:
        check_against_float64(layer)

    check()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_scale_of_mxfp4(dtype: torch.dtype) -> None:
    check_every_scale(torch.ops.nvfp4, dtype, "cuda")


LARGER = {
    "several row tiles an expert, ranks over one tile": dict(t=300, k=2, e=3, h=256, i=192, ranks=(17, 33)),
    "the largest tile, odd numbers of blocks": dict(t=700, k=1, e=2, h=160, i=96, ranks=(256, 2), bias=True),
    "more experts than a power of two": dict(t=200, k=4, e=130, h=96, i=64, pattern="sentinel"),
    "rows of 2880": dict(t=33, k=2, e=2, h=2880, i=2880, bias=True, activation="swiglu_oai"),
}


@pytest.mark.parametrize("sizes", LARGER.values(), ids=LARGER)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_larger_tiles_match_float64(dtype: torch.dtype, sizes: dict[str, Any], poison: object) -> None:
    check_against_float64(make_layer(dtype=dtype, **sizes))


@pytest.mark.parametrize("activation", LIMITED_ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_output_under_a_limit_matches_float64(dtype: torch.dtype, activation: str) -> None:
    layer = make_layer(t=40, h=96, i=160, dtype=dtype, activation=activation, limit=0.5, bias=True)
    got = on_cuda(layer).run().cpu()
    assert_as_close_as_plain("output", got, plain(layer)[0], exact(layer)[0], dtype)


SLICED = {
    "ranges of experts": (2**22, dict(e=5, h=192, i=128)),
    "ranges of columns": (2**19, dict(e=2, h=256, i=512)),
    "one global scale, no LoRA": (2**19, dict(e=2, h=256, i=512, halves=1, ranks=(None, None))),
    "relu2, MXFP4": (2**20, dict(e=3, h=256, i=128, activation="relu2", fmt="mxfp4", dtype=BF16)),
}


@pytest.mark.parametrize(("scratch_bytes", "sizes"), SLICED.values(), ids=SLICED)
def test_slices_decoded_into_scratch_match_float64(
    scratch_bytes: int, sizes: dict[str, Any], poison: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "SCRATCH_ROWS_PER_EXPERT", 1)
    monkeypatch.setattr(scratch, "SCRATCH_BYTES", scratch_bytes)
    for seed in range(3):
        check_against_float64(make_layer(**dict(t=150, k=2, dtype=BF16, bias=True, seed=seed) | sizes))


@pytest.mark.parametrize("config", configs.LINEAR_CONFIGS, ids=str)
def test_every_linear_tile_is_right_at_a_real_width(
    config: configs.LinearConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At widths where every stage of the pipeline is used; a tile that raced here was taken out."""
    monkeypatch.setattr(configs, "linear_config", lambda *_: config)
    for c in (160, 192, 2048, 2880):
        codes, scales, global_scale = (t.cuda() for t in packed_experts(torch.Generator(), 2, 192, c, 2, "nvfp4"))
        x = torch.randn(1100, c, device="cuda", dtype=BF16)
        offsets = torch.tensor([500, 1100], dtype=torch.int32, device="cuda")
        y, _ = torch.ops.nvfp4.grouped_lora_linear(x, None, offsets, codes, scales, global_scale)
        weight = torch.ops.nvfp4.dequantize(codes, scales, global_scale, dtype=F32)
        wanted = torch.cat([x[:500].float() @ weight[0].t(), x[500:].float() @ weight[1].t()])
        assert (y.float() - wanted).norm() <= torch.finfo(BF16).eps * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("slots", [(0, 2), (1, 1), (300, 3), (512, 8), (4097, 1), (70_000, 8), (300_001, 8)], ids=str)
@pytest.mark.parametrize("experts", [1, 5, 128, 512])
def test_routing_is_the_plain_one_to_the_bit(slots: tuple[int, int], experts: int, dtype: torch.dtype) -> None:
    low, high = (0, min(experts + 3, 255)) if dtype == torch.uint8 else (-2, experts + 3)
    ids = torch.randint(low, high, slots, device="cuda").to(dtype)
    got = without_sync(lambda: torch.ops.nvfp4.moe_route(ids, experts))
    for tensor, wanted in zip(got, routing.moe_route(ids.cpu().long(), experts), strict=True):
        assert torch.equal(tensor.cpu(), wanted)


# --- 4-bit activations, and the merged weight ---


def check_against_cpu(layer: Layer) -> None:
    """As `check_against_float64`, for numbers that the CPU kernels specify: they in float64, and they in x's dtype."""
    grad = random_grad(layer)
    double = layer.replaced(**{name: tensor.double() for name, tensor in layer.differentiable.items()})
    got, plain_results, wanted = run(on_cuda(layer), grad.cuda()), run(layer, grad), run(double, grad.double())
    for name, exact_result in wanted.items():
        assert_as_close_as_plain(name, got[name].cpu(), plain_results[name], exact_result, layer.x.dtype)


def with_numbers(layer: Layer, **numbers: Any) -> Layer:
    return Layer(layer.tensors, {**layer.options, **numbers})


# Many values each: one that falls on the other side of a code's border is then one of many in both layers.
FOUR_BITS = {
    "ids of no expert, biases": dict(dtype=BF16, bias=True, pattern="sentinel"),
    "fp16, one global scale": dict(dtype=F16, halves=1, activation="gelu_tanh"),
    "LoRA above alone": dict(dtype=BF16, bias=True, ranks=(3, None)),
    "relu2, LoRA below alone": dict(dtype=BF16, activation="relu2", ranks=(None, 17)),
    "MXFP4, swiglu_oai": dict(dtype=BF16, fmt="mxfp4", activation="swiglu_oai", bias=True),
    "no LoRA": dict(dtype=BF16, ranks=(None, None)),
    "rows of 2880": dict(dtype=BF16, t=64, e=2, h=2880, i=2880, bias=True, activation="swiglu_oai"),
}


@pytest.mark.parametrize("merge_aware", [False, True], ids=["w4a4", "w4a4 merge-aware"])
@pytest.mark.parametrize("sizes", FOUR_BITS.values(), ids=FOUR_BITS)
def test_4_bit_activations_match_the_cpu(sizes: dict[str, Any], merge_aware: bool, poison: object) -> None:
    layer = make_layer(**dict(t=300, k=2, e=5, h=288, i=192) | sizes)
    check_against_cpu(with_numbers(layer, compute="w4a4", merge_aware=merge_aware))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_each_product_of_4_bit_rows_matches_the_cpu(
    dtype: torch.dtype, fmt: str, poison: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size: the rows are quantised from the same values here, so that no code differs."""
    if dtype == F32:
        monkeypatch.setattr(oracle, "ROUNDINGS", 4.0)

    @settings(max_examples=15)
    @given(cuda_layers(dtype, fmt))
    def check(layer: Layer) -> None:
        slots, _, offsets = routing.moe_route(layer.topk_ids, layer.gate_up_codes.shape[0])
        end, top_k = int(offsets[-1]), layer.topk_ids.shape[1]
        if not end:
            return
        names = ("codes", "scales", "global_scale", "lora_a", "lora_b")
        args = slots, offsets, *(layer.tensors[f"gate_up_{name}"] for name in names), layer.gate_up_bias
        options = dict(scaling=2.0, top_k=top_k, compute="w4a4")
        doubles = *args[:5], *(None if t is None else t.double() for t in args[5:])
        wanted = cpu.grouped_lora_linear(layer.x.double(), *doubles, **options)
        plain_result = cpu.grouped_lora_linear(layer.x, *args, **options)
        on_card = tuple(None if t is None else t.cuda() for t in (layer.x, *args))
        got = torch.ops.nvfp4.grouped_lora_linear(*on_card, **options)
        for name, g, p, w in zip(("y", "u"), got, plain_result, wanted, strict=True):
            if w.shape[1]:
                assert_as_close_as_plain(name, g[:end].cpu(), p[:end], w[:end], dtype)

    check()


@st.composite
def hostile_rows(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Values of every magnitude, ties, both zeros, and numbers that are not finite."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    m, c = draw(st.sampled_from(((1, 16), (9, 48), (70, 304), (33, 2880))))
    kind = draw(st.sampled_from(("bits", "spread", "ties", "zeros")))
    if kind == "bits":
        size = torch.empty(0, dtype=dtype).element_size()
        return torch.randint(0, 256, (m, c * size), generator=generator, dtype=torch.uint8).view(dtype)
    x = torch.randn(m, c, generator=generator)
    if kind == "spread":
        x = x * torch.exp2(torch.randint(-20, 20, (m, c), generator=generator).float())
    if kind == "ties":
        x = torch.randint(-24, 25, (m, c), generator=generator) * 0.25
    if kind == "zeros":
        x = x * torch.randint(-1, 2, (m, 1), generator=generator)
    return strided((x * 2.0 ** draw(st.integers(-140, 100))).to(dtype), draw(st.sampled_from(STRIDES)))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_the_bytes_of_4_bit_rows_are_the_cpus(dtype: torch.dtype) -> None:
    @settings(max_examples=50)
    @given(hostile_rows(dtype))
    def check(x: Tensor) -> None:
        codes, scales, scale = quantize_rows(x)
        got = rows.quantize_rows(x.cuda(), 0, None)
        assert got.scale is not None and got.block_scales is not None
        assert torch.equal(got.values.cpu(), codes) and torch.equal(got.scale.cpu(), scale)
        assert torch.equal(got.block_scales.cpu(), scales.view(torch.uint8))
        values = dequantize(codes, scales, torch.ones(()), dtype)
        plain_order = rows.quantize_rows(x.cuda(), x.shape[1], 0).values.cpu()
        assert torch.equal(plain_order.nan_to_num(nan=7.0), values.nan_to_num(nan=7.0))

    check()


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_an_activation_is_quantised_as_what_it_is_rounded_to(dtype: torch.dtype) -> None:
    m, c = 300, 768
    pre = torch.randn(m, 2 * c, device="cuda").to(dtype)
    slots = torch.randperm(m, device="cuda").to(torch.int32)
    offsets = torch.tensor([100, m], dtype=torch.int32, device="cuda")
    weights = torch.ones(m, device="cuda")
    got, h = rows.quantize_activation(pre, weights, slots, offsets, c, 0, None, "silu", None, need_h=True)
    assert h is not None and got.scale is not None and got.block_scales is not None
    codes, scales, scale = quantize_rows(h.cpu())
    assert torch.equal(got.values.cpu(), codes) and torch.equal(got.scale.cpu(), scale)
    assert torch.equal(got.block_scales.cpu(), scales.view(torch.uint8))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_the_bytes_of_a_merged_weight_are_the_cpus(fmt: str) -> None:
    @settings(max_examples=50)
    @given(merges(fmt), st.sampled_from((2.0, 0.3, 0.0)))
    def check(drawn: tuple[Tensor, ...], scaling: float) -> None:
        wanted = merge_lora(*drawn, scaling)
        got = torch.ops.nvfp4.merge_lora(*(tensor.cuda() for tensor in drawn), scaling)
        for g, w in zip(got, wanted, strict=True):
            assert g.dtype == w.dtype and torch.equal(g.cpu().view(torch.uint8), w.view(torch.uint8))

    check()


@pytest.mark.parametrize("compute", ["w4a16", "w4a4"])
@pytest.mark.parametrize(
    "sizes", [dict(dtype=BF16), dict(dtype=F32, bias=True), dict(dtype=BF16, fmt="mxfp4", pattern="minus_one")], ids=str
)
def test_a_merge_aware_layer_is_the_layer_of_the_merged_weights_to_the_bit(
    sizes: dict[str, Any], compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several slices of experts, the last of them smaller."""
    monkeypatch.setattr(merge, "SLICE_BYTES", 2 * 384 * 256 * 9 // 16)
    monkeypatch.setattr(configs, "SCRATCH_ROWS_PER_EXPERT", 2**31)
    layer = with_numbers(on_cuda(make_layer(**dict(t=300, k=2, e=5, h=256, i=192) | sizes)), compute=compute)
    merged: dict[str, Tensor | None] = {}
    for name, scaling in (("gate_up", 2.0), ("down", 0.5)):
        parts = (layer.tensors[f"{name}_{part}"] for part in ("codes", "scales", "global_scale", "lora_a", "lora_b"))
        merged[f"{name}_codes"], merged[f"{name}_scales"] = torch.ops.nvfp4.merge_lora(*parts, scaling)
        merged |= {f"{name}_lora_a": None, f"{name}_lora_b": None}
    grad = random_grad(layer)
    got, wanted = run(with_numbers(layer, merge_aware=True), grad), run(layer.replaced(**merged), grad)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name
    assert got["gate_up_lora_a"].any() and got["down_lora_b"].any()


@pytest.mark.parametrize("numbers", [dict(compute="w4a4"), dict(merge_aware=True)], ids=str)
def test_other_numbers_compile_to_the_same(numbers: dict[str, Any]) -> None:
    layer = on_cuda(make_layer(t=40, k=3, h=96, i=160, dtype=BF16, bias=True, pattern="minus_one"))
    layer, grad = with_numbers(layer, **numbers), random_grad(layer)
    fresh = layer.requires_grad()
    compiled = torch.compile(lambda *args: torch.ops.nvfp4.moe_lora(*args, **layer.options), fullgraph=True)
    out = compiled(*fresh.args)
    grads = torch.autograd.grad(out, list(fresh.differentiable.values()), grad)
    got = {"output": out.detach(), **dict(zip(fresh.differentiable, grads, strict=True))}
    for name, wanted in run(layer, grad).items():
        # The combine is Inductor's own kernel here; it may round its sum once more or less.
        error = (got[name].double() - wanted.double()).norm()
        assert error <= torch.finfo(BF16).eps * wanted.double().norm(), name


LARGE = dict(t=512, k=4, e=8, h=512, i=256, dtype=BF16, ranks=(16, 16))


def test_repeats_give_the_same_bits() -> None:
    layer = on_cuda(make_layer(**LARGE))
    grad = random_grad(layer)
    first = run(layer, grad)
    for _ in range(25):
        for name, tensor in run(layer, grad).items():
            assert torch.equal(tensor, first[name]), name


def test_permuting_tokens_permutes_results_to_the_bit_fault_c7() -> None:
    layer = on_cuda(make_layer(**LARGE))
    order = torch.randperm(512, device="cuda")
    permuted = layer.replaced(x=layer.x[order], topk_ids=layer.topk_ids[order], topk_weights=layer.topk_weights[order])
    grad = random_grad(layer)
    plain_result, permuted_result = run(layer, grad), run(permuted, grad[order])
    for name in ("output", "x", "topk_weights"):
        assert torch.equal(permuted_result[name], plain_result[name][order]), name


def test_a_dead_expert_changes_no_other_token_fault_a3() -> None:
    layer = on_cuda(make_layer(**LARGE | dict(pattern="repeated")))
    scale = layer.gate_up_global_scale.clone()
    scale[0, 0], scale[0, 1] = 1e-40, 0.0
    scale[1, 0], scale[1, 1] = 0.0, 1e-40
    dead = layer.replaced(gate_up_global_scale=scale)
    grad = random_grad(layer)
    got, wanted = run(dead, grad), run(layer, grad)
    assert all(torch.isfinite(tensor).all() for tensor in got.values())
    untouched = ~((layer.topk_ids == 0) | (layer.topk_ids == 1)).any(1)
    assert untouched.any()
    for name in ("output", "x"):
        assert torch.equal(got[name][untouched], wanted[name][untouched]), name


def test_offsets_beyond_31_bits_fault_b1_b2() -> None:
    """E·N·C/2 > 2^31 bytes of codes and M·N > 2^31 outputs; the last expert and the last rows are the ones compared."""
    e, n, c, m = 300, 4096, 4096, 600_000
    codes = torch.randint(0, 256, (e, n, c // 2), dtype=torch.uint8, device="cuda")
    scales = torch.full((e, n, c // 16), 56, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scale = torch.full((e, 1), 1e-2, device="cuda")
    x = torch.randn(m, c, device="cuda", dtype=BF16)
    offsets = torch.full((e,), m - 64, dtype=torch.int32, device="cuda")
    offsets[-1] = m
    offsets[:-1] = torch.arange(1, e, device="cuda") * ((m - 64) // (e - 1))
    offsets[-2] = m - 64
    y, _ = torch.ops.nvfp4.grouped_lora_linear(x, None, offsets, codes, scales, scale)
    small = torch.tensor([64], dtype=torch.int32, device="cuda")
    wanted, _ = torch.ops.nvfp4.grouped_lora_linear(x[-64:], None, small, codes[-1:], scales[-1:], scale[-1:])
    torch.testing.assert_close(y[-64:], wanted, rtol=2e-2, atol=1e-2)
    gx, _ = torch.ops.nvfp4.grouped_lora_dgrad(y, None, offsets, codes, scales, scale)
    wanted, _ = torch.ops.nvfp4.grouped_lora_dgrad(y[-64:], None, small, codes[-1:], scales[-1:], scale[-1:])
    torch.testing.assert_close(gx[-64:], wanted, rtol=2e-2, atol=5e-1)
