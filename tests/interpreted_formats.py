"""Runs the CUDA kernels of quantise, fake-quantise and dequantise under Triton's interpreter, against `format.py`.

A program of its own, like `interpreted_kernels.py`, whose mended interpreter it uses. The interpreter divides exactly
whatever the kernel asks for: that the division is exact on a GPU too is asserted on PTX (`test_kernels_aot.py`).
"""

from interpreted_kernels import use_cpu_tensors  # isort: skip  (it chooses the interpreter)

import warnings

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import STRIDES, VALUE_KINDS, hostile_values, merges, strided
from torch import Tensor

from torch_nvfp4 import format as formats
from torch_nvfp4.format import FORMATS
from torch_nvfp4.lowering import merge, pack, rows
from torch_nvfp4.lowering.kernels import shrink
from torch_nvfp4.ops.merge import merge_lora
from torch_nvfp4.ops.rows import quantize_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_values(got: Tensor, wanted: Tensor) -> bool:
    """The same bits; any NaN is as good as another."""
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    numbers = ~wanted.isnan() if wanted.dtype in DTYPES else torch.ones(wanted.shape, dtype=torch.bool)
    bits = BITS[wanted.element_size()]
    same_nan = wanted.dtype not in DTYPES or torch.equal(got.isnan(), wanted.isnan())
    return same_nan and torch.equal(got.view(bits)[numbers], wanted.view(bits)[numbers])


@st.composite
def inputs(draw: st.DrawFn, dtype: torch.dtype, fmt: str) -> tuple[Tensor, Tensor | None]:
    """Values of any magnitude, ties, subnormals, both zeros and non-finite ones; global scales of every kind."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    e, n, blocks = draw(st.integers(0, 3)), 2 * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = (e, n, blocks * FORMATS[fmt].block_size)
    kind, exponent = draw(st.sampled_from(VALUE_KINDS)), draw(st.integers(-140, 100))
    x = hostile_values(kind, shape, exponent, dtype, generator)
    x = strided(x, draw(st.sampled_from(STRIDES)))
    if fmt == "mxfp4" or draw(st.booleans()):
        return x, None
    halves = draw(st.sampled_from((None, 1, 2)))
    scale = torch.rand(() if halves is None else (e, halves), generator=generator)
    hostile = st.sampled_from((1.0, 1e-3, 2.0**-20, 1e-40, 0.0, -1.0, float("nan"), float("inf")))
    return x, scale * draw(hostile)


def check(x: Tensor, global_scale: Tensor | None, fmt: str) -> None:
    wanted = formats.quantize(x, global_scale, fmt, check_finite=False)
    for name, got, expected in zip(
        ("codes", "scales", "global"), pack.quantize(x, global_scale, format=fmt), wanted, strict=True
    ):
        assert same_values(got, expected), name
    fake = formats.fake_quantize(x, global_scale, fmt, check_finite=False)
    assert same_values(pack.fake_quantize(x, global_scale, format=fmt), fake)
    codes, scales, used = (strided(part, "sliced") for part in wanted)
    for dtype in DTYPES:
        expected = formats.dequantize(*wanted, dtype)
        assert same_values(pack.dequantize(codes, scales, used, dtype=dtype), expected), dtype


def check_drawn(dtype: torch.dtype, fmt: str) -> None:
    @settings(max_examples=25)
    @given(inputs(dtype, fmt))
    @example((torch.zeros(0, 2, 32, dtype=dtype), None))
    def run(drawn: tuple[Tensor, Tensor | None]) -> None:
        check(*drawn, fmt)

    run()


def check_merges(fmt: str) -> None:
    @settings(max_examples=60)
    @given(merges(fmt), st.sampled_from((2.0, 0.3, 0.0)))
    def run(drawn: tuple[Tensor, ...], scaling: float) -> None:
        got, wanted = merge.merge_lora(*drawn, scaling), merge_lora(*drawn, scaling)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1].view(torch.uint8), wanted[1].view(torch.uint8))

    run()


def in_order(x: Tensor, width: int, order: int) -> Tensor:
    """x `[M, C]`, padded to `width` and its columns in an order of `kernels/shrink.py`, by the words of its page."""
    x = torch.cat([x, x.new_zeros(x.shape[0], width - x.shape[1])], 1)
    if order == shrink.SPLIT.value:
        return torch.cat([x[:, ::2], x[:, 1::2]], 1)
    if order == shrink.FRAGMENT.value:
        out = torch.empty_like(x)
        for c in range(width):
            t, b, j, h = c % 32 // 8, c // 4 % 2, c // 2 % 2, c % 2
            out[:, c // 32 * 32 + 16 * j + 8 * h + 2 * t + b] = x[:, c]
        return out
    return x


def check_rows(x: Tensor, input_scale: Tensor | None = None) -> None:
    """4-bit rows: packed, and as values in every column order."""
    wanted = quantize_rows(x, input_scale)
    got = rows.quantize_rows(x, 0, None, input_scale)
    assert got.block_scales is not None and got.scale is not None
    assert torch.equal(got.values, wanted[0]) and torch.equal(got.block_scales, wanted[1].view(torch.uint8))
    assert same_values(got.scale, wanted[2])
    ones = torch.ones((), dtype=torch.float32)
    values = formats.dequantize(wanted[0], wanted[1], ones, x.dtype)
    width = -(-x.shape[1] // 128) * 128
    for order in (shrink.PLAIN.value, shrink.SPLIT.value, shrink.FRAGMENT.value):
        got = rows.quantize_rows(x, width, order, input_scale)
        assert got.scale is not None and same_values(got.scale, wanted[2])
        assert same_values(got.values, in_order(values, width, order)), order


INPUT_SCALES = (1e-3, 3e-7, 0.37, 1.0, 1e4, 2.0**-149, 1e-38, 3e38)
"""Of activations: all saturates, some does, nothing does, all of it underflows."""


def check_drawn_rows(dtype: torch.dtype) -> None:
    @settings(max_examples=25)
    @given(inputs(dtype, "nvfp4"), st.sampled_from(INPUT_SCALES).map(torch.tensor))
    @example((torch.randn(19, 304).to(dtype), None), torch.tensor(0.0005))
    def run(drawn: tuple[Tensor, Tensor | None], calibrated: Tensor) -> None:
        x = drawn[0]
        if x.numel():
            check_rows(x.flatten(0, -2))
            check_rows(x.flatten(0, -2), calibrated)

    run()


def check_activation_rows() -> None:
    """Of an activation: the rows that h is in 4 bits where every router weight is 1, and the weights in the scales."""
    for dtype, activation, limit in ((torch.bfloat16, "silu", None), (torch.float16, "swiglu_oai", 0.5)):
        m, c = 21, 80
        pre = torch.randn(m, 2 * c).to(dtype)
        slots, offsets = torch.randperm(m, dtype=torch.int32), torch.tensor([4, 4, m], dtype=torch.int32)
        args = pre, torch.ones(m), slots, offsets, c, 128, None, activation, limit
        got, h = rows.quantize_activation(*args, need_h=True)
        assert h is not None and got.block_scales is not None
        codes, scales, scale = quantize_rows(h)
        assert torch.equal(got.values, codes) and torch.equal(got.block_scales, scales.view(torch.uint8))
        assert torch.equal(got.scale, scale)
        calibrated = torch.tensor(0.0002)
        codes_c, scales_c, _ = quantize_rows(h, calibrated)
        got, _ = rows.quantize_activation(*args, calibrated, need_h=False)
        assert got.block_scales is not None and torch.equal(got.scale, calibrated.expand(m))
        assert torch.equal(got.values, codes_c) and torch.equal(got.block_scales, scales_c.view(torch.uint8))
        weights = torch.randn(m)
        weighted, none = rows.quantize_activation(args[0], weights, *args[2:], need_h=False)
        assert none is None and torch.equal(weighted.values, codes)
        assert torch.equal(weighted.scale, scale * weights[slots.long()])


def check_every_byte(fmt: str) -> None:
    """Every byte of codes under every scale byte."""
    size = FORMATS[fmt].block_size // 2
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 256 // size)
    scales = scales.view(FORMATS[fmt].scale_dtype)
    for scale in (1.0, 0.0123) if fmt == "nvfp4" else (1.0,):
        expected = formats.dequantize(codes, scales, torch.tensor(scale), torch.float32)
        assert same_values(pack.dequantize(codes, scales, torch.tensor(scale), dtype=torch.float32), expected)


def check_large() -> None:
    """More than one program, the last of them partly used."""
    x = torch.randn(70, 176, dtype=torch.float32)
    check(x, None, "nvfp4")
    check(torch.randn(3, 70, 96), torch.rand(3, 2), "nvfp4")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settings.register_profile("here", deadline=None, derandomize=True, database=None)
    settings.load_profile("here")
    use_cpu_tensors()
    check_large()
    for kind in DTYPES[:3]:
        check_drawn_rows(kind)
        print(f"rows {kind} ok", flush=True)
    check_activation_rows()
    for name in FORMATS:
        check_every_byte(name)
        check_merges(name)
        print(f"{name} merged ok", flush=True)
        for kind in DTYPES:
            check_drawn(kind, name)
            print(f"{name} {kind} ok", flush=True)
    print("all agree")
