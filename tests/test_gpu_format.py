"""Quantise, fake-quantise and dequantise on a GPU: the bytes of the CPU for every kind of input."""

import cuda_layers  # noqa: F401  (enables the kernels)
import pytest
import torch
from cuda_layers import to_cuda, without_sync
from strategies import strided
from torch import Tensor

from torch_nvfp4 import format as formats

pytestmark = pytest.mark.gpu
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OPS = torch.ops.nvfp4


def same(got: Tensor, wanted: Tensor) -> None:
    """The same bits; any NaN of a float result is as good as another."""
    got = got.cpu()
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    bits = BITS[wanted.element_size()]
    here, there = got.view(bits), wanted.view(bits)
    if wanted.dtype in (F32, BF16, F16, F64):
        assert torch.equal(got.isnan(), wanted.isnan())
        here, there = here.masked_fill(wanted.isnan(), 0), there.masked_fill(wanted.isnan(), 0)
    assert torch.equal(here, there), f"{(here != there).sum()} of {here.numel()} differ"


def patterns(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a 16-bit dtype, in several neighbourhoods; many random ones of a larger dtype."""
    if dtype in (BF16, F16):
        every = torch.arange(2**16).to(torch.int16)
        return torch.stack([every, *(every[torch.randperm(2**16)] for _ in range(3))]).view(dtype).view(2, 512, 256)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (2, 512, 256 * size), dtype=torch.uint8).view(dtype)


def values(dtype: torch.dtype) -> dict[str, Tensor]:
    spread = torch.randn(2, 600, 96) * torch.exp2(torch.randint(-30, 30, (2, 600, 6)).float()).repeat_interleave(16, 2)
    ties = torch.randint(-24, 25, (2, 600, 96)) * 0.25
    return {
        "every pattern": patterns(dtype),
        "finite patterns": torch.nan_to_num(patterns(dtype), nan=1.0, posinf=2.0, neginf=-0.0),
        "spread": spread.to(dtype),
        "tiny": (spread * 1e-36).to(dtype),
        "ties": ties.to(dtype),
        "large": torch.randn(3, 1000, 4096).to(dtype),
        "empty": torch.empty(0, 4, 32, dtype=dtype),
    }


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
def test_the_bytes_are_the_cpus(dtype: torch.dtype, format: str) -> None:
    for x in values(dtype).values():
        experts = torch.rand(x.shape[0], 2) * 1e-2
        scales = (None,) if format == "mxfp4" else (None, torch.tensor(0.02), torch.tensor([1e-40]), experts)
        for scale in scales:
            given = None if scale is None else scale.cuda()
            wanted = formats.quantize(x, scale, format, check_finite=False)
            got = OPS.quantize(x.cuda(), given, format=format)
            for g, w in zip(got, wanted, strict=True):
                same(g, w)
            fake = OPS.fake_quantize(x.cuda(), given, format=format)
            same(fake, formats.dequantize(*wanted, dtype))
            for out in (BF16, F16, F32, F64):
                same(OPS.dequantize(*got, dtype=out), formats.dequantize(*wanted, out))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_compiled_fake_quantize_has_eagers_bits(
    dtype: torch.dtype, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)  # a graph for each shape
    fake_quantize = torch.compile(
        lambda x, scale: OPS.fake_quantize(x, scale, format=format), fullgraph=True, dynamic=False
    )
    for x in (x for name, x in values(dtype).items() if name != "large"):
        for scale in (None,) if format == "mxfp4" else (None, torch.tensor(0.02), torch.rand(x.shape[0], 2) * 1e-2):
            given = None if scale is None else scale.cuda()
            same(fake_quantize(x.cuda(), given), formats.fake_quantize(x, scale, format, check_finite=False))


@pytest.mark.parametrize("how", ["sliced", "transposed"])
def test_strides_do_not_matter(how: str) -> None:
    x = strided(torch.randn(3, 64, 160).bfloat16(), how)
    wanted = formats.quantize(x)
    got = OPS.quantize(to_cuda(x))
    for g, w in zip(got, wanted, strict=True):
        same(g, w)
    codes, scales, scale = (to_cuda(strided(part, how)) for part in wanted)
    same(OPS.dequantize(codes, scales, scale), formats.dequantize(*wanted))


def test_the_host_does_not_wait() -> None:
    x = torch.randn(64, 256, device="cuda")
    x[3, 5] = torch.nan
    without_sync(lambda: OPS.dequantize(*OPS.quantize(x)))
    without_sync(lambda: OPS.fake_quantize(x, torch.ones(1, device="cuda")))


def test_more_than_31_bits_of_elements() -> None:
    x = torch.empty(2**20 + 3, 2048, device="cuda", dtype=BF16)
    x.normal_()
    x[-1, -1] = 100.0  # the largest, where an index in 32 bits would not reach
    codes, scales, scale = OPS.quantize(x)
    wanted = formats.quantize(x[-3:].cpu(), scale.cpu())
    assert scale.item() == (torch.tensor(100.0) / torch.tensor(2688.0)).item()
    same(codes[-3:], wanted[0])
    same(scales[-3:], wanted[1])
    del x
    same(OPS.dequantize(codes, scales, scale)[-3:], formats.dequantize(*wanted))
