"""Hopper's own products without a GPU: built in every shipped tile, and what their code must hold.

They have no interpreter: their numbers are checked on a card, by the `gpu` tests of the ops.
"""

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import KIB, assembler_says, build_gluon

from torch_nvfp4.lowering import configs
from torch_nvfp4.lowering import hopper as launcher
from torch_nvfp4.lowering.kernels import few_rows, hopper, hopper_feed
from torch_nvfp4.lowering.weight import Weight

C, N = 2048, 1536
BF16 = torch.bfloat16


def build(config: configs.HopperConfig, transposed: bool, **changed: Any) -> Any:
    sizes = dict(E_POW2=128, C=C, B=16, S=2, R=16, UNIT=128.0, DTYPE=tl.bfloat16) | changed
    dtype, name = (torch.bfloat16, "bf16") if sizes["DTYPE"] == tl.bfloat16 else (torch.float16, "fp16")
    constants = dict(
        bias=None, slots=None, slot_weights=None, row_scale=None, TOKENS=config.tokens,
        STEPS=(N if transposed else C) // hopper_feed.DEPTH, STAGES=config.stages, WARPS=config.warps,
        TRANSPOSED=transposed, WEIGHTED_BIAS=False, RAGGED=False, AFTER=False,
        HALF_TILES=config.half_tiles,
    ) | sizes  # fmt: skip
    constants.pop(constants.pop("given", None), None)
    x = hopper_feed.x_boxes(torch.empty(256, C, dtype=dtype), config.tokens)
    codes = hopper_feed.code_boxes(torch.empty(2, N, C // 2, dtype=torch.uint8), transposed)
    types = {
        "x": f"tensordesc<{name}{x.block_shape},{x.layout!r}>", "u": f"*{name}", "out": f"*{name}",
        "codes": f"tensordesc<i16{codes.block_shape},{codes.layout!r}>",
    }  # fmt: skip
    return build_gluon(
        hopper.grouped_product, constants, types, num_warps=config.warps, maxnreg=config.registers
    )  # fmt: skip


def build_few(config: configs.FewRowsConfig, **changed: Any) -> Any:
    sizes = dict(E_POW2=128, C=C, B=16, S=2, R=16, UNIT=128.0, DTYPE=tl.bfloat16) | changed
    constants = dict(
        bias=None, slots=None, slot_weights=None, row_scale=None, OUTPUTS=config.outputs, CHUNKS=config.chunks,
        WARPS=config.warps, WEIGHTED_BIAS=False, AFTER=False,
    ) | sizes  # fmt: skip
    constants.setdefault("X_WIDTH", constants["C"])
    constants.pop(constants.pop("given", None), None)
    types = dict.fromkeys(("x", "u", "out"), "*bf16" if sizes["DTYPE"] == tl.bfloat16 else "*fp16")
    return build_gluon(few_rows.few_rows_product, constants, types, num_warps=config.warps)


KINDS = [(config, transposed) for transposed in (False, True) for config in configs.HOPPER_CONFIGS]


@pytest.mark.parametrize(("config", "transposed"), KINDS, ids=str)
def test_every_tile_is_built_as_it_was_meant(config: configs.HopperConfig, transposed: bool) -> None:
    built = build(config, transposed)
    ptx = built.asm["ptx"]
    assert (built.metadata.shared + KIB) * config.programs <= 228 * KIB  # the system has 1 KiB of each program's
    assert "cp.async.bulk.tensor" in ptx
    assert ("ldmatrix" in ptx) and (".trans" in ptx) == transposed
    tokens = {config.tokens, config.tokens // 2} if config.half_tiles else {config.tokens}
    assert set(re.findall(r"wgmma\.mma_async\S*?m64n(\d+)k16", ptx)) == set(map(str, tokens))
    # The assembler gives up overlap, and says so, where it finds too few registers.
    assert "serialized" not in assembler_says(ptx)


@pytest.mark.parametrize(("config", "transposed"), KINDS[:2] + KINDS[5:7], ids=str)
def test_no_product_runs_on_registers_that_are_reused(config: configs.HopperConfig, transposed: bool) -> None:
    """Each product's left operand is given to a wait, which keeps its registers until the product is done."""
    ttgir = build(config, transposed).asm["ttgir"]
    waited = set(re.findall(r"%[\w#]+", " ".join(re.findall(r"warp_group_dot_wait ([^{]*)", ttgir))))
    operands = re.findall(r"ttng\.warp_group_dot (%[\w#]+),", ttgir)
    carried = set(re.findall(r"%[\w#]+", " ".join(re.findall(r"scf\.yield ([^:]*)", ttgir))))
    assert operands and all(operand in waited | carried for operand in operands)


OTHERS = {
    "fp16": dict(DTYPE=tl.float16), "mxfp4": dict(B=32, UNIT=1.0, S=1), "no LoRA": dict(R=0, S=1),
    "a large rank": dict(R=64), "a slice of experts": dict(AFTER=True), "4-bit rows": dict(given="row_scale"),
}  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_other_formats_and_ranks_are_built(kind: dict[str, Any], transposed: bool) -> None:
    config = configs.hopper_config(512, N if transposed else C)
    built = build(config, transposed, **kind)
    assert "wgmma" in built.asm["ptx"]
    assert (built.metadata.shared + KIB) * config.programs <= 228 * KIB  # the system has 1 KiB of each program's


@pytest.mark.parametrize(("most", "config"), configs.FEW_ROWS_CONFIGS + configs.SPARSE_CONFIGS, ids=str)
def test_a_tile_of_few_rows_moves_no_value_between_threads(most: int, config: configs.FewRowsConfig) -> None:
    built = build_few(config, C=min(most, 14336))
    ptx = built.asm["ptx"]
    assert "mma.sync" in ptx and "wgmma" not in ptx
    # 16 bytes a load of codes and of x; shared memory holds the warps' parts of the sums, which are added up.
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) >= ptx.count("mma.sync") // 4
    assert built.metadata.shared <= 4 * config.warps * config.outputs * 8
    assert "0 bytes spill stores" in assembler_says(ptx)


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_few_rows_of_other_formats_and_ranks_are_built(kind: dict[str, Any]) -> None:
    assert "0 bytes spill stores" in assembler_says(build_few(configs.FEW_ROWS_CONFIGS[0][1], **kind).asm["ptx"])


def test_what_they_cannot_take_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(dtype: torch.dtype = BF16, n: int = 128, c: int = 128, *, shift: int = 0, transposed: bool = False,
               mx: bool = False, version: str = "3.7.1", card: int = 9) -> str | None:  # fmt: skip
        monkeypatch.setattr(configs, "family", lambda _: card)
        monkeypatch.setattr(triton, "__version__", version)
        launcher._kernels.cache_clear()
        block = 32 if mx else 16
        codes, scales = torch.empty(n * c // 2 + 16, dtype=torch.uint8), torch.empty(1, n, c // block)
        weight = Weight(codes[shift:][: n * c // 2].view(1, n, c // 2), scales, torch.ones(1, 2), block)
        return launcher.obstacle(weight, torch.empty(0, c, dtype=dtype), transposed=transposed)

    assert all(reason(transposed=t) is None and reason(torch.float16, transposed=t) is None for t in (False, True))
    assert reason(mx=True) is None and reason(version="3.6.0+cu130") is None and reason(n=132) is None
    told = {
        "the card is not Hopper": dict(card=10),
        "Hopper's own products need Triton 3.6 to 3.7, and this is 3.8.0": dict(version="3.8.0"),
        "Hopper's own products take bf16, and fp16 with blocks of 16, not torch.float32 with blocks of 16": dict(
            dtype=torch.float32
        ),
        "Hopper's own products take bf16, and fp16 with blocks of 16, not torch.float16 with blocks of 32": dict(
            dtype=torch.float16, mx=True
        ),
        "Hopper's own products need C in 64s and N in 4s, and these are 96 and 128": dict(c=96),
        "Hopper's own products need C in 64s and N in 128s, and these are 128 and 132": dict(n=132, transposed=True),
        "Hopper's own products need codes that begin at 16 bytes, and scales at 4": dict(shift=8),
    }
    for text, given in told.items():
        assert reason(**given) == text  # type: ignore[arg-type]
    launcher._kernels.cache_clear()
