"""The CUDA kernels without a GPU: every shipped tile compiles for every architecture and fits its shared memory."""

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_nvfp4.lowering import configs
from torch_nvfp4.lowering.kernels import combine, glu, grouped_gemm, route, scratch, shrink, wgrad

DATACENTER = {80: 164 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CONSUMER = {89: configs.CONSUMER_SHARED_MEMORY, 120: configs.CONSUMER_SHARED_MEMORY}
ARCHITECTURES = DATACENTER | CONSUMER
SIZES = dict(E_POW2=128, C=2048, B=16, S=2, R=16, UNIT=128.0, DTYPE=tl.bfloat16, PRECISION=None)
POINTERS = dict(
    codes="*u8", scales="*u8", global_scale="*fp32", lora_a="*fp32", lora_b="*fp32", factor="*fp32", bias="*fp32",
    offsets="*i32", slots="*i32", gy_slots="*i32", narrow_slots="*i32", wide_slots="*i32", slot_weights="*fp32",
    rows="*i32", inverse="*i32", counts="*i32", ids="*i64", gw="*fp32", scaling="fp32",
)  # fmt: skip
ACTIVATIONS = ("x", "gy", "u", "v", "y", "gx", "pre", "gpre", "gh", "h", "out", "narrow", "wide")


def build(kernel: Any, arch: int, constants: dict[str, Any], types: dict[str, str], warps: int) -> Any:
    """The kernel compiled for sm_`arch` as a launch with 16-byte aligned tensors and sizes would compile it."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    known = dict.fromkeys(ACTIVATIONS, "*bf16") | POINTERS | types
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind == "i32"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=warps))
    assert not unsettled_products(built.asm["ttgir"])
    return built


def unsettled_products(ttgir: str) -> list[str]:
    """wgmma instructions that run on into a loop's next step while their left operand lies in registers, which that
    step overwrites: nothing in such a step waits for them.
    """
    found: list[str] = []
    for line in ttgir.splitlines():
        if "ttng.warp_group_dot " in line and "opIdx = 0" in line and "isAsync = true" in line:
            found.append(line)
        elif "ttng.warp_group_dot_wait" in line and "pendings = 0" in line:
            found.clear()
        elif "scf.yield" in line and found:
            return found
    return []


def linear(config: configs.LinearConfig, arch: int, **sizes: Any) -> Any:
    tma = arch >= 90
    constants = SIZES | dict(
        bias=None, slots=None, slot_weights=None, X_WIDTH=2048, TOKENS=config.tokens, OUTPUTS=config.outputs,
        BYTES=config.bytes, STAGES=config.stages, TMA=tma, PACKED_ASM=tma, WGMMA=arch == 90,
        WEIGHTED_BIAS=False,
    ) | sizes  # fmt: skip
    types = {"x": f"tensordesc<bf16[{config.tokens}, {config.bytes}]>"} if tma else {}
    return build(grouped_gemm.grouped_linear, arch, constants, types, config.warps)


def dgrad(config: configs.DgradConfig, arch: int, **sizes: Any) -> Any:
    tma = arch >= 90
    constants = SIZES | dict(
        TOKENS=config.tokens, BYTES=config.bytes, DEPTH=config.depth, STAGES=config.stages, TMA=tma, PACKED_ASM=tma
    ) | sizes  # fmt: skip
    types = {"gy": f"tensordesc<bf16[{config.tokens}, {config.depth}]>"} if tma else {}
    return build(grouped_gemm.grouped_dgrad, arch, constants, types, config.warps)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_tile_for_many_rows_compiles_and_fits(arch: int) -> None:
    limit = ARCHITECTURES[arch]
    config = configs.linear_config(4096, torch.bfloat16, limit)
    assert linear(config, arch).metadata.shared <= limit
    assert dgrad(configs.dgrad_config(4096, torch.bfloat16, limit), arch).metadata.shared <= limit


@pytest.mark.parametrize("config", configs.LINEAR_CONFIGS, ids=str)
def test_every_linear_tile_uses_hopper_matrix_instructions(config: configs.LinearConfig) -> None:
    """… with the weight straight from registers: decoded, it is never written to shared memory in the loop."""
    built = linear(config, 90)
    assert built.metadata.shared <= ARCHITECTURES[90]
    assert "wgmma.mma_async" in built.asm["ptx"]
    loop = re.search(r"scf\.for.*?scf\.yield", built.asm["ttgir"], re.DOTALL)
    assert loop and "warp_group_dot" in loop[0] and "opIdx = 0" in loop[0]
    assert "local_store" not in loop[0] and "local_alloc" not in loop[0]


def test_a_product_that_runs_into_the_next_step_is_found() -> None:
    ttgir = """
        %12 = ttng.warp_group_dot %a, %b, %c {isAsync = true} : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0, parent = #m}>>
        scf.yield %12
    """
    assert len(unsettled_products(ttgir)) == 1


@pytest.mark.parametrize("config", configs.DGRAD_CONFIGS, ids=str)
def test_every_dgrad_tile_fits_on_hopper(config: configs.DgradConfig) -> None:
    built = dgrad(config, 90)
    assert built.metadata.shared <= ARCHITECTURES[90] and "wgmma.mma_async" in built.asm["ptx"]


def test_mxfp4_has_no_float8_anywhere() -> None:
    config = configs.linear_config(64, torch.bfloat16, ARCHITECTURES[80])
    built = linear(config, 80, B=32, UNIT=1.0)
    assert "e4m3" not in built.asm["ptx"] and "f8" not in built.asm["ttir"]


@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_a_decoded_slice_compile_for_hopper(transposed: bool) -> None:
    config = configs.DENSE_CONFIG
    block = [config.depth, config.outputs] if transposed else [config.outputs, config.depth]
    constants = SIZES | dict(
        bias=None, slots=None, slot_weights=None, TOKENS=config.tokens, OUTPUTS=config.outputs, DEPTH=config.depth,
        STAGES=config.stages, TRANSPOSED=transposed, WEIGHTED_BIAS=False,
    )  # fmt: skip
    types = {
        "x": f"tensordesc<bf16[{config.tokens}, {config.depth}]>",
        "weight": f"tensordesc<bf16[{block[0]}, {block[1]}]>",
    }
    built = build(scratch.grouped_dense, 90, constants, types, config.warps)
    assert built.metadata.shared <= ARCHITECTURES[90] and "m64n256k16" in built.asm["ptx"]


ROW_KERNELS = {
    "shrink and gather": (shrink.shrink, dict(
        WIDTH=2048, FACTOR_WIDTH=2048, OUT_WIDTH=2048, R=configs.SHRINK_RANKS, ROWS=configs.SHRINK_ROWS,
        COLUMNS=configs.SHRINK_COLUMNS, BY_RANK=True, X_SPLIT=False, SPLIT=True)),
    "glu": (glu.glu_forward, dict(
        WIDTH=768, H_WIDTH=768, ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS, SPLIT=True, ACTIVATION="silu",
        LIMIT=None)),
    "glu backward": (glu.glu_backward, dict(
        gy=None, gy_slots=None, bias=None, WIDTH=768, N=0, ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS,
        ACTIVATION="swiglu_oai", LIMIT=7.0)),
    "wgrad": (wgrad.wgrad, dict(
        SPLITS=1, NARROW=16, WIDE=configs.WGRAD_WIDE, ROWS=configs.WGRAD_ROWS)),
    "route count": (route.route_count, dict(BINS=1024, BLOCK=configs.ROUTE_BLOCK)),
    "route place": (route.route_place, dict(BINS=1024, BLOCK=configs.ROUTE_BLOCK, CHUNKS=16)),
    "combine": (combine.combine, dict(TOP_K=8, COLUMNS=1024, SPLITS=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_row_kernels_compile_and_fit_on_a_consumer_card(name: str) -> None:
    kernel, constants = ROW_KERNELS[name]
    types = {"rows": "*bf16"} if name == "combine" else {"out": "*fp32"} if name == "wgrad" else {}
    warps = 8 if name.startswith("route") else 4
    build(kernel, 90, SIZES | constants, types, warps)
    built = build(kernel, 120, SIZES | constants, types, warps)
    assert built.metadata.shared <= configs.CONSUMER_SHARED_MEMORY
