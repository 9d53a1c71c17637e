"""The rules of docs/format.md on what is stored, reading and swizzling.

The name of a test holds the ids of the rules that it checks, here and in the other test_format files.
"""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from format_bits import DOCS, same_bits
from torch import Tensor

from torch_nvfp4 import format as fmt
from torch_nvfp4.format import MXFP4, NVFP4, decode, dequantize, pack, quantize, unpack


def e4m3(*values: float) -> Tensor:
    return torch.tensor(values).to(torch.float8_e4m3fn)


def test_every_rule_has_a_test_and_every_test_a_rule() -> None:
    rules = re.findall(r"^- \*\*(N\d+)\.\*\*", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = [
        name
        for path in sorted(Path(__file__).parent.glob("test_format*.py"))
        for name in re.findall(r"^def (test_n\d\w*)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    claimed = {part.upper() for name in names for part in name.split("_") if re.fullmatch(r"n\d+", part)}
    assert rules == [f"N{i}" for i in range(1, len(rules) + 1)]
    assert claimed == set(rules)


# What is stored


def test_n1_low_nibble_is_the_even_column() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert pack(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    every_byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack(unpack(every_byte)), every_byte)
    assert torch.equal(unpack(pack(codes)), codes)


def test_n1_pack_and_unpack_refuse_other_input() -> None:
    with pytest.raises(TypeError, match="codes must be torch.uint8; given torch.int64"):
        pack(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"even C; given shape \[2, 3\]"):
        pack(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(TypeError, match="given torch.int8"):
        unpack(torch.zeros(4, dtype=torch.int8))


def test_n2_value_of_every_code() -> None:
    every_code = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert same_bits((torch.tensor(fmt.E2M1_VALUES), torch.from_numpy(every_code)))
    decoded = decode(pack(torch.arange(16, dtype=torch.uint8)), e4m3(1.0))
    assert same_bits((decoded, torch.from_numpy(every_code)))
    assert str(fmt.E2M1_VALUES[8]) == "-0.0"


def test_n3_the_dtype_of_the_scales_names_the_format() -> None:
    assert fmt.format_of(torch.float8_e4m3fn) is NVFP4 and NVFP4.block_size == 16
    assert fmt.format_of(torch.float8_e8m0fnu) is MXFP4 and MXFP4.block_size == 32
    assert [fmt.get_format(name).name for name in fmt.FORMATS] == ["nvfp4", "mxfp4"]
    with pytest.raises(ValueError, match="format must be one of 'nvfp4', 'mxfp4'; given 'fp4'"):
        fmt.get_format("fp4")
    with pytest.raises(TypeError, match=r"scales must be torch.float8_e4m3fn \(nvfp4\) or .*; given torch.uint8"):
        decode(torch.zeros(8, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize(("format", "columns"), [("nvfp4", 24), ("mxfp4", 48), ("nvfp4", 8)])
def test_n3_columns_must_be_a_multiple_of_the_block(format: str, columns: int) -> None:
    size = fmt.get_format(format).block_size
    message = rf"{format}: C of x \[..., C\] must be a multiple of B = {size}; given \[2, {columns}\]"
    with pytest.raises(ValueError, match=message):
        quantize(torch.zeros(2, columns), format=format)
    with pytest.raises(ValueError, match="must be a multiple of B"):
        quantize(torch.tensor(1.0), format=format)


def test_n3_codes_and_scales_must_agree() -> None:
    scales = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float8_e4m3fn)
    message = r"nvfp4: codes .* and scales .* must agree; given codes \[{}\] and scales \[2, 2\]"
    for shape in ((2, 8), (3, 16), (16,)):
        with pytest.raises(ValueError, match=message.format(", ".join(map(str, shape)))):
            decode(torch.zeros(shape, dtype=torch.uint8), scales)
    with pytest.raises(TypeError, match="codes must be torch.uint8; given torch.int8"):
        dequantize(torch.zeros(2, 16, dtype=torch.int8), scales, torch.ones(1))


def test_n4_fault_a13_a_global_scale_is_a_multiplier() -> None:
    x = torch.randn(4, 32) * 3
    codes, scales, multiplier = quantize(x)
    divisor = 1 / multiplier  # as compressed-tensors stores it
    assert multiplier.item() < 1 < divisor.item()
    values = dequantize(codes, scales, multiplier, torch.float32)
    assert (values - x).abs().max() < x.abs().max() / 5
    turned_over = dequantize(codes, scales, 1 / divisor, torch.float32)
    torch.testing.assert_close(turned_over, values, rtol=2**-22, atol=0)
    assert dequantize(codes, scales, divisor, torch.float32).abs().max() > 1e4 * x.abs().max()


def test_n5_shapes_of_a_global_scale() -> None:
    x_ENC = torch.randn(3, 4, 32)
    codes, scales, _ = quantize(x_ENC)
    unit = dequantize(codes, scales, torch.ones(()), torch.float32)
    assert torch.equal(unit, decode(codes, scales))
    per_half = torch.tensor([[1.0, 1, 2, 2], [4.0, 4, 8, 8], [16.0, 16, 32, 32]]).unsqueeze(-1)
    for g, expected in [
        (torch.tensor(2.0), unit * 2),
        (torch.tensor([2.0]), unit * 2),
        (torch.tensor([[1.0], [2.0], [4.0]]), unit * torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)),
        (torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]), unit * per_half),
    ]:
        assert torch.equal(dequantize(codes, scales, g, torch.float32), expected)
        # quantise takes the same shapes; 0x77 leaves signs out, as code 8 has become code 0
        again, again_scales, used = quantize(expected, g)
        assert same_bits((again & 0x77, codes & 0x77), (again_scales, scales), (used, g))


@pytest.mark.parametrize(
    ("g", "x"),
    [
        ((3,), (3, 4, 32)),
        ((3, 3), (3, 3, 32)),
        ((3, 2), (3, 5, 32)),
        ((2, 1), (3, 4, 32)),
        ((4, 1), (4, 32)),
    ],
)
def test_n5_other_shapes_of_a_global_scale_are_refused(g: tuple[int, ...], x: tuple[int, ...]) -> None:
    message = rf"global_scale must be .* given {re.escape(str(list(g)))} for {re.escape(str(list(x)))}"
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(x), torch.ones(g))
    codes, scales, _ = quantize(torch.ones(x))
    with pytest.raises(ValueError, match=message):
        dequantize(codes, scales, torch.ones(g))


# Reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_n6_n8_every_code_under_every_scale_byte_nvfp4(dtype: torch.dtype) -> None:
    scale_bytes = np.arange(256, dtype=np.uint8)
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exact = table * scale_bytes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, None]
    codes = pack(torch.arange(16, dtype=torch.uint8).expand(256, 16))
    scales = torch.from_numpy(scale_bytes).view(torch.float8_e4m3fn).view(256, 1)
    values = decode(codes, scales, dtype)
    assert values.dtype == dtype
    nan = np.isnan(exact)
    assert np.unique(np.nonzero(nan)[0]).tolist() == [0x7F, 0xFF] and nan.sum() == 32
    assert torch.equal(values.isnan(), torch.from_numpy(nan))
    finite = torch.from_numpy(~nan)
    assert same_bits((values.double()[finite], torch.from_numpy(exact)[finite]))  # exact in every dtype
    assert same_bits((dequantize(codes, scales, torch.ones(1), dtype)[finite], values[finite]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_n8_n31_n32_n33_every_code_under_every_scale_byte_mxfp4(dtype: torch.dtype) -> None:
    scale_bytes = torch.arange(256, dtype=torch.uint8)
    table = torch.tensor(fmt.E2M1_VALUES, dtype=torch.float64)
    exact = table * torch.exp2(scale_bytes.double() - 127).unsqueeze(-1)
    exact[255] = float("nan")
    # fp32 is where the product is formed, so magnitudes from 2^128 on are infinite in every dtype
    exact = torch.where(exact.abs() >= 2.0**128, exact.sign() * float("inf"), exact)
    codes = pack(torch.arange(16, dtype=torch.uint8).repeat(256, 2))
    scales = scale_bytes.view(torch.float8_e8m0fnu).view(256, 1)
    values = decode(codes, scales, dtype).double()
    assert torch.equal(values.isnan(), exact.isnan().repeat(1, 2)) and int(values.isnan().sum()) == 32
    assert same_bits((values[:255], exact[:255].repeat(1, 2)))
    assert values[0].abs().max() == 6 * 2.0**-127 and values[0, 1] == 2.0**-128
    assert values[254].isinf().sum() == 2 * 8  # magnitudes 2, 3, 4, 6 of both signs
    assert same_bits((dequantize(codes, scales, torch.ones(1), dtype).double()[:255], values[:255]))


def test_n31_byte_0_is_exact_where_subnormal_numbers_are_flushed() -> None:
    codes = pack(torch.arange(16, dtype=torch.uint8).repeat(4, 2))
    scales = torch.tensor([0, 1, 2, 127], dtype=torch.uint8).view(torch.float8_e8m0fnu).view(4, 1)
    for dtype in (torch.float32, torch.bfloat16):
        plain = decode(codes, scales, dtype)
        assert torch.set_flush_denormal(True)
        try:
            flushed = decode(codes, scales, dtype), dequantize(codes, scales, torch.ones(1), dtype)
            assert not bool((torch.tensor([2.0**-126]) * 0.5).item())  # the mode is on
        finally:
            torch.set_flush_denormal(False)
        assert same_bits((flushed[0], plain), (flushed[1], plain))
        assert plain[0, 1].item() == 2.0**-128


def test_n33_mxfp4_in_fp16_is_rounded_once() -> None:
    codes = pack(torch.arange(16, dtype=torch.uint8).repeat(256, 2))
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).view(256, 1)
    values = decode(codes, scales, torch.float16)
    assert same_bits((values[:255], decode(codes, scales, torch.float64).half()[:255]))
    assert torch.equal(values[100:140], decode(codes, scales, torch.float32)[100:140].half())


def test_n7_one_rounding_in_the_order_of_modelopt() -> None:
    codes, scales, _ = quantize(torch.randn(64, 64))
    g = torch.tensor([0.1])
    c, s = unpack(codes).view(-1, 16).long(), scales.float().view(-1, 1)
    value = torch.tensor(fmt.E2M1_VALUES)[c]
    ours = dequantize(codes, scales, g, torch.float32)
    assert same_bits((ours, (value * (s * g)).view(64, 64)))
    other_order = ((value * s) * g).view(64, 64)
    assert 0.01 < (ours != other_order).float().mean().item() < 0.3
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert same_bits((dequantize(codes, scales, g, dtype), ours.to(dtype)))
    assert dequantize(codes, scales, g).dtype == torch.bfloat16


# Scales for block-scaled MMA


def test_n36_position_of_every_scale() -> None:
    rows, cols = 130, 6
    scales = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    swizzled = fmt.swizzle_scales(scales).flatten()
    for r in range(rows):
        for k in range(cols):
            tile = (r // 128) * 2 + k // 4
            in_tile = 16 * (r % 128 % 32) + 4 * (r % 128 // 32) + k % 4
            assert swizzled[512 * tile + in_tile] == scales[r, k]


def test_n37_fault_a4_padding_is_zero(poison: object) -> None:
    for rows in (1, 31, 33, 127, 129):
        scales = torch.full((rows, 5), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        swizzled = fmt.swizzle_scales(scales).view(torch.uint8)
        assert int((swizzled == 0x38).sum()) == rows * 5
        assert int((swizzled == 0).sum()) == swizzled.numel() - rows * 5


def test_n38_unswizzle_refuses_a_wrong_size() -> None:
    swizzled = fmt.swizzle_scales(torch.zeros(130, 6, dtype=torch.uint8))
    assert swizzled.shape == (64, 32)
    with pytest.raises(ValueError, match=r"swizzled form of 120 x 6 scales is \[..., 32, 32\].*given \[64, 32\]"):
        fmt.unswizzle_scales(swizzled, 120, 6)
    for wrong in (torch.zeros(4, 4), torch.zeros(4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"scales must be \[..., R, K\], one byte each"):
            fmt.swizzle_scales(wrong)
