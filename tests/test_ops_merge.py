"""`merge_lora`, and the merge-aware layer that must multiply with exactly what it writes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import assert_same_bits
from strategies import Layer, make_layer
from torch import Tensor

from torch_nvfp4.format import FORMATS, dequantize, format_of, quantize

OPS = torch.ops.nvfp4
BF16, F32 = torch.bfloat16, torch.float32
PROJECTIONS = ("gate_up", "down")


def weight(layer: Layer, name: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(layer.tensors[f"{name}_{part}"] for part in ("codes", "scales", "global_scale"))


def factors(layer: Layer, name: str) -> tuple[Tensor, Tensor]:
    return layer.tensors[f"{name}_lora_a"], layer.tensors[f"{name}_lora_b"]


def merged(layer: Layer) -> Layer:
    """The layer with its adapters merged, and none left."""
    changed: dict[str, Tensor | None] = {}
    for name in PROJECTIONS:
        codes, scales = OPS.merge_lora(*weight(layer, name), *factors(layer, name), layer.options[f"{name}_scaling"])
        changed |= {f"{name}_codes": codes, f"{name}_scales": scales, f"{name}_lora_a": None, f"{name}_lora_b": None}
    return layer.replaced(**changed)


def numpy_delta(a: Tensor, b: Tensor, scaling: float) -> np.ndarray:
    """Element by element in numpy, whose fp32 operations round one by one."""
    a32, b32 = (np.where(abs(f := factor.to(BF16).float().numpy()) < 2.0**-63, 0, f) for factor in (a, b))
    total = np.zeros((b.shape[0], a.shape[1]), np.float32)
    for r in range(a.shape[0]):
        for n in range(b.shape[0]):
            total[n] = total[n] + b32[n, r] * a32[r]
    return np.float32(scaling) * total


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_a_factor_whose_product_could_overflow_is_infinite(fmt: str) -> None:
    """Else a fused sum could come back from where one of two roundings stays at infinity."""
    codes, scales, _ = quantize(torch.ones(1, 1, 32), None, fmt)
    a, b = torch.zeros(1, 2, 32), torch.full((1, 1, 2), 2.0**63)
    a[0, :, 0] = torch.tensor([-(2.0**63), 2.0**64])
    merged, merged_scales = OPS.merge_lora(codes, scales, torch.ones(1, 1), a, b, 2.0**-120)
    assert dequantize(merged, merged_scales, torch.ones(1, 1), F32)[0, 0, :16].isnan().all()
    a[0, 1, 0] = 2.0**64 - 2.0**56  # the bf16 below, whose products with its like are finite
    finite = OPS.merge_lora(codes, scales, torch.ones(1, 1), a, b, 2.0**-120)
    assert dequantize(*finite, torch.ones(1, 1), F32).isfinite().all()


@given(
    fmt=st.sampled_from(sorted(FORMATS)), seed=st.integers(0, 2**31), r=st.integers(1, 6),
    size=st.sampled_from((1e-6, 1e-2, 1.0)), scaling=st.sampled_from((1.0, 0.3, -2.0)),
    dtype=st.sampled_from((BF16, F32)),
)  # fmt: skip
def test_merged_bytes_are_those_of_numpy(
    fmt: str, seed: int, r: int, size: float, scaling: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    e, n, c = 2, 6, 64
    given_scale = torch.rand(e, 2) + 0.01 if fmt == "nvfp4" else None
    codes, scales, g = quantize(torch.randn(e, n, c) * 30, given_scale, fmt)
    g = g if fmt == "nvfp4" else torch.ones(e, 1)
    a, b = (torch.randn(e, r, c) * size).to(dtype), torch.randn(e, n, r).to(dtype)
    a[:, :, :32] *= torch.randint(0, 2, (e, 1, 1))  # blocks without a delta
    got = OPS.merge_lora(codes, scales, g, a, b, scaling)
    base = dequantize(codes, scales, g, F32)
    delta = torch.from_numpy(np.stack([numpy_delta(a[i], b[i], scaling) for i in range(e)]))
    fresh = quantize(torch.from_numpy(base.numpy() + delta.numpy()), given_scale, fmt)
    block = FORMATS[fmt].block_size
    for i in range(e):
        for row in range(n):
            for k in range(c // block):
                keeps = not delta[i, row, k * block : (k + 1) * block].any()
                source = (codes, scales) if keeps else fresh
                at = i, row, slice(k * block // 2, (k + 1) * block // 2)
                assert torch.equal(got[0][at], source[0][at])
                assert got[1].view(torch.uint8)[i, row, k] == source[1].view(torch.uint8)[i, row, k]


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_a_zero_delta_keeps_every_byte(fmt: str) -> None:
    """Of any weight, also of bytes that no quantiser writes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 4, 32), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (2, 4, 64 // FORMATS[fmt].block_size), dtype=torch.uint8, generator=generator)
    scales = scales.view(FORMATS[fmt].scale_dtype)
    assert format_of(scales.dtype) is FORMATS[fmt]
    a = torch.randn(2, 3, 64)
    for b, scaling in ((torch.zeros(2, 4, 3), 2.0), (torch.randn(2, 4, 3), 0.0)):
        assert_same_bits(OPS.merge_lora(codes, scales, torch.ones(2, 1), a, b, scaling), (codes, scales))


def test_a_small_delta_is_lost_in_four_bits_and_a_large_one_is_not_fault_c19() -> None:
    torch.manual_seed(0)
    codes, scales, g = quantize(torch.randn(1, 32, 64), torch.tensor([[0.01]]))
    base = dequantize(codes, scales, g, F32)
    kept = []
    for size in (1e-5, 1.0):
        a, b = torch.randn(1, 4, 64) * size, torch.randn(1, 32, 4)
        after = dequantize(*OPS.merge_lora(codes, scales, g, a, b, 1.0), g, F32)
        kept.append(float((after - base).norm() / (b @ a).norm()))
    assert kept[0] < 0.05 and 0.9 < kept[1] < 1.1


LAYERS = {
    "bf16": dict(dtype=BF16),
    "fp32, a half without tokens": dict(dtype=F32, pattern="one_expert", bias=True),
    "mxfp4": dict(dtype=BF16, fmt="mxfp4", h=64, i=32),
    "relu2, nothing routed": dict(dtype=F32, activation="relu2", pattern="none"),
}
each_layer = pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)


@each_layer
@pytest.mark.parametrize("compute", ["w4a16", "w4a4"])
def test_the_layer_multiplies_with_what_merging_writes(sizes: dict[str, object], compute: str) -> None:
    layer = make_layer(**dict(t=17, k=2, e=4, ranks=(3, 5)) | sizes)
    aware = OPS.moe_lora(*layer.args, **layer.options, compute=compute, merge_aware=True)
    assert_same_bits([aware], [OPS.moe_lora(*merged(layer).args, **layer.options, compute=compute)])


@each_layer
def test_gradients_are_straight_through(sizes: dict[str, object]) -> None:
    """x and the router see the merged weight; the factors see it as if rounding were not there."""
    layer = make_layer(**dict(t=17, k=2, e=4, ranks=(3, 5)) | sizes).requires_grad()
    out = OPS.moe_lora(*layer.args, **layer.options, merge_aware=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    names = list(layer.differentiable)
    got = dict(zip(names, torch.autograd.grad(out, list(layer.differentiable.values()), grad), strict=True))

    other = merged(layer)
    dense = {}  # the merged weight as a dense leaf: its gradient through b a is what the factors get
    for name in PROJECTIONS:
        codes, scales, g = weight(other, name)
        dense[name] = dequantize(codes, scales, g, torch.float64).requires_grad_()
    wanted = dense_gradients(layer, dense, grad)
    for name, expected in wanted.items():
        room = 40 * torch.finfo(out.dtype).eps * expected.norm() + 1e-30
        assert (got[name].double() - expected).norm() <= room, name


def dense_gradients(layer: Layer, dense: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    from torch_nvfp4.ops.reference import moe_lora

    x = layer.x.detach().double().requires_grad_()
    weights = layer.topk_weights.detach().double().requires_grad_()
    biases = {
        f"{n}_bias": None if (b := layer.tensors[f"{n}_bias"]) is None else b.detach().double() for n in PROJECTIONS
    }
    glu = {name: layer.options[name] for name in ("activation", "limit")}
    out = moe_lora(x, layer.topk_ids, weights, dense["gate_up"], dense["down"], **biases, **glu)
    leaves = [x, weights, dense["gate_up"], dense["down"]]
    if not out.requires_grad:
        gx, gw, gate_up, down = (torch.zeros_like(leaf) for leaf in leaves)
    else:
        gx, gw, gate_up, down = torch.autograd.grad(out, leaves, grad.double())
    result = {"x": gx, "topk_weights": gw}
    for name, of_weight in (("gate_up", gate_up), ("down", down)):
        a, b = (factor.detach().double() for factor in factors(layer, name))
        scaling = layer.options[f"{name}_scaling"]
        result[f"{name}_lora_a"] = scaling * b.transpose(1, 2) @ of_weight
        result[f"{name}_lora_b"] = scaling * of_weight @ a.transpose(1, 2)
    return result


def test_merge_aware_saves_nothing_more() -> None:
    layer = make_layer(t=17, k=2, e=4, ranks=(3, 5)).requires_grad()
    counts = []
    for merge_aware in (False, True):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.nbytes), t)[1], lambda t: t):  # noqa: B023
            OPS.moe_lora(*layer.args, **layer.options, merge_aware=merge_aware)
        counts.append(sum(saved))
    assert counts[0] == counts[1] > 0


def test_factors_are_taken_as_they_are_under_autocast() -> None:
    layer = make_layer(t=17, k=2, e=4, ranks=(3, 5), dtype=BF16)
    wanted = OPS.moe_lora(*layer.args, **layer.options, merge_aware=True)
    with torch.autocast("cpu", torch.float16):
        out = OPS.moe_lora(*layer.replaced(x=layer.x.float()).args, **layer.options, merge_aware=True)
        same = OPS.merge_lora(*weight(layer, "down"), *factors(layer, "down"), 2.0)
    assert out.dtype == torch.float16 and (out.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()
    assert_same_bits(same, OPS.merge_lora(*weight(layer, "down"), *factors(layer, "down"), 2.0))
