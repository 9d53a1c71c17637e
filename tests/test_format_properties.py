"""What holds for every tensor: scale invariance, idempotence, error bounds, round trips."""

import torch
from format_bits import bits, same_bits, same_packed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_nvfp4.format import (
    FORMATS,
    decode,
    dequantize,
    fake_quantize,
    get_format,
    pack,
    quantize,
    swizzle_scales,
    unpack,
    unswizzle_scales,
)

seeds = st.integers(0, 2**31 - 1)
formats = st.sampled_from(sorted(FORMATS))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@st.composite
def matrices(draw: st.DrawFn, columns: int = 96) -> Tensor:
    """Rows of very different magnitude, zero blocks, values on ties and repeated values."""
    generator = torch.Generator().manual_seed(draw(seeds))
    x = torch.randn(draw(st.integers(1, 4)), columns, generator=generator)
    exponents = torch.randint(-18, 5, (len(x), columns // 16), generator=generator)
    x *= torch.exp2(exponents).repeat_interleave(16, dim=1)
    if draw(st.booleans()):
        x[:, : draw(st.sampled_from([16, 32, 64]))] = draw(st.sampled_from([0.0, -0.0, 1.25, 2.5, -0.75]))
    if draw(st.booleans()):
        x = x.bfloat16().float()
    return x


@given(matrices(), st.integers(-60, 60))
def test_n24_scaling_by_a_power_of_two_moves_only_the_global_scale(x: Tensor, exponent: int) -> None:
    codes, scales, g = quantize(x)
    moved_codes, moved_scales, moved_g = quantize(x * 2.0**exponent)
    assert same_bits((moved_codes, codes), (moved_scales, scales))
    assert torch.equal(moved_g, g * 2.0**exponent) or not x.any()


@given(matrices(), st.integers(-30, 30))
def test_n27_scaling_by_a_power_of_two_moves_only_the_scales_of_mxfp4(x: Tensor, exponent: int) -> None:
    codes, scales, _ = quantize(x, format="mxfp4")
    moved_codes, moved_scales, _ = quantize(x * 2.0**exponent, format="mxfp4")
    not_zero = x.view(len(x), -1, 32).abs().amax(-1) > 0
    assert torch.equal(moved_codes, codes)
    assert torch.equal(bits(moved_scales)[not_zero].int(), bits(scales)[not_zero].int() + exponent)


@given(seeds)
def test_n24_fault_a22_a_small_tensor_keeps_its_precision(seed: int) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    small = 1e-6 * x

    def relative_error(x: Tensor) -> float:
        return float((fake_quantize(x) - x).norm() / x.norm())

    assert abs(relative_error(small) - relative_error(x)) < 0.005
    assert same_bits((fake_quantize(x * 2.0**-20), fake_quantize(x) * 2.0**-20))


@given(matrices(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_n25_quantising_again_changes_nothing(x: Tensor, dtype: torch.dtype) -> None:
    codes, scales, g = quantize(x)
    again, again_scales, _ = quantize(dequantize(codes, scales, g, dtype), g)
    kept = scales.float() >= 2.0**-7
    assert torch.equal(bits(again_scales)[kept], bits(scales)[kept])
    assert torch.equal((again & 0x77).view(len(x), -1, 8)[kept], (codes & 0x77).view(len(x), -1, 8)[kept])
    values = dequantize(again, again_scales, g, dtype).view(len(x), -1, 16)
    assert torch.equal(values[kept], dequantize(codes, scales, g, dtype).view(len(x), -1, 16)[kept])


@given(matrices(), dtypes)
def test_n26_error_of_a_block(x: Tensor, dtype: torch.dtype) -> None:
    x = x.to(dtype).float()
    codes, scales, g = quantize(x)
    error = (dequantize(codes, scales, g, torch.float64) - x.double()).abs().view(len(x), -1, 16).amax(-1)
    unit = scales.double() * g.double()
    normal = scales.float() >= 2.0**-6
    assert (error <= unit * (1 + 2.0**-20))[normal].all()
    assert (error <= 3 * unit * (1 + 2.0**-20)).all()
    amax = x.double().abs().view(len(x), -1, 16).amax(-1)
    assert (error <= amax * 0.18 + 1e-300)[normal].all()


@given(matrices())
def test_n27_error_of_an_mxfp4_block(x: Tensor) -> None:
    codes, scales, g = quantize(x, format="mxfp4")
    error = (dequantize(codes, scales, g, torch.float64) - x.double()).abs().view(len(x), -1, 32).amax(-1)
    amax = x.double().abs().view(len(x), -1, 32).amax(-1)
    assert (error <= amax / 4).all()  # 8 saturates to 6
    assert (amax < 8 * scales.double()).logical_or(amax == 0).all()


@given(st.lists(st.integers(1, 3), max_size=2), seeds, formats)
def test_n1_n6_packing_round_trips(lead: list[int], seed: int, format: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = get_format(format).block_size
    codes = torch.randint(0, 16, (*lead, 2 * size), dtype=torch.uint8, generator=generator)
    assert torch.equal(unpack(pack(codes)), codes)
    scales = torch.randint(100, 120, (*lead, 2), dtype=torch.uint8, generator=generator)
    scales = scales.view(get_format(format).scale_dtype)
    exact = decode(codes=pack(codes), scales=scales, dtype=torch.float64)
    assert torch.equal(decode(pack(codes), scales, torch.bfloat16).double(), exact)


@given(matrices(), formats, st.sampled_from(["rows", "columns"]))
def test_n22_a_slice_quantises_like_its_copy(x: Tensor, format: str, axis: str) -> None:
    wide = x.repeat(3, 1) if axis == "rows" else x.repeat(1, 2)
    view = wide[::2] if axis == "rows" else wide[:, 32:128]
    assert same_packed(view, view.clone(), format)


@given(matrices(), seeds)
def test_n5_experts_quantise_independently_under_given_global_scales(x: Tensor, seed: int) -> None:
    x_ENC = torch.stack([x, x.flip(0), x * 3])
    g_E1 = torch.rand(3, 1, generator=torch.Generator().manual_seed(seed)) * 1e-3
    codes, scales, _ = quantize(x_ENC, g_E1)
    for e in range(3):
        alone, alone_scales, _ = quantize(x_ENC[e], g_E1[e])
        assert same_bits((codes[e], alone), (scales[e], alone_scales))


@given(shapes, st.integers(0, 300), st.integers(0, 20), seeds)
def test_n36_n37_n38_swizzle_round_trips(lead: tuple[int, ...], rows: int, cols: int, seed: int) -> None:
    scales = torch.randint(
        1, 256, (*lead, rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    swizzled = swizzle_scales(scales)
    assert swizzled.shape == (*lead, 32 * -(-rows // 128), 16 * -(-cols // 4))
    assert torch.equal(unswizzle_scales(swizzled, rows, cols), scales)
    assert int((swizzled == 0).sum()) == swizzled.numel() - scales.numel()
    typed = scales.view(torch.float8_e4m3fn)
    assert same_bits((swizzle_scales(typed), swizzled.view(torch.float8_e4m3fn)))
