"""The rules of docs/format.md on quantising, value by value."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from format_bits import bits, same_bits, same_packed
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nvfp4 import format as fmt
from torch_nvfp4.format import decode, dequantize, fake_quantize, quantize, unpack

TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def codes_at_scale_one(values: list[float]) -> list[int]:
    """The codes of values under block scale 1 and global scale 1; a 6 in the block makes that scale 1."""
    codes = []
    for value in values:
        block = torch.tensor([value, 6.0] + [0.0] * 14)
        packed, scales, _ = quantize(block, 1.0)
        assert scales.float().item() == 1.0
        codes.append(int(unpack(packed)[0]))
    return codes


# Quantising to NVFP4


def test_n9_input_dtypes_are_converted_to_fp32_first() -> None:
    x = torch.randn(8, 64).bfloat16()
    assert same_packed(x, x.float()) and same_packed(x, x.double())
    h = torch.randn(8, 64).half()
    assert same_packed(h, h.float())
    between = torch.tensor([1 + 2.0**-30] * 16, dtype=torch.float64)
    assert same_packed(between, torch.ones(16))
    for dtype in (torch.int64, torch.uint8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(TypeError, match=f"x must be one of torch.float32, .*; given {dtype}"):
            quantize(torch.zeros(16).to(dtype))


def test_n10_computed_global_scale() -> None:
    x = torch.randn(3, 4, 32)
    _, _, g = quantize(x)
    assert g.shape == (1,) and g.dtype == torch.float32
    assert g.item() == (x.abs().max() / 2688).item()
    for empty_or_zero in (torch.zeros(2, 16), torch.zeros(0, 16), torch.full((1, 16), -0.0)):
        assert quantize(empty_or_zero)[2].tolist() == [1.0]


def test_n10_fault_a16_the_largest_magnitude_may_be_negative() -> None:
    x = -torch.rand(4, 32)
    x[0, 0], x[2, 7] = -100.0, 0.9
    codes, scales, g = quantize(x)
    assert g.item() == np.float32(100) / np.float32(2688)
    assert scales[0, 0].float().item() == 448 and int(unpack(codes)[0, 0]) == 0xF
    assert dequantize(codes, scales, g, torch.float32)[0, 0].item() == pytest.approx(-100, rel=2**-22)


@pytest.mark.parametrize("amax", [1e-37, 1e-40, 1e-42, 3e-43, 1e-45])
def test_n10_n19_subnormal_input(amax: float) -> None:
    x = torch.tensor([amax, -amax] + [0.0] * 14)
    codes, scales, g = quantize(x)
    values = dequantize(codes, scales, g, torch.float32)
    assert g.item() > 0 and values.isfinite().all() and not scales.float().isnan().any()
    assert not unpack(codes)[2:].any()
    if amax >= 1e-40:
        torch.testing.assert_close(values, x, rtol=0.05, atol=0)
    else:  # about 2688 * 2^-150, below which nothing can be kept
        assert (values - x).abs().max() < 1e-41
    assert (g.item() == 1.0) == (amax < 2688 * 2.0**-150)


def test_n11_a_given_global_scale_is_used_as_it_is() -> None:
    x = torch.randn(2, 32)
    given = torch.tensor([2.0**-9])
    codes, scales, used = quantize(x, given)
    assert same_bits((used, given)) and used.data_ptr() != given.data_ptr()
    assert same_bits(*zip(quantize(x, 2.0**-9)[:2], (codes, scales), strict=True))
    assert same_bits(*zip(quantize(x, given.double())[:2], (codes, scales), strict=True))
    assert dequantize(codes, scales, used, torch.float32).sub(x).abs().max() < 0.5
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="global_scale must be finite and not negative"):
            quantize(x, bad)


def test_n13_every_quotient_between_two_scales_rounds_to_even() -> None:
    table = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    sixth = torch.tensor(1 / 6)
    assert (6 * sixth).item() == 1.0  # so that the quotient is amax itself
    for low in range(1, 126):
        tie = np.float32((table[low] + table[low + 1]) / 2)
        even = low if low % 2 == 0 else low + 1
        for quotient, expected in (
            (np.nextafter(tie, np.float32(0)), low),
            (tie, even),
            (np.nextafter(tie, np.float32(999)), low + 1),
        ):
            scales, _ = fmt._nvfp4_scales(torch.tensor([quotient]), sixth)
            assert scales.view(torch.uint8).item() == expected


@pytest.mark.parametrize(
    ("given", "byte"),
    [(1 / quotient / 6, 0x7E) for quotient in (448, 464, 465, 1e9)] + [(1e-44, 0x7E), (1e9 / 6, 0x01)],
)
def test_n13_fault_a24_clamped_before_the_cast(given: float, byte: int) -> None:
    x = torch.zeros(16)
    x[0] = 1.0
    codes, scales, _ = quantize(x, given)
    assert scales.view(torch.uint8).tolist() == [byte]
    assert int(unpack(codes)[0]) == (7 if byte == 0x7E else 0)


class CastsToE4M3(TorchDispatchMode):
    """Keeps the largest magnitude that was cast to e4m3."""

    largest = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (kwargs or {}).get("dtype") is torch.float8_e4m3fn:
            self.largest = max(self.largest, args[0].abs().max().item())
        return func(*args, **kwargs or {})


def test_n13_fault_a24_no_cast_is_given_a_value_out_of_range() -> None:
    """Whether the cast alone gives 448 or NaN for these depends on version and device."""
    largest = torch.finfo(torch.float32).max
    for x in (torch.full((16,), largest), torch.tensor([largest] + [1e-38] * 15), torch.ones(16)):
        for given in (None, 1e-30, 1e-4):
            with CastsToE4M3() as casts:
                _, scales, _ = quantize(x, given)
            assert 440 < casts.largest <= 448 and scales.float().tolist() == [448.0]


@pytest.mark.parametrize("amax", [1.0, 0.05])
def test_n14_fault_a1_no_nan_scale_beside_a_zero_block(amax: float) -> None:
    x = torch.zeros(1, 32)
    x[0, 16] = amax
    codes, scales, g = quantize(x)
    assert scales.view(torch.uint8).tolist() == [[0x38, 0x7E]]
    values = dequantize(codes, scales, g, torch.float32)
    assert same_bits((values[0, :16], torch.zeros(16)))
    assert values[0, 16].item() == pytest.approx(amax, rel=2**-22)


@pytest.mark.parametrize("small", [5e-6, 4.36e-6, 2.18e-6, 1e-6])
def test_n14_fault_a18_a_small_block_is_kept(small: float) -> None:
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16], x[0, 17] = 1.0, small, -small
    codes, scales, g = quantize(x)
    assert scales.view(torch.uint8)[0].tolist() == [0x7E, 1, 0x38]
    values = dequantize(codes, scales, g, torch.float32)[0]
    assert values[16].item() == pytest.approx(small, rel=0.5) and values[17] == -values[16]
    assert not values[32:].any()


def test_n15_fault_a21_a_true_division() -> None:
    scale, value = 0.013671875, 0.02392577938735485
    block = torch.zeros(16)
    block[0], block[1] = 6 * scale, value  # the first element makes the block scale 0x07
    codes, scales, _ = quantize(block, 1.0)
    assert scales.view(torch.uint8).tolist() == [0x07]
    x, s = torch.tensor(value), torch.tensor(scale)
    assert (x / s).item() < 1.75 and (x * (1 / s)).item() == 1.75  # the reciprocal would land on the tie
    assert unpack(codes)[:2].tolist() == [7, 3]


def test_n16_every_boundary() -> None:
    for tie, code in TIES.items():
        below, above = (
            np.nextafter(np.float32(tie), np.float32(0)),
            np.nextafter(np.float32(tie), np.float32(9)),
        )
        lower = min(code, codes_at_scale_one([float(below)])[0])
        assert codes_at_scale_one([float(below), tie, float(above)]) == [lower, code, lower + 1]
        assert code % 2 == 0
        assert codes_at_scale_one([-float(below), -tie, -float(above)]) == [
            8 + lower,
            8 + code,
            8 + lower + 1,
        ]
    assert codes_at_scale_one(list(fmt.E2M1_VALUES[:8])) == list(range(8))


def test_n16_rounding_agrees_with_an_independent_cast() -> None:
    exponents = torch.arange(100, 131, dtype=torch.int32)  # 2^-27 to 8
    mantissas = torch.randint(0, 2**23, (31, 2000), dtype=torch.int32)
    mantissas[:, :16] = torch.arange(16, dtype=torch.int32) << 19  # what is exact, ties among it
    y = ((exponents.unsqueeze(-1) << 23) | mantissas).view(torch.float32).clamp(max=6).flatten()
    expected = y.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(fmt._round_to_e2m1(y).numpy(), expected)


def test_n17_saturates() -> None:
    x = torch.tensor([1e30, -1e30, 7.0, -7.0, float(torch.finfo(torch.float32).max)] + [0.0] * 11)
    codes, scales, _ = quantize(x, 2.0**-30)
    assert unpack(codes)[:5].tolist() == [7, 15, 7, 15, 7] and not unpack(codes)[5:].any()
    assert decode(codes, scales).abs().max() == 2688


def test_n18_signs_of_zero() -> None:
    tiny = torch.finfo(torch.float32).tiny
    x = torch.tensor([6.0, -0.0, 0.0, -1e-3, 1e-3, -tiny, tiny, -1e-45, 1e-45] + [-0.0] * 7)
    codes, _, _ = quantize(x)
    assert unpack(codes).tolist() == [7, 0, 0, 8, 0, 8, 0, 8, 0] + [0] * 7


@pytest.mark.parametrize("given", [0.0, 1e-45])
def test_n19_fault_a3_a_dead_global_scale_gives_zeros_not_nan(given: float) -> None:
    x = torch.tensor([[0.0] * 16, [3e-44, -3e-44] + [0.0] * 14, [1.0, -1.0] + [0.0] * 14])
    codes, scales, used = quantize(x, given)
    if given == 0.0:
        assert unpack(codes)[2].tolist() == [0, 8] + [0] * 14
    values = dequantize(codes, scales, used, torch.float32)
    assert values.isfinite().all() and values.abs().max() <= 2688 * used
    assert not scales.float().isnan().any()


def test_n19_fault_a3_a_dead_expert_leaves_the_others_alone() -> None:
    x_ENC = torch.randn(3, 4, 32)
    g = torch.tensor([[1e-3], [1e-40], [0.0]])
    codes, scales, _ = quantize(x_ENC, g)
    values = dequantize(codes, scales, g, torch.float32)
    assert values.isfinite().all() and not values[2].any()
    alone, alone_scales, _ = quantize(x_ENC[0], 1e-3)
    assert same_bits((codes[0], alone), (scales[0], alone_scales))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_n20_n21_n32_non_finite_values(format: str, bad: float) -> None:
    size = fmt.get_format(format).block_size
    x = torch.randn(4, 3 * size)
    clean = quantize(x, format=format)
    dirty = x.clone()
    dirty[1, size + 3] = bad
    with pytest.raises(ValueError, match="x must be finite in float32; 1 of 12 blocks have a NaN or infinity"):
        quantize(dirty, format=format)
    codes, scales, g = quantize(dirty, format=format, check_finite=False)
    assert scales.view(torch.uint8)[1, 1].item() == fmt.get_format(format).nan_byte
    assert not codes.view(4, 3, -1)[1, 1].any()
    others = torch.ones(4, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(codes.view(4, 3, -1)[others], clean[0].view(4, 3, -1)[others])
    assert torch.equal(bits(scales)[others], bits(clean[1])[others]) and torch.equal(g, clean[2])
    values = dequantize(codes, scales, g, torch.float32).view(4, 3, size)
    assert values[1, 1].isnan().all() and values[others].isfinite().all()
    assert fake_quantize(dirty, format=format, check_finite=False).isnan().sum() == size


def test_n20_n21_infinite_only_after_the_conversion() -> None:
    x = torch.ones(2, 16, dtype=torch.float64)
    x[0, 0] = 1e300
    with pytest.raises(ValueError, match="1 of 2 blocks"):
        quantize(x)
    _, scales, g = quantize(x, check_finite=False)
    assert bits(scales).tolist() == [[0x7F], [0x7E]] and g.item() == np.float32(1) / np.float32(2688)


def test_n21_the_finite_neighbours_of_a_nan_count_for_the_global_scale() -> None:
    x = torch.ones(2, 16)
    x[0, 0], x[0, 1] = float("nan"), 8.0
    assert quantize(x, check_finite=False)[2].item() == np.float32(8) / np.float32(2688)
    assert quantize(torch.full((16,), float("nan")), check_finite=False)[2].tolist() == [1.0]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_n22_fault_a8_a10_strides_do_not_matter(format: str) -> None:
    base = torch.randn(64, 128)
    views = {
        "columns": torch.randn(8, 256)[:, :128],
        "transposed": base.t(),
        "every other row": base[::2],
        "every other column": torch.randn(8, 256)[:, ::2],
        "expanded": torch.randn(1, 128).expand(6, 128),
        "expanded columns": torch.randn(6, 1).expand(6, 64),
        "permuted": torch.randn(64, 3, 5).permute(1, 2, 0),
        "negated": torch.randn(4, 64).neg(),
    }
    for name, view in views.items():
        results = quantize(view, format=format)
        assert all(result.is_contiguous() for result in results), name
        assert results[0].shape == (*view.shape[:-1], view.shape[-1] // 2), name
        assert same_packed(view, view.contiguous(), format), name
        assert same_bits((fake_quantize(view, format=format), fake_quantize(view.contiguous(), format=format))), name


def test_n22_fault_a10_reading_takes_any_strides_too() -> None:
    x_ENC = torch.randn(4, 6, 64)
    codes, scales, g = quantize(x_ENC)
    expected = dequantize(codes, scales, g)
    turned = dequantize(codes.transpose(0, 1), scales.transpose(0, 1), g)
    assert turned.is_contiguous() and same_bits((turned, expected.transpose(0, 1).contiguous()))
    strided_scales = scales.view(torch.uint8).repeat_interleave(2, dim=-1)[..., ::2].view(torch.float8_e4m3fn)
    assert same_bits((dequantize(codes, strided_scales, g), expected))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32), (0,)])
def test_n23_no_elements(format: str, shape: tuple[int, ...]) -> None:
    codes, scales, g = quantize(torch.zeros(shape), format=format)
    assert codes.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // fmt.get_format(format).block_size)
    assert g.tolist() == [1.0]
    assert dequantize(codes, scales, g).shape == shape and decode(codes, scales).shape == shape


# MXFP4


def e8m0_of(amax: float) -> int:
    x = torch.zeros(32)
    x[5] = -amax
    return int(quantize(x, format="mxfp4")[1].view(torch.uint8).item())


def test_n27_the_scale_is_the_floor_of_the_logarithm() -> None:
    for exponent in range(-124, 128):
        expected = exponent - 2 + 127
        assert e8m0_of(2.0**exponent) == expected
        assert e8m0_of(2.0**exponent * (2 - 2.0**-23)) == expected
    assert [e8m0_of(2.0**e) for e in (-125, -126, -130, -149)] == [0, 0, 0, 0]
    x = torch.tensor([7.99, 6.0, 5.0, 4.0, -7.5] + [0.0] * 27)
    codes, scales, _ = quantize(x, format="mxfp4")
    assert scales.float().item() == 1.0 and unpack(codes)[:5].tolist() == [7, 7, 6, 6, 15]


def test_n28_no_global_scale() -> None:
    x = torch.randn(2, 64)
    with pytest.raises(ValueError, match="mxfp4 has no global scale: global_scale must be None"):
        quantize(x, torch.ones(1), "mxfp4")
    codes, scales, g = quantize(x, format="mxfp4")
    assert g.tolist() == [1.0] and g.dtype == torch.float32
    with pytest.raises(ValueError, match="mxfp4 has no global scale: global_scale must be all ones"):
        dequantize(codes, scales, torch.tensor([2.0]))


def test_n29_zero_block_and_signs() -> None:
    x = torch.zeros(2, 32)
    x[1, ::2] = -0.0
    codes, scales, _ = quantize(x, format="mxfp4")
    assert scales.view(torch.uint8).tolist() == [[0], [0]]
    assert unpack(codes).tolist() == [[0] * 32, [8, 0] * 16]
    assert same_bits((dequantize(codes, scales, torch.ones(1), torch.float32), x))


def test_n30_the_divisor_is_never_subnormal() -> None:
    x = torch.tensor([2.0**-125, 2.0**-126, 2.0**-127] + [0.0] * 29)
    codes, scales, g = quantize(x, format="mxfp4")
    assert scales.view(torch.uint8).item() == 0 and unpack(codes)[:3].tolist() == [4, 2, 1]
    assert torch.equal(dequantize(codes, scales, g, torch.float32), x / 2)
    larger = x * 4  # 2^-123 has byte 2: divisor and scale are the same
    assert torch.equal(fake_quantize(larger, format="mxfp4"), larger)


# Fake quantisation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_n34_fake_quantize_is_both_steps(dtype: torch.dtype, format: str) -> None:
    x = torch.randn(4, 64).to(dtype).requires_grad_()
    y = fake_quantize(x, format=format)
    assert y.dtype == dtype and not y.requires_grad
    assert same_bits((y, dequantize(*quantize(x, format=format), dtype)))
    assert same_bits((fake_quantize(x, format=format), y))
    if format == "nvfp4":
        assert same_bits((fake_quantize(x, 0.01), dequantize(*quantize(x, 0.01), dtype)))


def test_n35_saturation_mask() -> None:
    g = 2.0**-10
    top = 2688 * g
    x = torch.tensor([top, -top, float(np.nextafter(np.float32(top), np.float32(9))), -2 * top] + [0.0] * 12)
    assert fmt.saturation_mask(x, g).tolist() == [False, False, True, True] + [False] * 12
    assert fake_quantize(x, g)[:4].tolist() == [top, -top, top, -top]
    assert not fmt.saturation_mask(x).any() and not fmt.saturation_mask(x * 1e6, None, "mxfp4").any()
    per_half = torch.tensor([[1.0, 2.0]])
    x_ENC = torch.full((1, 2, 16), 3000.0)
    assert fmt.saturation_mask(x_ENC, per_half)[0, :, 0].tolist() == [True, False]
    largest = torch.finfo(torch.float32).max
    assert not fmt.saturation_mask(torch.tensor([largest]), 1e36).any()


# No helper that builds a model may be caught out by where the tables live


def test_tables_are_real_when_a_model_is_built_on_meta() -> None:
    with torch.device("meta"):
        codes, scales, g = quantize(torch.ones(16, device="cpu"))
        values = dequantize(codes, scales, g)
    assert values.device.type == "cpu" and values.tolist() == [1.0] * 16


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_n10_n13_n15_n16_fault_a24_cuda_writes_the_same_bits(dtype: torch.dtype, format: str) -> None:
    for _ in range(40):  # a wrong last bit of the global scale shows in one tensor of five
        exponents = torch.randint(-30, 14, (256, 16))
        x = torch.randn(256, 256) * torch.exp2(exponents).repeat_interleave(16, dim=1)
        x[3], x[4, :32], x[5], x[7] = 0.0, -0.0, x[5] * 2.0**-100, x[7] * 1e-38
        x[6, :7] = torch.tensor(list(TIES))
        x = x.clamp(-6e4, 6e4).to(dtype)
        for given in (None,) if format == "mxfp4" else (None, 2.0**-12, 1e-44, 0.0):
            on_gpu = quantize(x.cuda(), given, format)
            assert same_bits(*((a, b.cpu()) for a, b in zip(quantize(x, given, format), on_gpu, strict=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_n7_n31_cuda_reads_the_same_bits(dtype: torch.dtype, format: str) -> None:
    size = fmt.get_format(format).block_size
    codes = torch.randint(0, 256, (256, 256), dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 512 // size)
    scales = scales.view(fmt.get_format(format).scale_dtype)
    g = torch.tensor([1.0 if format == "mxfp4" else 0.1])
    values = dequantize(codes, scales, g, dtype)
    on_gpu = dequantize(codes.cuda(), scales.cuda(), g.cuda(), dtype).cpu()
    assert torch.equal(values.isnan(), on_gpu.isnan())
    assert same_bits((values.nan_to_num(nan=3.0), on_gpu.nan_to_num(nan=3.0)))
