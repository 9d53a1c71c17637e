"""Lowerings of the grouped ops: what one eager launcher does in sequence becomes several nodes of Inductor's graph.

An op is the gather of its rows with the LoRA shrink (one launch), then the product (see `products.py`).
"""

from collections.abc import Callable
from typing import Any

import torch

from torch_nvfp4.ops import cuda

from . import configs, multiply
from .compat import TensorBox, device_of, empty, fallback_handler, guard_int, hint, is_known_to_be, lowerings, tunes
from .graph import Routed, Weight, expert_sizes, times, timing_inputs
from .kernels import glu, shrink, wgrad
from .kernels import glu_backward as glu_backward_kernels
from .launch import cdiv, padded_rank, precision
from .products import Adapter, dgrad, linear, linear_way
from .templates import OUTPUT, TRITON_NAMES, Grid, Launch, Variant

aten, prims = torch.ops.aten, torch.ops.prims


_PLAIN = {"compute": "w4a16", "merge_aware": False, "input_scale": None}
"""What the templates compute; anything else is the eager kernel's."""


def _lowers(op: Any, lower: Callable[..., Any]) -> Callable[..., Any]:
    """`lower`, or the eager kernel as one call where there is no template for the arguments or nothing to do.

    Merge-aware products are such calls: their weights are merged in slices to a scratch.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        numbers = {name: kwargs.pop(name) for name in _PLAIN if name in kwargs}
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, TensorBox)]
        first = tensors[0]
        empty_input = any(is_known_to_be(size, 0) for t in tensors for size in t.get_size())
        supported = first.get_dtype() in TRITON_NAMES and _runs_on(device_of(first))
        plain = all(_PLAIN[name] == value for name, value in numbers.items())
        if empty_input or not supported or not plain:
            return fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs, **numbers)
        return lower(*args, **kwargs)

    return run


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and cuda.unsupported(device.index) is None


def _gather_and_shrink(
    x: Routed, factor: TensorBox | None, scaling: float, out_width: int | None, *, by_rank: bool,
    order: int = shrink.PLAIN.value, x_order: int = shrink.PLAIN.value,
) -> tuple[TensorBox | None, TensorBox]:  # fmt: skip
    """(the routed rows in a column order, u = scaling · rows f); without `out_width` the rows stay where they are."""
    r = 0 if factor is None else guard_int(factor.get_size()[1 if by_rank else 2])
    u = empty([x.m, r], x.dtype, x.device)
    if out_width is None and factor is None:
        return None, u
    ranks = min(padded_rank(r), configs.SHRINK_RANKS)
    constants = dict(
        x_stride=x.width, scaling=float(scaling), lora_r=r, top_k=x.top_k, WIDTH=x.width, OUT_WIDTH=out_width or 0,
        FACTOR_WIDTH=0 if factor is None else guard_int(factor.get_size()[2 if by_rank else 1]), R=ranks,
        ROWS=configs.SHRINK.rows, COLUMNS=configs.SHRINK.columns, BY_RANK=by_rank, X_ORDER=x_order, ORDER=order,
        PRECISION=precision(x.dtype), DTYPE=x.dtype, **expert_sizes(x.e),
    )  # fmt: skip
    way = Variant({}, Grid(configs.SHRINK.rows, x.e, y=cdiv(r, ranks) if r else 1))
    tensors = {"x": x.tensor, "slots": x.slots, "offsets": x.offsets, "factor": factor}
    if out_width is None:
        return None, Launch(shrink.shrink, tensors | {"u": OUTPUT}, constants, x.m, [x.m, r], x.dtype).run(way)
    second = {"u": u} if r else {}
    launch = Launch(
        shrink.shrink, tensors | second | {"out": OUTPUT}, constants, x.m, [x.m, out_width], x.dtype, list(second)
    )
    return launch.run(way), u


def grouped_lora_linear(
    x: TensorBox, rows: TensorBox | None, offsets: TensorBox, codes: TensorBox, scales: TensorBox,
    global_scale: TensorBox, lora_a: TensorBox | None = None, lora_b: TensorBox | None = None,
    bias: TensorBox | None = None, *, scaling: float = 1.0, top_k: int = 1,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    weight, adapter = Weight.of(codes, scales, global_scale), Adapter(lora_b, bias)
    routed = Routed(x, rows, offsets, weight.e, top_k)
    way, path = linear_way(routed, weight, adapter, lora_a)
    gathered, u = _gather_and_shrink(
        routed, lora_a, scaling, multiply.row_width(weight.c, path), by_rank=True, order=multiply.ORDER[path]
    )  # fmt: skip
    assert gathered is not None
    return linear(Routed(gathered, None, offsets, weight.e), weight, adapter, u).run(way), u


def glu_grouped_lora_linear(
    pre: TensorBox, topk_weights: TensorBox, rows: TensorBox, offsets: TensorBox, codes: TensorBox,
    scales: TensorBox, global_scale: TensorBox, lora_a: TensorBox | None = None, lora_b: TensorBox | None = None,
    bias: TensorBox | None = None, *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    weight = Weight.of(codes, scales, global_scale)
    slot_weights = lowerings[aten.reshape](topk_weights, [-1])
    adapter = Adapter(lora_b, bias, rows, slot_weights)
    m, dtype = pre.get_size()[0], pre.get_dtype()
    way, path = linear_way(Routed(pre, None, offsets, weight.e), weight, adapter, lora_a)
    width = multiply.row_width(weight.c, path)
    h = Launch(
        glu.glu_forward,
        {"pre": pre, "slot_weights": slot_weights, "slots": rows, "offsets": offsets, "h": OUTPUT},
        dict(
            pre_stride=guard_int(pre.get_size()[1]), E=weight.e, WIDTH=weight.c, H_WIDTH=width, ROWS=configs.GLU_ROWS,
            COLUMNS=configs.GLU_COLUMNS, ORDER=multiply.ORDER[path], ACTIVATION=activation, LIMIT=limit, DTYPE=dtype,
        ),
        m, [m, width], dtype,
    ).run(Variant({}, Grid(configs.GLU_ROWS, 1, cdiv(width, configs.GLU_COLUMNS))))  # fmt: skip
    routed = Routed(h, None, offsets, weight.e)
    _, u = _gather_and_shrink(routed, lora_a, scaling, None, by_rank=True, x_order=multiply.ORDER[path])
    return linear(routed, weight, adapter, u).run(way), u


def grouped_lora_dgrad(
    gy: TensorBox, rows: TensorBox | None, offsets: TensorBox, codes: TensorBox, scales: TensorBox,
    global_scale: TensorBox, lora_a: TensorBox | None = None, lora_b: TensorBox | None = None,
    v: TensorBox | None = None, *, scaling: float = 1.0, top_k: int = 1, need_gx: bool = True,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    weight = Weight.of(codes, scales, global_scale)
    routed = Routed(gy, rows, offsets, weight.e, top_k)
    width = weight.n if need_gx and rows is not None else None
    gathered, new_v = _gather_and_shrink(routed, lora_b if v is None else None, scaling, width, by_rank=False)
    if v is None:
        v = new_v
    else:
        new_v = empty([0, v.get_size()[1]], routed.dtype, routed.device)
    if not need_gx:
        return empty([0, weight.c], routed.dtype, device_of(gy)), new_v
    if gathered is not None:
        routed = Routed(gathered, None, offsets, weight.e)
    return dgrad(routed, weight, lora_a, v), new_v


def grouped_lora_wgrad(
    p: TensorBox, p_rows: TensorBox | None, q: TensorBox, q_rows: TensorBox | None, offsets: TensorBox,
    *, dtype: torch.dtype, top_k: int = 1,
) -> TensorBox:  # fmt: skip
    e = guard_int(offsets.get_size()[0])
    sides = [Routed(p, p_rows, offsets, e, top_k), Routed(q, q_rows, offsets, e, top_k)]
    out_sizes = [e, *(side.width for side in sides)]
    p_is_narrow = sides[0].width <= sides[1].width
    narrow, wide = sides if p_is_narrow else reversed(sides)
    block = min(padded_rank(narrow.width), 64)
    tiles = cdiv(narrow.width, block) * cdiv(wide.width, configs.WGRAD_WIDE)
    splits = configs.wgrad_splits(hint(narrow.m), e * tiles)
    tensors = {
        "narrow": narrow.tensor, "narrow_slots": narrow.slots, "wide": wide.tensor, "wide_slots": wide.slots,
        "offsets": offsets, "out": OUTPUT,
    }  # fmt: skip
    constants = dict(
        narrow_stride=narrow.width, narrow_width=narrow.width, wide_stride=wide.width, wide_width=wide.width,
        out_split_stride=e * narrow.width * wide.width, out_expert_stride=narrow.width * wide.width,
        out_narrow_stride=wide.width if p_is_narrow else 1, out_wide_stride=1 if p_is_narrow else narrow.width,
        top_k=top_k, NARROW=block, WIDE=configs.WGRAD_WIDE, PRECISION=precision(wide.dtype),
        DTYPE=wide.dtype,
    )  # fmt: skip
    launch = Launch(
        wgrad.wgrad, tensors, constants, narrow.m, out_sizes if splits == 1 else [splits, *out_sizes],
        dtype if splits == 1 else torch.float32,
        generators={name: timing_inputs(narrow.m, e)["slots"] for name in ("narrow_slots", "wide_slots")}
        | {"offsets": timing_inputs(narrow.m, e)["offsets"]},
    )  # fmt: skip
    grid = Grid(extra=tiles, y=e, z=splits, per_row=False)
    ways = [Variant({"ROWS": rows}, grid, stages=stages) for rows, stages in configs.WGRAD_CANDIDATES]
    with times(narrow):
        out = launch.run(*ways if tunes() else ways[:1])
    if splits == 1:
        return out
    return lowerings[prims.convert_element_type.default](lowerings[aten.sum.dim_IntList](out, [0]), dtype)


def glu_backward(
    pre: TensorBox, topk_weights: TensorBox, gh: TensorBox | None, rows: TensorBox, offsets: TensorBox,
    gy: TensorBox | None = None, gy_rows: TensorBox | None = None, bias: TensorBox | None = None,
    lora_b: TensorBox | None = None,
    *, scaling: float = 1.0, activation: str = "silu", limit: float | None = None,
    need_gpre: bool = True, need_h: bool = True, need_gw: bool = True,
) -> tuple[TensorBox, TensorBox, TensorBox, TensorBox]:  # fmt: skip
    (m, pre_width), dtype, device = pre.get_size(), pre.get_dtype(), device_of(pre)
    pre_width, e = guard_int(pre_width), guard_int(offsets.get_size()[0])
    halves = 1 if activation == "relu2" else 2
    width, r = pre_width // halves, 0 if lora_b is None else guard_int(lora_b.get_size()[2])
    tokens, top_k = topk_weights.get_size()
    use_bias = bias is not None and gy is not None and need_gw
    rows_each = configs.rows_per_expert(hint(m), e)
    way = configs.glu_backward_way(rows_each, dtype, width, r, need_gw=need_gw, bias=use_bias)
    config, chunks, ranks = way.config, way.chunks, padded_rank(r) if way.makes_v else 0
    of_slots, of_ranks = ([m], topk_weights.get_dtype()), ([m, r], dtype)
    of_rows, of_chunks = (
        _Results(device, {
            "gpre": (need_gpre, [m, pre_width], dtype),
            "h": (need_h, [m, width], dtype),
            "gw": (need_gw and not way.sums_gw, *of_slots),
            "gw_chunks": (way.sums_gw, [chunks, m], torch.float32),
            "v_chunks": (way.makes_v, *(([chunks, m, r], torch.float32) if way.sums_v else of_ranks)),
        }),
        _Results(device, {"gw": (way.sums_gw, *of_slots), "v": (way.sums_v, *of_ranks)}),
    )  # fmt: skip
    of_rows.run(
        glu_backward_kernels.glu_backward,
        {
            "pre": pre, "slot_weights": lowerings[aten.reshape](topk_weights, [-1]), "gh": gh, "slots": rows,
            "offsets": offsets, "lora_b": lora_b if way.makes_v else None,
        },
        dict(
            pre_stride=pre_width, lora_r=r, scaling=float(scaling), WIDTH=width, R=ranks,
            ACTIVATION=activation, LIMIT=limit, PRECISION=precision(dtype), **config.constants(width, halves),
            **expert_sizes(e),
        ),
        m, Variant({}, Grid(config.rows, e, chunks), config.warps, config.stages),
    )  # fmt: skip
    n = guard_int(bias.get_size()[1]) if use_bias and bias is not None else 0
    of_chunks.run(
        glu_backward_kernels.sum_chunks,
        {
            "gw_chunks": of_rows.made["gw_chunks"] if way.sums_gw else None,
            "v_chunks": of_rows.made["v_chunks"] if way.sums_v else None,
            "slots": rows, "offsets": offsets, "gy": gy if use_bias else None,
            "gy_slots": gy_rows if use_bias else None, "bias": bias if use_bias else None,
        },
        dict(
            gy_stride=n, top_k=guard_int(top_k), lora_r=r, N=n, CHUNKS=chunks, R=ranks,
            ROWS=configs.SUM_ROWS, COLUMNS=configs.SUM_COLUMNS, **expert_sizes(e),
        ),
        m, Variant({}, Grid(configs.SUM_ROWS, e)),
    )  # fmt: skip
    gpre, of_gw = of_rows.made["gpre"], of_chunks if way.sums_gw else of_rows
    gw = lowerings[aten.reshape](of_gw.made["gw"], [tokens if need_gw else 0, top_k])
    if not r:
        v = empty([m, 0], dtype, device)
    elif way.makes_v:
        v = of_chunks.made["v"] if way.sums_v else of_rows.made["v_chunks"]
    else:
        _, v = _gather_and_shrink(Routed(gpre, None, offsets, e), lora_b, scaling, None, by_rank=False)
    return gpre, of_rows.made["h"], gw, v


class _Results:
    """The tensors that one launch makes, of some of which nothing is needed: name -> (needed, sizes, dtype)."""

    def __init__(self, device: torch.device, wanted: dict[str, tuple[bool, list[Any], torch.dtype]]) -> None:
        self.wanted = wanted
        self.needed = [name for name, (needed, _, _) in wanted.items() if needed]
        self.made = {
            name: empty(sizes if needed else [0, *sizes[1:]], dtype, device)
            for name, (needed, sizes, dtype) in wanted.items()
        }

    def run(self, kernel: Any, given: dict[str, Any], constants: dict[str, Any], m: Any, way: Variant) -> None:
        """Launch what makes them; where nothing is needed, nothing is launched."""
        if not self.needed:
            return
        first, *others = self.needed
        tensors = {**given, **{name: self.made[name] for name in others}, first: OUTPUT}
        _, sizes, dtype = self.wanted[first]
        self.made[first] = Launch(kernel, tensors, constants, m, sizes, dtype, others).run(way)


def lowered(op: str) -> Callable[..., Any]:
    """The lowering of one of the ops above."""
    return _lowers(getattr(torch.ops.nvfp4, op).default, globals()[op])
