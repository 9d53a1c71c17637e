"""Bytes that other tools wrote, and the reference that docs/format.md quotes."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from format_bits import DOCS, bits, same_bits
from safetensors.torch import load_file
from torch import Tensor

from torch_nvfp4.format import decode, dequantize, quantize, swizzle_scales, unpack, unswizzle_scales

GOLDEN = Path(__file__).parent / "golden"
ONE = torch.ones(1)


def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def by_block(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def test_n12_n14_n16_n18_bytes_of_modelopt() -> None:
    g = golden("nvfp4_producers")
    codes, scales, global_scale = quantize(g["w"])
    assert same_bits((codes, g["modelopt.packed"]), (scales, g["modelopt.scale"]), (global_scale, g["modelopt.global"]))
    assert torch.equal(dequantize(codes, scales, global_scale, torch.float32), g["modelopt.dequant"])
    # the same with that global scale given, in each of its shapes
    for given in (global_scale, global_scale[0]):
        assert same_bits(*zip(quantize(g["w"], given)[:2], (codes, scales), strict=True))


def test_n12_the_order_of_divisions_is_that_of_modelopt() -> None:
    g = golden("nvfp4_division_order")
    differs = 0
    for i, w in enumerate(g["w"]):
        codes, scales, global_scale = quantize(w)
        assert same_bits(
            (codes, g["modelopt.packed"][i]),
            (scales, g["modelopt.scale"][i]),
            (global_scale, g["modelopt.global"][i]),
        )
        six_first = by_block(w.float(), 16).abs().amax(-1) / 6 / global_scale
        differs += int((bits(six_first.to(torch.float8_e4m3fn)) != bits(scales)).sum())
    assert differs >= len(g["w"])  # else these vectors could not tell


def test_n7_n8_every_byte_decodes_as_in_modelopt() -> None:
    g = golden("nvfp4_decode_all_bytes")
    assert torch.equal(torch.unique(g["packed"]), torch.arange(256, dtype=torch.uint8))
    values = dequantize(g["packed"], g["scale"], g["global"], torch.float32)
    assert torch.equal(values, g["dequant"])
    other_order = decode(g["packed"], g["scale"]) * g["global"]
    assert not torch.equal(other_order, g["dequant"])


def test_n27_n29_n30_bytes_of_torchao_floor() -> None:
    g = golden("mxfp4_producers")
    codes, scales, global_scale = quantize(g["w"], format="mxfp4")
    assert same_bits((codes, g["ao_FLOOR.packed"]), (scales.view(torch.uint8), g["ao_FLOOR.scale"]))
    assert same_bits((dequantize(codes, scales, global_scale, torch.float32), g["ao_FLOOR.dequant"]))


@pytest.mark.parametrize("producer", ["ao_FLOOR", "ao_CEIL", "ao_RCEIL", "ao_EVEN", "modelopt", "ct"])
def test_n1_n31_any_producers_mxfp4_is_read_the_same(producer: str) -> None:
    g = golden("mxfp4_producers")
    scales = g[f"{producer}.scale"].view(torch.float8_e8m0fnu)
    values = dequantize(g[f"{producer}.packed"], scales, ONE, torch.float32)
    assert torch.equal(values, g[f"{producer}.dequant"])


def test_n1_n31_n32_gpt_oss_weights() -> None:
    g = golden("gptoss_mxfp4_hf")
    scale_bytes = g["gate_up_proj_scales"]
    assert {0, 254, 255} <= set(scale_bytes.flatten().tolist())
    codes = g["gate_up_proj_blocks"].flatten(-2)
    for dtype, expected in ((torch.float32, g["dequant_f32"]), (torch.bfloat16, g["dequant_bf16"])):
        values = dequantize(codes, scale_bytes.view(torch.float8_e8m0fnu), ONE, dtype)
        theirs = expected.transpose(1, 2).contiguous()
        is_nan = (scale_bytes == 255).repeat_interleave(32, dim=-1)
        assert is_nan.any() and torch.equal(values.isnan(), is_nan)
        assert same_bits((values[~is_nan], theirs[~is_nan]))


def test_n36_n37_n38_swizzle_of_torchao() -> None:
    g = golden("nvfp4_scale_swizzle")
    assert same_bits((swizzle_scales(g["scale_rowmajor"]), g["scale_swizzled"]))
    rows, cols = g["scale_rowmajor"].shape
    assert same_bits((unswizzle_scales(g["scale_swizzled"], rows, cols), g["scale_rowmajor"]))


# The table "What other libraries write"


def test_n4_fault_a13_the_divisor_of_compressed_tensors() -> None:
    g = golden("nvfp4_producers")
    divisor = g["ct.global"].item()
    assert divisor == 4096 and g["modelopt.global"].item() == g["torchao.global"].item() == 1 / divisor
    assert torch.equal(dequantize(g["ct.packed"], g["ct.scale"], 1 / g["ct.global"], torch.float32), g["ct.dequant"])
    torchao = dequantize(g["torchao.packed"], g["torchao.scale"], g["torchao.global"], torch.float32)
    assert torch.equal(torchao, g["torchao.dequant"])
    one_level = dequantize(g["torchao_1level.packed"], g["torchao_1level.scale"], ONE, torch.float32)
    assert torch.equal(one_level, g["torchao_1level.dequant"])


def test_n14_scales_of_zero_and_small_blocks_by_producer() -> None:
    g = golden("nvfp4_producers")
    amax = by_block(g["w"].float(), 16).abs().amax(-1)
    quotient = amax / (6 * g["modelopt.global"])
    small = (quotient > 2e-5) & (quotient < 3e-5)
    assert int((amax == 0).sum()) == 2 and int(small.sum()) == 1
    zero_block, small_block = {}, {}
    for producer in ("modelopt", "torchao", "ct"):
        scales = g[f"{producer}.scale"].float()
        (zero_block[producer],) = scales[amax == 0].unique().tolist()
        small_block[producer] = scales[small].item()
    assert zero_block == {"modelopt": 1.0, "torchao": 2.0**-6, "ct": 0.125}
    assert small_block == {"modelopt": 2.0**-9, "torchao": 2.0**-6, "ct": 0.125}


def test_n15_fault_a21_one_tie_of_torchao_differs() -> None:
    g = golden("nvfp4_producers")

    def same_scale(producer: str) -> Tensor:
        return (bits(g[f"{producer}.scale"]) == bits(g["modelopt.scale"])).repeat_interleave(16, dim=-1)

    ours, theirs = unpack(g["modelopt.packed"]), unpack(g["torchao.packed"])
    where = (ours != theirs) & same_scale("torchao") & (g["w"] != 0)
    divisor = (g["modelopt.scale"].float() * g["modelopt.global"]).repeat_interleave(16, dim=-1)
    assert (g["w"].float() / divisor)[where].tolist() == [2.5]
    assert (ours[where].tolist(), theirs[where].tolist()) == ([4], [5])
    assert not ((ours != unpack(g["ct.packed"])) & same_scale("ct")).any()


def test_n18_n29_negative_zero_by_producer() -> None:
    nvfp4, mxfp4 = golden("nvfp4_producers"), golden("mxfp4_producers")

    def codes_of(g: dict[str, Tensor], producer: str, negative: bool) -> list[int]:
        zeros = (g["w"] == 0) & (g["w"].float().signbit() == negative)
        return unpack(g[f"{producer}.packed"])[zeros].unique().tolist()

    assert {p: codes_of(nvfp4, p, True) for p in ("modelopt", "torchao", "ct")} == {
        "modelopt": [0],
        "torchao": [8],
        "ct": [0],
    }
    producers = ("modelopt", "ao_FLOOR", "ct")
    assert [codes_of(mxfp4, p, True) for p in producers] == [[8], [8], [0]]
    assert [codes_of(mxfp4, p, False) for p in producers] == [[8], [0], [0]]
    signs = {
        p: nvfp4[f"{p}.dequant"][unpack(nvfp4[f"{p}.packed"]) == 8].signbit().unique().tolist()
        for p in ("modelopt", "torchao", "ct")
    }
    assert signs == {"modelopt": [False], "torchao": [True], "ct": [True]}


def test_n27_mxfp4_scales_and_ties_by_producer() -> None:
    g = golden("mxfp4_producers")
    amax = by_block(g["w"].float(), 32).abs().amax(-1)
    floor = torch.floor(torch.log2(amax)) - 2
    ceil = torch.ceil(torch.log2(amax / 6))
    for exponent, producer in ((floor, "ao_FLOOR"), (ceil, "modelopt")):
        assert torch.equal((exponent + 127).clamp(min=0).to(torch.uint8), g[f"{producer}.scale"])
    assert (g["ct.scale"] >= g["ao_FLOOR.scale"]).all() and (g["ct.scale"] > g["ao_FLOOR.scale"]).any()
    ties = {0.25: (0, 0), 0.75: (2, 1), 1.25: (2, 2), 1.75: (4, 3), 2.5: (4, 4), 3.5: (6, 5), 5.0: (6, 6)}
    for tie, (even, towards_zero) in ties.items():
        for producer, code in (("ao_FLOOR", even), ("ct", even), ("modelopt", towards_zero)):
            scale = torch.exp2(g[f"{producer}.scale"].float() - 127).repeat_interleave(32, dim=-1)
            there = g["w"].float() == tie * scale
            assert there.any() and unpack(g[f"{producer}.packed"])[there].unique().tolist() == [code]


# The reference quoted in the documentation


def quoted_reference() -> Callable[[np.ndarray, np.float32], tuple[list[int], list[int]]]:
    (source,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(source, str(DOCS), "exec"), names)
    return names["quantize_row"]  # type: ignore[return-value]


def hostile_rows() -> Tensor:
    rows = torch.randn(12, 64)
    rows[1] *= torch.exp2(torch.randint(-40, 1, (64,)).float())
    rows[2, 16:32] = 0.0
    rows[3] = -0.0
    rows[4] *= 1e-38
    rows[5] *= 1e-43
    rows[6] *= 1e37
    rows[7, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    rows[7, 8:16] = torch.tensor([-0.25, -0.75, -5.0, -1e-9, 1e-9, 0.0, -0.0, 4.0])
    rows[8] = rows[8].bfloat16().float()
    rows[9, 0] = 3e4
    return rows


def test_n12_n13_n15_n19_the_reference_in_the_docs_gives_the_same_bytes() -> None:
    reference = quoted_reference()
    golden_rows = (*golden("nvfp4_producers")["w"], *golden("nvfp4_division_order")["w"][:, 0])
    for row in (*hostile_rows(), *(row.float() for row in golden_rows)):
        computed = quantize(row)[2].item()
        for given in (computed, 2.0**-12, 1.0, 0.0, 1e-44, 1e30):
            codes, scales, _ = quantize(row, given)
            with np.errstate(all="ignore"):
                expected_codes, expected_scales = reference(row.numpy(), np.float32(given))
            assert unpack(codes).tolist() == expected_codes
            assert scales.view(torch.uint8).tolist() == expected_scales
