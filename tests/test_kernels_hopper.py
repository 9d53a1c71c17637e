"""The warp-specialised product without a GPU: built for Hopper in every shipped tile, and what its code must hold.

It has no interpreter: its numbers are checked on a card, by the `gpu` tests of the ops.
"""

import re
import subprocess
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import KIB, POINTERS
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from torch_nvfp4.lowering import configs
from torch_nvfp4.lowering.kernels import hopper, hopper_feed

C, N = 2048, 1536


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
    types = POINTERS | {
        "x": f"tensordesc<{name}{x.block_shape},{x.layout!r}>", "u": f"*{name}", "out": f"*{name}",
        "codes": f"tensordesc<i16{codes.block_shape},{codes.layout!r}>",
    }  # fmt: skip
    names = hopper.grouped_product.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind == "i32"]
    source = GluonASTSource(
        hopper.grouped_product, signature, {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    options = dict(num_warps=config.warps, maxnreg=config.registers)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembler_says(ptx: str) -> str:
    path = triton.knobs.nvidia.ptxas.path
    command = [path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


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


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        dict(DTYPE=tl.float16),
        dict(B=32, UNIT=1.0, S=1),
        dict(R=0, S=1),
        dict(R=64),
        dict(AFTER=True),
        dict(given="row_scale"),
    ],
    ids=["fp16", "mxfp4", "no LoRA", "a large rank", "a slice of experts", "4-bit rows"],
)
def test_other_formats_and_ranks_are_built(kind: dict[str, Any], transposed: bool) -> None:
    config = configs.hopper_config(512, N if transposed else C)
    built = build(config, transposed, **kind)
    assert "wgmma" in built.asm["ptx"]
    assert (built.metadata.shared + KIB) * config.programs <= 228 * KIB  # the system has 1 KiB of each program's
