"""The CUDA kernels without a GPU: every tile that a card can get compiles for it and fits its shared memory."""

import re
from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import POINTER_TO, SHARED_MEMORY, build, family, unsettled_products

from torch_nvfp4.lowering import block_scaled as launcher
from torch_nvfp4.lowering import configs, pack
from torch_nvfp4.lowering import merge as merge_launcher
from torch_nvfp4.lowering.kernels import (
    block_scaled,
    combine,
    dequantize,
    glu,
    glu_backward,
    grouped_gemm,
    merge,
    quantize,
    route,
    rows,
    scratch,
    shrink,
    wgrad,
)
from torch_nvfp4.lowering.launch import TRITON_DTYPE, precision, product_dtype
from torch_nvfp4.lowering.weight import Weight

SIZES = dict(E_POW2=128, C=2048, B=16, S=2, R=16, UNIT=128.0, DTYPE=tl.bfloat16, PRECISION=None, AFTER=False,
             STREAM=False, row_scale=None, moved=None)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MATRIX_INSTRUCTION = {8: "mma.sync", 9: "wgmma.mma_async", 10: "tcgen05.mma", 12: "mma.sync"}
"""By family; float32 runs on the ordinary cores of all of them."""


def _options(arch: int, dtype: torch.dtype, mx: bool = False) -> dict[str, Any]:
    """The choices that a launch makes by the family of the card and the dtype."""
    hopper_or_later = family(arch) >= 9
    return dict(
        TMA=hopper_or_later, PACKED_ASM=hopper_or_later and dtype == torch.bfloat16 and not mx,
        WGMMA=family(arch) == 9 and dtype != torch.float32, DTYPE=TRITON_DTYPE[dtype],
        PRECISION=precision(dtype, 32 if mx else 16),
    ) | (dict(B=32, UNIT=1.0) if mx else {})  # fmt: skip


def _descriptor(arch: int, dtype: torch.dtype, rows: int, columns: int) -> str | None:
    if family(arch) < 9:
        return None
    return f"tensordesc<{str(TRITON_DTYPE[dtype])}[{rows}, {columns}]>"


@cache
def linear(
    config: configs.LinearConfig, arch: int, dtype: torch.dtype = torch.bfloat16, mx: bool = False,
    four_bits: bool = False,
) -> Any:  # fmt: skip
    constants = SIZES | dict(
        bias=None, slots=None, slot_weights=None, X_WIDTH=2048, TOKENS=config.tokens, OUTPUTS=config.outputs,
        BYTES=config.bytes, STAGES=config.stages, WEIGHTED_BIAS=False,
    ) | _options(arch, dtype, mx)  # fmt: skip
    if four_bits:
        del constants["row_scale"]
    x = _descriptor(arch, dtype, config.tokens, config.bytes)
    return build(grouped_gemm.grouped_linear, arch, constants, {"x": x} if x else {}, config.warps)


@cache
def dgrad(config: configs.DgradConfig, arch: int, dtype: torch.dtype = torch.bfloat16, mx: bool = False) -> Any:
    constants = SIZES | dict(
        TOKENS=config.tokens, BYTES=config.bytes, DEPTH=config.depth, STAGES=config.stages
    ) | _options(arch, dtype, mx)  # fmt: skip
    rows = _descriptor(arch, dtype, config.tokens, config.depth)
    return build(grouped_gemm.grouped_dgrad, arch, constants, {"gy": rows} if rows else {}, config.warps)


def chosen(choose: Any, arch: int, dtype: torch.dtype) -> list[Any]:
    """Every tile that some number of rows an expert gets on this card."""
    return list(dict.fromkeys(choose(2**power, dtype, SHARED_MEMORY[arch]) for power in range(14)))


# Cards of one family whose code differs in the target's name alone get one build of each product: the largest tile.
TWINS = (86, 103, 121)
PRODUCTS = {"linear": (linear, configs.linear_config), "dgrad": (dgrad, configs.dgrad_config)}
TILES = [
    pytest.param(product, tile, arch, id=f"{product}-sm_{arch}-{i}")
    for arch in SHARED_MEMORY
    for product, (_, choose) in PRODUCTS.items()
    for i, tile in enumerate(chosen(choose, arch, torch.bfloat16)[-1 if arch in TWINS else 0 :])
]


@pytest.mark.parametrize(("product", "tile", "arch"), TILES)
def test_every_tile_a_card_can_get_compiles_and_fits_fault_e1(product: str, tile: Any, arch: int) -> None:
    """… and uses the matrix instructions of its family."""
    built = PRODUCTS[product][0](tile, arch)
    assert MATRIX_INSTRUCTION[family(arch)] in built.asm["ptx"]


@pytest.mark.parametrize(
    ("arch", "dtype", "mx"),
    [
        (80, torch.float16, False), (80, torch.bfloat16, True), (90, torch.float32, False), (120, torch.float32, False),
    ],
)  # fmt: skip
def test_other_dtypes_and_mxfp4_compile_and_fit(arch: int, dtype: torch.dtype, mx: bool) -> None:
    """The smallest tile: they differ from the others in the decoder only."""
    linear(chosen(configs.linear_config, arch, dtype)[0], arch, dtype, mx)


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("product", PRODUCTS)
def test_fp16_with_mxfp4_is_multiplied_by_the_matrix_units_in_tf32(product: str, arch: int) -> None:
    """… from fp16 rows, in the tile of fp32."""
    build_product, choose = PRODUCTS[product]
    tile = choose(1, product_dtype(torch.float16, 32), SHARED_MEMORY[arch])
    ptx = build_product(tile, arch, torch.float16, True).asm["ptx"]
    assert "m16n8k8.row.col.f32.tf32.tf32.f32" in ptx and "f32.bf16" not in ptx


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_products_of_4_bit_rows_compile_and_fit(arch: int) -> None:
    linear(chosen(configs.linear_config, arch, torch.bfloat16)[0], arch, four_bits=True)


BLOCK_SCALED_INSTRUCTION = {
    10: "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale",
    12: "kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
}
BLOCK_SCALED_TILES = [
    pytest.param(10 * major + minor, config, id=f"sm_{major}{minor}-{config.tokens}")
    for (major, minor), first in configs.BLOCK_SCALED.items()
    if launcher.emits(first)
    for config in configs.BLOCK_SCALED_CONFIGS[: 1 if minor else None]
]


def block_scaled_product(arch: int, config: configs.BlockScaledConfig, **changed: Any) -> Any:
    constants = SIZES | dict(
        bias=None, slots=None, slot_weights=None, TOKENS=config.tokens, OUTPUTS=config.outputs, BYTES=config.bytes,
        STAGES=config.stages, WEIGHTED_BIAS=False,
    ) | changed  # fmt: skip
    del constants["row_scale"]
    types = dict(x="*u8", x_scales="*u8", x_slots="*i32")
    return build(block_scaled.block_scaled_linear, arch, constants, types, config.warps, float8=True)


@pytest.mark.parametrize(("arch", "config"), BLOCK_SCALED_TILES)
def test_block_scaled_products_use_the_instruction_for_them(arch: int, config: configs.BlockScaledConfig) -> None:
    """… in every tile that a card can get."""
    built = block_scaled_product(arch, config)
    assert BLOCK_SCALED_INSTRUCTION[family(arch)] in built.asm["ptx"]
    assert built.metadata.shared <= config.shared_memory + 4096


def test_block_scaled_products_are_for_cards_and_formats_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(block: int) -> Weight:
        return Weight(torch.empty(1, 2, 32), torch.empty(1, 2, 64 // block), torch.ones(1, 1), block)

    def taken(capability: tuple[int, int], version: str, block: int = 16) -> bool:
        configs.first_block_scaled.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(triton, "__version__", version)
        return launcher.supports(packed(block), 0)

    assert all(taken(card, "3.6.0") for card in ((10, 0), (10, 3), (12, 0))) and taken((12, 1), "3.8.0+cu130")
    assert not any(taken(card, "3.7.1") for card in ((8, 0), (9, 0), (12, 1)))
    assert not taken((10, 0), "3.7.1", block=32)
    configs.first_block_scaled.cache_clear()


@pytest.mark.parametrize("arch", [100, 120])
@pytest.mark.parametrize(
    "kind",
    [dict(C=2880, S=1), dict(C=48, R=64), dict(DTYPE=tl.float32, PRECISION="ieee"), dict(R=0, AFTER=True)],
    ids=["a last step in part", "a large rank", "fp32", "no LoRA, a slice of experts"],
)
def test_other_block_scaled_products_are_built(arch: int, kind: dict[str, Any]) -> None:
    built = block_scaled_product(arch, configs.BLOCK_SCALED_CONFIGS[1], **kind)
    assert BLOCK_SCALED_INSTRUCTION[family(arch)] in built.asm["ptx"]


@pytest.mark.parametrize("tile", chosen(configs.linear_config, 90, torch.bfloat16), ids=str)
def test_on_hopper_the_decoded_weight_stays_in_registers(tile: configs.LinearConfig) -> None:
    """It is never written to shared memory in the loop."""
    loop = re.search(r"scf\.for.*?scf\.yield", linear(tile, 90).asm["ttgir"], re.DOTALL)
    assert loop and "warp_group_dot" in loop[0] and "opIdx = 0" in loop[0]
    assert "local_store" not in loop[0] and "local_alloc" not in loop[0]


def test_a_product_that_runs_into_the_next_step_is_found() -> None:
    ttgir = """
        %12 = ttng.warp_group_dot %a, %b, %c {isAsync = true} : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0, parent = #m}>
        scf.yield %12
    """
    assert len(unsettled_products(ttgir)) == 1


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
    assert "m64n256k16" in built.asm["ptx"]


ROW_KERNELS = {
    "shrink and gather": (shrink.shrink, dict(
        WIDTH=2048, FACTOR_WIDTH=2048, OUT_WIDTH=2048, R=configs.SHRINK_RANKS, ROWS=configs.SHRINK.rows,
        COLUMNS=configs.SHRINK.columns, BY_RANK=True, X_SPLIT=False, SPLIT=True, X_ORDER=0,
        ORDER=1)),
    "shrink and gather of many rows": (shrink.shrink, dict(
        WIDTH=2048, FACTOR_WIDTH=2048, OUT_WIDTH=2048, R=configs.SHRINK_MANY_RANKS, ROWS=configs.SHRINK_MANY.rows,
        COLUMNS=configs.SHRINK_MANY.columns, STREAM=True, BY_RANK=True, X_ORDER=0, ORDER=2,
        num_stages=configs.SHRINK_MANY.stages)),
    "shrink of a row": (shrink.shrink_row, dict(
        WIDTH=2048, FACTOR_WIDTH=2048, OUT_WIDTH=2048, R=configs.SHRINK_ROW_RANKS, COLUMNS=configs.SHRINK_ROW_COLUMNS,
        BY_RANK=True, X_ORDER=0, ORDER=2, ACTIVATION=None, LIMIT=None)),
    "activation and shrink of a row": (shrink.shrink_row, dict(
        WIDTH=768, FACTOR_WIDTH=768, OUT_WIDTH=768, R=configs.SHRINK_ROW_RANKS, COLUMNS=1024, BY_RANK=True, X_ORDER=0,
        ORDER=2, ACTIVATION="silu", LIMIT=None)),
    "gather of 4-bit rows": (shrink.shrink, dict(
        WIDTH=2048, FACTOR_WIDTH=2048, OUT_WIDTH=2048, R=configs.SHRINK_RANKS, ROWS=configs.SHRINK.rows,
        COLUMNS=configs.SHRINK.columns, BY_RANK=True, X_ORDER=0, ORDER=0)),
    "glu": (glu.glu_forward, dict(
        WIDTH=768, H_WIDTH=768, ROWS=configs.GLU_ROWS, COLUMNS=configs.GLU_COLUMNS, SPLIT=True, ORDER=1,
        ACTIVATION="silu", LIMIT=None)),
    "glu backward's sums": (glu_backward.sum_chunks, dict(
        N=2880, CHUNKS=12, ROWS=configs.SUM_ROWS, COLUMNS=configs.SUM_COLUMNS)),
    "wgrad": (wgrad.wgrad, dict(
        NARROW=16, WIDE=configs.WGRAD_WIDE, ROWS=configs.WGRAD_ROWS)),
    "route count": (route.route_count, dict(BINS=1024, BLOCK=configs.ROUTE_BLOCK, num_warps=configs.ROUTE_WARPS)),
    "route scan": (route.route_scan, dict(BINS=1024, CHUNKS=configs.ROUTE_CHUNKS)),
    "route place": (route.route_place, dict(BINS=1024, BLOCK=configs.ROUTE_BLOCK, num_warps=configs.ROUTE_WARPS)),
    **{
        f"route {slots} at once": (route.route_at_once, dict(SLOTS=slots, num_warps=warps))
        for slots, warps in configs.ROUTE_AT_ONCE
    },
    "combine": (combine.combine, dict(TOP_K=8, COLUMNS=1024, SPLITS=2)),
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_row_kernels_compile_and_fit(name: str, arch: int) -> None:
    kernel, constants = ROW_KERNELS[name]
    types = {"rows": "*bf16"} if name == "combine" else {"out": "*fp32"} if name == "wgrad" else {}
    types |= {"gw_chunks": "*fp32", "v_chunks": "*fp32"} if name.endswith("sums") else {}
    sizes = dict(SIZES)
    if name.endswith("4-bit rows"):
        types = {"moved": "*bf16"}
        del sizes["moved"], sizes["row_scale"]
    options = {name: constants[name] for name in ("num_stages",) if name in constants}
    built = build(kernel, arch, sizes | constants, types, constants.get("num_warps", 4), **options)
    assert ("st.global.cs" in built.asm["ptx"]) == constants.get("STREAM", False)


@cache
def built_glu_backward(
    config: configs.GluBackwardConfig, arch: int, dtype: torch.dtype, rank: int, activation: str = "silu"
) -> Any:
    """Of 2,880 columns, as a launch without biases would ask for it."""
    halves = 1 if activation == "relu2" else 2
    way = configs.glu_backward_way(config.least_rows, dtype, 2880, rank, need_gw=True, bias=False)
    constants = SIZES | dict(
        WIDTH=2880, R=rank, ACTIVATION=activation, LIMIT=None, PRECISION=precision(dtype),
        **config.constants(2880, halves),
    ) | ({} if way.makes_v else dict(lora_b=None, v_chunks=None))  # fmt: skip
    constants["gw" if way.sums_gw else "gw_chunks"] = None
    types = dict.fromkeys(("pre", "gh", "gpre", "h"), POINTER_TO[TRITON_DTYPE[dtype]])
    types |= dict.fromkeys(("gw_chunks", "v_chunks"), "*fp32")
    return build(glu_backward.glu_backward, arch, constants, types, config.warps, num_stages=config.stages)


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("rank", [configs.GLU_BACKWARD_RANKS])
@pytest.mark.parametrize("config", configs.GLU_BACKWARD_CONFIGS, ids=str)
def test_glu_backward_compiles_and_computes_its_activation_once(
    config: configs.GluBackwardConfig, rank: int, arch: int
) -> None:
    """… in the layout of the loads, and not a second time in that of the product."""
    built = built_glu_backward(config, arch, torch.bfloat16, rank)
    assert len(re.findall(r"= math\.exp", built.asm["ttgir"])) == 1 and "mma.sync" in built.asm["ptx"]


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("rank", [0, configs.GLU_BACKWARD_RANKS, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_other_glu_backwards_compile_and_fit(activation: str, dtype: torch.dtype, rank: int, arch: int) -> None:
    for rows_each in (1, 16, 1024) if dtype == torch.float16 else (1,):
        config = configs.glu_backward_config(rows_each, dtype, rank)
        built = built_glu_backward(config, arch, dtype, rank, activation)
        assert ("mma.sync" in built.asm["ptx"]) == (dtype == torch.float16 and rank == configs.GLU_BACKWARD_RANKS)
        assert len(re.findall(r"= math\.exp", built.asm["ttgir"])) == (activation == "silu")


@pytest.mark.parametrize("rows_each", [2, 30, 120])
def test_router_weights_gradients_are_summed_alike_with_v_and_without(rows_each: int) -> None:
    """So that a merge-aware layer, which has adapters, has the bits of the layer of the merged weights."""
    layouts = []
    for rank in (0, configs.GLU_BACKWARD_RANKS):
        config = configs.glu_backward_config(rows_each, torch.bfloat16, rank)
        ttgir = built_glu_backward(config, 90, torch.bfloat16, rank).asm["ttgir"]
        reduced = re.search(r'"tt\.reduce".*?\}\) : \(tensor<(\w+), (#\w+)>\)', ttgir, re.DOTALL)
        assert reduced is not None
        layouts.append((reduced[1], re.search(rf"^{reduced[2]} = (.*)$", ttgir, re.MULTILINE)[1]))  # type: ignore[index]
    assert layouts[0] == layouts[1]


ROWS = dict(
    slot_weights=None, slots=None, offsets=None, input_scale=None, h=None, WIDTH=2048, OUT_WIDTH=2048,
    ROWS=configs.GLU_ROWS,
    COLUMNS=configs.GLU_COLUMNS, ORDER=2, ACTIVATION=None, LIMIT=None, DTYPE=tl.bfloat16,
)  # fmt: skip
CALIBRATED = {name: value for name, value in ROWS.items() if name != "input_scale"}


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_an_activation_in_4_bits_compiles_and_divides_exactly(activation: str, arch: int) -> None:
    given = ("slot_weights", "slots", "offsets", "h")
    constants = {name: value for name, value in ROWS.items() if name not in given}
    constants |= dict(codes=None, scales=None, WIDTH=768, OUT_WIDTH=768, ACTIVATION=activation)
    ptx = build(rows.quantize_rows, arch, constants, {}, enable_fp_fusion=False).asm["ptx"]
    assert "div.rn.f32" in ptx and ".ftz" not in ptx


def _format_kernels(block: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    tile = dict(B=block, BLOCKS=pack.ELEMENTS // block, MX=block == 32)
    return {
        "quantize": (quantize.quantize, tile | dict(out=None)),
        "fake_quantize": (quantize.quantize, tile | dict(codes=None, scales=None)),
        "dequantize": (dequantize.dequantize, tile),
        "merge": (
            merge.merge,
            dict(C=2048, B=block, S=1 if block == 32 else 2) | merge_launcher.tile_sizes(block),
        ),
        "rows": (rows.quantize_rows, ROWS | dict(codes=None, scales=None)),
        "packed rows": (rows.quantize_rows, ROWS | dict(out=None, ORDER=None)),
        "calibrated rows": (rows.quantize_rows, CALIBRATED | dict(codes=None, scales=None)),
        "partial_amax": (quantize.partial_amax, dict(SIZE=pack.ELEMENTS)),
        "computed_scale": (quantize.computed_scale, dict(SIZE=pack.AMAX_PROGRAMS)),
    }


@pytest.mark.parametrize(
    ("arch", "block", "x", "size"),
    [
        (80, 16, "*bf16", "i32"), (80, 32, "*fp16", "i32"), (90, 16, "*fp32", "i32"), (90, 32, "*fp64", "i32"),
        (90, 16, "*bf16", "i64"), (100, 32, "*bf16", "i32"), (120, 16, "*bf16", "i32"),
    ],
)  # fmt: skip
def test_quantising_divides_exactly_and_fuses_nothing_fault_a21(arch: int, block: int, x: str, size: str) -> None:
    """… but what the source fuses: a product or sum that says `.rn` is never contracted.

    i64 is what a launch makes of a size from 2^31 on.
    """
    types = dict(x=x, out=x, row_scale="*fp32", blocks=size, total=size, a="*i32", b="*fp32")
    types |= dict(out_codes="*u8", out_scales="*u8")
    for name, (kernel, constants) in _format_kernels(block).items():
        ptx = build(kernel, arch, constants, types, enable_fp_fusion=False).asm["ptx"]
        divides = name not in ("dequantize", "partial_amax")
        assert ("div.rn.f32" in ptx) == divides, name
        for inexact in (".ftz", "div.full", "div.approx", "rcp"):
            assert inexact not in ptx, (name, inexact)
        assert not re.findall(r"\b(?:mul|add|sub|fma)\.f32", ptx), name
        encodes = name not in ("dequantize", "partial_amax", "computed_scale")
        assert encodes or "fma.rn.f32" not in ptx, name
