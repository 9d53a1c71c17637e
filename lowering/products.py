"""The grouped products as nodes of Inductor's graph, and how each is chosen.

A product has rivals: templates of the same kernel with other tiles, and the eager launcher, which can do what a
template cannot (TMA descriptors, a bounded scratch, another kernel). They are timed under `max_autotune` only, on a
representative number of rows for the class that M / E falls in, so that neither the choice nor its key depends on a
symbolic T. Else the table decides.
"""

from dataclasses import dataclass

from . import configs, externs
from .compat import Extern, TensorBox, calls_python, empty, guard_int, tunes
from .graph import Routed, Weight, times, timing_inputs
from .kernels import grouped_gemm
from .launch import cdiv, padded_rank, padded_width, precision, product_dtype
from .multiply import Path
from .templates import OUTPUT, Grid, Launch, Rival, Variant

_LINEAR = Extern(externs.linear, "nvfp4_linear_product")
_DGRAD = Extern(externs.dgrad, "nvfp4_dgrad_product")


@dataclass(frozen=True)
class Adapter:
    """What the linear product adds: u times a factor, and a bias, weighted by slot or not."""

    lora_b: TensorBox | None
    bias: TensorBox | None = None
    slots: TensorBox | None = None
    slot_weights: TensorBox | None = None


def linear(x: Routed, weight: Weight, adapter: Adapter, u: TensorBox) -> Launch:
    """y = x Wᵀ and what is added to it, from rows already in the right column order."""
    _, has_tma = x.limits
    r = guard_int(u.get_size()[1])
    biased = adapter.bias is not None
    tensors = {
        "x": x.tensor, **weight.tensors, "lora_b": adapter.lora_b, "u": u if r else None, "bias": adapter.bias,
        "slots": adapter.slots if biased else None, "slot_weights": adapter.slot_weights if biased else None,
        "offsets": x.offsets, "y": OUTPUT,
    }  # fmt: skip
    constants = dict(
        lora_r=r, R=padded_rank(r), X_WIDTH=x.width, TMA=False, DTYPE=x.dtype,
        PRECISION=precision(x.dtype, weight.block), PACKED_ASM=weight.packed_asm(x.dtype, has_tma),
        WGMMA=configs.uses_wgmma(x.device.index, x.dtype),
        WEIGHTED_BIAS=biased and adapter.slots is not None, **weight.constants,
    )  # fmt: skip
    return Launch(
        grouped_gemm.grouped_linear, tensors, constants, x.m, [x.m, weight.n], x.dtype,
        generators=timing_inputs(x.m, weight.e),
    )  # fmt: skip


def _linear_templates(x: Routed, weight: Weight) -> list[Variant]:
    limit, _ = x.limits
    return [
        Variant(
            dict(TOKENS=c.tokens, OUTPUTS=c.outputs, BYTES=c.bytes, STAGES=c.stages),
            Grid(c.tokens, weight.e, cdiv(weight.n, c.outputs)), c.warps,
        )
        for c in configs.linear_candidates(x.per_expert, product_dtype(x.dtype, weight.block), limit)
    ]  # fmt: skip


def linear_way(x: Routed, weight: Weight, adapter: Adapter, lora_a: TensorBox | None) -> tuple[Variant | Rival, Path]:
    """How to run the linear product; it has to be known before its input exists, whose column order follows from it."""
    path = weight.path(x.tensor, x.m) if calls_python() else Path.LOOP
    launcher = Rival(_LINEAR, {"path": path.name})
    templates = _linear_templates(x, weight)
    if not tunes():
        return (launcher, path) if _launcher_first(x, path) else (templates[0], Path.LOOP)
    ways: list[Variant | Rival] = [*([launcher] if calls_python() else []), *templates]
    if path is not Path.LOOP:
        ways.append(Rival(_LINEAR, {"path": Path.LOOP.name}))
    r = 0 if lora_a is None else guard_int(lora_a.get_size()[1])
    rows = Routed(empty([x.m, padded_width(weight.c)], x.dtype, x.device), None, x.offsets, x.e)
    if path is Path.SCRATCH and rows.width != weight.c:
        ways = ways[:1]  # the two want rows of different widths
    with times(x):
        way = linear(rows, weight, adapter, empty([x.m, r], x.dtype, x.device)).fastest(*ways)
    return way, Path[way.options["path"]] if isinstance(way, Rival) else Path.LOOP


def _launcher_first(x: Routed, path: Path) -> bool:
    """Whether, untimed, the product is left to the eager launcher."""
    _, has_tma = x.limits
    return calls_python() and (path is not Path.LOOP or configs.launcher_first(x.per_expert, has_tma))


def dgrad(gy: Routed, weight: Weight, lora_a: TensorBox | None, v: TensorBox) -> TensorBox:
    limit, has_tma = gy.limits
    r = guard_int(v.get_size()[1])
    tensors = {
        "gy": gy.tensor, **weight.tensors, "lora_a": lora_a, "v": v if r else None, "offsets": gy.offsets,
        "gx": OUTPUT,
    }  # fmt: skip
    constants = dict(
        lora_r=r, R=padded_rank(r), TMA=False, PACKED_ASM=weight.packed_asm(gy.dtype, has_tma),
        PRECISION=precision(gy.dtype, weight.block), DTYPE=gy.dtype, **weight.constants,
    )  # fmt: skip
    launch = Launch(
        grouped_gemm.grouped_dgrad, tensors, constants, gy.m, [gy.m, weight.c], gy.dtype,
        generators=timing_inputs(gy.m, weight.e),
    )  # fmt: skip
    templates = [
        Variant(
            dict(TOKENS=c.tokens, BYTES=c.bytes, DEPTH=c.depth, STAGES=c.stages),
            Grid(c.tokens, weight.e, cdiv(weight.c // 2, c.bytes)), c.warps,
        )
        for c in configs.dgrad_candidates(gy.per_expert, product_dtype(gy.dtype, weight.block), limit)
    ]  # fmt: skip
    launcher = Rival(_DGRAD)
    if tunes():
        with times(gy):
            return launch.run(*([launcher] if calls_python() else []), *templates)
    path = weight.path(gy.tensor, gy.m, transposed=True)
    return launch.run(launcher if _launcher_first(gy, path) else templates[0])
