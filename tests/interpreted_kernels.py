"""Runs the eager CUDA launchers on CPU tensors under Triton's interpreter, against the CPU kernels of the same ops.

A program of its own: the interpreter has to be chosen before Triton is imported. `tests/test_kernels_interpreter.py`
runs it; by hand: `TRITON_INTERPRET=1 python tests/interpreted_kernels.py`.
The interpreter multiplies bf16 tiles as integers, so their products are taken in fp32 here; it also cuts fp32 off to
bf16 where hardware rounds, which is mended.
"""

import contextlib
import os
import types
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from strategies import make_layer, strided
from torch import Tensor

import torch_nvfp4  # noqa: F401  (registers the ops)
from torch_nvfp4.format import decode
from torch_nvfp4.lowering import configs, eager, merge
from torch_nvfp4.ops import cpu, routing

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def use_cpu_tensors() -> None:
    """Make the launchers run here, and the interpreter's `dot` right for bf16."""
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.current_device = lambda: None  # type: ignore[assignment,return-value]
    configs.device_limits = lambda device: (232_448, False)  # type: ignore[assignment]
    configs.family = lambda device: 8  # type: ignore[assignment]
    multiply_block_scaled(False)
    builder = interpreter.InterpreterBuilder
    plain_dot, plain_binary = builder.create_dot, builder.binary_op

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, widened(a), widened(b), *rest)

    def binary(self: Any, a: Any, b: Any, op: Any) -> Any:
        return narrowed(plain_binary(self, widened(a), widened(b), op)) if is_bf16(a) else plain_binary(self, a, b, op)

    plain_cast = builder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        return narrowed(source) if to.scalar == interpreter.tl.bfloat16 else plain_cast(self, widened(source), to)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """In float64, where the product of two fp32 numbers is exact; the interpreter rounds it first."""
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(np.float32), x.dtype.scalar)

    def inline_asm(self: Any, asm: str, constraints: str, values: Any, *rest: Any) -> Any:
        """The kernels run here have one instruction in PTX: a move, which only a compiler need not see through."""
        assert asm == "mov.b32 $0, $1;"
        return types.SimpleNamespace(get_result=lambda i: values[i])

    builder.create_inline_asm = inline_asm
    builder.create_dot, builder.binary_op, builder.cast_impl, builder.create_fma = dot, binary, cast, fma
    builder.create_dot_scaled = dot_scaled
    builder.get_bf16 = lambda self, value: narrowed(
        interpreter.TensorHandle(np.array([value], np.float32), interpreter.tl.float32)
    )


def multiply_block_scaled(yes: bool) -> None:
    """Play a card that has block-scaled products, or one that has none."""
    configs.first_block_scaled = lambda device: (3, 6) if yes else None  # type: ignore[assignment]


def dot_scaled(
    self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, fast: bool, a_packed: bool,
    b_packed: bool, acc: Any,
) -> Any:  # fmt: skip
    """The product of NVFP4 tiles by the format's own decoder; the interpreter has none."""
    assert a_format == b_format == interpreter._ir.ScaleDotElemTypeTY.E2M1 and a_packed and b_packed
    left, right = (
        decode(
            torch.from_numpy(np.ascontiguousarray(codes)), torch.from_numpy(scale.data).view(torch.float8_e4m3fn), F32
        )
        for codes, scale in ((a.data, a_scale), (b.data.T, b_scale))
    )
    return interpreter.TensorHandle((left @ right.t()).numpy() + acc.data, acc.dtype.scalar)


def is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == interpreter.tl.bfloat16


def widened(handle: Any) -> Any:
    """A bf16 tile, which the interpreter holds as its bits, as the fp32 numbers it stands for."""
    if not is_bf16(handle):
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)


def narrowed(handle: Any) -> Any:
    bits = torch.from_numpy(np.ascontiguousarray(handle.data, np.float32)).bfloat16().view(torch.uint16).numpy()
    return interpreter.TensorHandle(bits, interpreter.tl.bfloat16)


def compare(name: str, got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, (name, got.shape, wanted.shape, got.dtype)
    error = (got.double() - wanted.double()).norm()
    tolerance = 4 * torch.finfo(dtype).eps * wanted.double().norm() * 4
    assert error <= tolerance, f"{name}: {error:.3e} > {tolerance:.3e}"


def routed(offsets: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t[: int(offsets[-1])] if t.shape[0] else t for t in tensors)


def check_route() -> None:
    """Just below and above each limit: of the one launch, and then, in small, of blocks and chunks."""
    for slots, _ in configs.ROUTE_AT_ONCE:
        for m in (slots, slots + 1):
            check_routes(m, 5, torch.int64)
    configs.ROUTE_AT_ONCE, configs.ROUTE_BLOCK, configs.ROUTE_CHUNKS = ((16, 4),), 16, 4
    for m in (0, 1, 16, 17, 32, 63, 64, 65, 128, 129, 200):
        check_routes(m, 1, torch.uint8)
        check_routes(m, 5, torch.int64)
    check_routes(16, 40, torch.int32)
    check_routes(150, 130, torch.int16)
    for m in (9, 70):  # an id that a type without negative numbers has in place of -1 is an expert's
        check_routes(m, 300, torch.uint8)


def check_routes(m: int, e: int, dtype: torch.dtype) -> None:
    """One id a token: ids of any kind, of one expert, of none, and ones with gaps in memory."""
    hostile = torch.tensor([-2, -1, *range(e + 3), 127])[torch.randint(e + 6, (m, 1))].to(dtype)
    others = (torch.full((m, 1), i).to(dtype) for i in (e - 1, e))
    for ids in (hostile, *others, strided(hostile, "sliced")):
        for name, got, wanted in zip(
            ("rows", "inverse", "offsets"), eager.moe_route(ids, e), routing.moe_route(ids, e), strict=True
        ):
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype, (name, m, e, dtype)


def check_layer(
    merge_aware: bool = False, compute: str = "w4a16", input_scale: float | None = None, **sizes: object
) -> None:  # fmt: skip
    """Every grouped op of one layer, forward and backward, on the same inputs."""
    numbers: dict[str, Any]
    backward, numbers = {"merge_aware": merge_aware}, {"merge_aware": merge_aware, "compute": compute}
    if input_scale is not None:
        numbers["input_scale"] = torch.tensor(input_scale)
    layer = make_layer(**sizes)
    options = {k: layer.options[k] for k in ("activation", "limit")}
    dtype, top_k = layer.x.dtype, layer.topk_ids.shape[1]
    rows, inverse, offsets = routing.moe_route(layer.topk_ids, layer.gate_up_codes.shape[0])

    def projection(name: str) -> tuple[Tensor | None, ...]:
        return tuple(
            layer.tensors[f"{name}_{part}"] for part in ("codes", "scales", "global_scale", "lora_a", "lora_b")
        )

    def both(op: str, *args: object, **kwargs: object) -> list[Tensor]:
        got, wanted = getattr(eager, op)(*args, **kwargs), getattr(cpu, op)(*args, **kwargs)
        for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
            is_weights = op == "glu_backward" and i == 2
            compare(f"{op}[{i}]", *((g, w) if is_weights else routed(offsets, g, w)), dtype)
        # Rows without an expert hold anything: what follows must not read them.
        return [w if w.shape[:1] != rows.shape else _poisoned(w, offsets) for w in wanted]

    gate_up, down = projection("gate_up"), projection("down")
    pre, _ = both("grouped_lora_linear", layer.x, rows, offsets, *gate_up, layer.gate_up_bias, scaling=2.0, top_k=top_k,
                  **numbers)  # fmt: skip
    y, u = both("glu_grouped_lora_linear", pre, layer.topk_weights, rows, offsets, *down, layer.down_bias,
                scaling=0.5, **options, **numbers)  # fmt: skip
    out = routing.combine(y, inverse, top_k, dtype)
    compare("combine", eager.combine(y, inverse, top_k, dtype), out, dtype)
    gy = torch.randn(out.shape).to(dtype)
    gh, v = both("grouped_lora_dgrad", gy, rows, offsets, *down, scaling=0.5, top_k=top_k, **backward)
    gpre, h, _, v_up = both("glu_backward", pre, layer.topk_weights, gh, rows, offsets, gy, rows, layer.down_bias,
                            layer.gate_up_lora_b, scaling=2.0, **options)  # fmt: skip
    both("grouped_lora_dgrad", gpre, None, offsets, *gate_up, scaling=2.0, **backward)
    if v_up.shape[1]:
        both("grouped_lora_dgrad", gpre, None, offsets, *gate_up, v_up, scaling=2.0, **backward)
    for p, p_rows, q, q_rows in (
        (v, None, h, None),
        (gy, rows, u, None),
        (gpre, None, gpre.new_ones(len(rows), 1), None),
    ):
        if p.shape[1] and q.shape[1]:
            args = (p, p_rows, q, q_rows, offsets)
            got, wanted = (f(*args, dtype=F32, top_k=top_k) for f in (eager.grouped_lora_wgrad, cpu.grouped_lora_wgrad))
            compare("wgrad", got, wanted, dtype)


def check_glu_backward(
    dtype: torch.dtype, t: int, i: int, r: int, *, k: int = 2, e: int = 3, activation: str = "silu",
    limit: float | None = None, pattern: str = "minus_one", bias: bool = True, **needs: bool,
) -> None:  # fmt: skip
    """In tiles so small that columns come in chunks of several steps, where there are more than 32.

    Memory from the allocator holds NaN, and so do the rows of no expert: neither is read, nor those rows written.
    """
    layer = make_layer(t=t, k=k, e=e, pattern=pattern)
    rows, _, offsets = routing.moe_route(layer.topk_ids, e)
    halves = 1 if activation == "relu2" else 2
    pre, gh = (_poisoned(torch.randn(t * k, n).to(dtype), offsets) for n in (halves * i, i))
    down_bias, lora_b = (torch.randn(e, 24) if bias else None), (torch.randn(e, halves * i, r) if r else None)
    args = (pre, layer.topk_weights, gh, rows, offsets, torch.randn(t, 24).to(dtype), rows, down_bias, lora_b)
    options = dict(scaling=0.5, activation=activation, limit=limit, **needs)
    names = ("GLU_BACKWARD_CONFIGS", "GLU_BACKWARD_FP32", "GLU_BACKWARD_LARGE_RANK")
    plain, tables = Tensor.new_empty, {name: getattr(configs, name) for name in names}

    def poisoned(self: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
        memory = plain(self, *sizes, **kwargs)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    small = replace(configs.GLU_BACKWARD_FP32, rows=16, columns=16, span=32)
    configs.GLU_BACKWARD_CONFIGS, configs.GLU_BACKWARD_FP32, configs.GLU_BACKWARD_LARGE_RANK = (small,), small, small
    Tensor.new_empty = poisoned  # type: ignore[assignment]
    got = eager.glu_backward(*args, **options)
    Tensor.new_empty = plain  # type: ignore[method-assign]
    for name, table in tables.items():
        setattr(configs, name, table)
    for name, g, w in zip(("gpre", "h", "gw", "v"), got, cpu.glu_backward(*args, **options), strict=True):
        if name != "gw" and len(g):
            assert g[int(offsets[-1]) :].isnan().all(), name
            (g,), (w,) = routed(offsets, g), routed(offsets, w)
        compare(name, g, w, dtype)


def _poisoned(tensor: Tensor, offsets: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[int(offsets[-1]) :] = torch.nan
    return tensor


GLU_BACKWARDS: dict[str, dict[str, Any]] = {
    "odd rank, a last chunk in part": dict(dtype=BF16, t=9, i=80, r=3),
    "a rank that takes a shrink of its own": dict(dtype=BF16, t=20, i=50, r=70, bias=False),
    "one chunk of columns": dict(dtype=BF16, t=9, i=30, r=4, bias=False),
    "one chunk of columns, with a bias": dict(dtype=F16, t=9, i=30, r=4),
    "one chunk of columns, gw alone": dict(dtype=F32, t=5, i=30, r=0, bias=False, need_h=False, need_gpre=False),
    "one chunk of columns, nothing routed": dict(dtype=BF16, t=5, i=30, r=4, bias=False, pattern="none"),
    "fp32": dict(dtype=F32, t=9, i=40, r=17),
    "relu2, rank 1": dict(dtype=F16, t=20, i=100, r=1, activation="relu2"),
    "swiglu_oai": dict(dtype=BF16, t=7, i=100, r=4, activation="swiglu_oai", limit=0.5),
    "one token, 300 experts": dict(dtype=BF16, t=1, i=48, r=4, e=300, pattern="distinct"),
    "one expert takes all": dict(dtype=BF16, t=40, i=32, r=4, pattern="one_expert"),
    "nothing routed": dict(dtype=F32, t=5, i=48, r=4, pattern="none"),
    "no tokens": dict(dtype=BF16, t=0, i=48, r=4),
    "no LoRA": dict(dtype=BF16, t=9, i=80, r=0),
    "gpre and v alone": dict(dtype=BF16, t=9, i=80, r=4, need_h=False, need_gw=False),
    "gw alone": dict(dtype=BF16, t=9, i=80, r=0, need_h=False, need_gpre=False),
    "h alone": dict(dtype=BF16, t=9, i=80, r=0, need_gpre=False, need_gw=False),
}


LAYERS: dict[str, dict[str, Any]] = {
    "nvfp4 fp32": dict(dtype=F32, t=9),
    "nvfp4 bf16 bias": dict(dtype=BF16, bias=True, pattern="sentinel", h=48),
    "mxfp4 bf16 swiglu_oai": dict(dtype=BF16, fmt="mxfp4", activation="swiglu_oai", limit=0.5, bias=True, h=96, i=32),
    "fp16 relu2 one expert, rank 17": dict(dtype=F16, activation="relu2", pattern="one_expert", ranks=(17, 1), t=40),
    "gelu_tanh without LoRA, one scale": dict(dtype=F16, activation="gelu_tanh", ranks=(None, None), halves=1),
    "gelu, nothing routed": dict(dtype=F32, activation="gelu", pattern="none"),
    "few rows, swiglu_oai, ranks 5 and 3": dict(
        dtype=BF16, t=3, e=7, activation="swiglu_oai", limit=0.5, bias=True, pattern="minus_one", ranks=(5, 3)
    ),
    "values far apart, MXFP4": dict(
        dtype=F16, fmt="mxfp4", t=2, k=1, e=1, i=32, stride_of=lambda tensor: strided(tensor, "sliced")
    ),
    "no tokens": dict(dtype=BF16, t=0),
    "merge-aware bf16 bias": dict(dtype=BF16, bias=True, pattern="sentinel", h=48, t=40, e=5, merge_aware=True),
    "merge-aware mxfp4": dict(dtype=F32, fmt="mxfp4", h=96, i=32, merge_aware=True),
    "merge-aware, one projection": dict(dtype=BF16, ranks=(None, 3), merge_aware=True),
    "w4a4 bf16 bias": dict(dtype=BF16, bias=True, pattern="sentinel", h=48, i=80, t=40, compute="w4a4"),
    "w4a4 fp32 without LoRA below": dict(dtype=F32, t=9, ranks=(3, None), activation="gelu", compute="w4a4"),
    "w4a4 fp16 relu2, rank 17": dict(
        dtype=F16, activation="relu2", pattern="one_expert", ranks=(None, 17), t=40, h=304, compute="w4a4"
    ),
    "w4a4 mxfp4 swiglu_oai": dict(
        dtype=BF16,
        fmt="mxfp4",
        activation="swiglu_oai",
        limit=0.5,
        bias=True,
        h=96,
        i=32,
        compute="w4a4",
        stride_of=lambda tensor: strided(tensor, "sliced"),
    ),
    "w4a4 merge-aware mxfp4 fp16": dict(
        dtype=F16, fmt="mxfp4", bias=True, h=96, i=64, t=40, compute="w4a4", merge_aware=True
    ),
    "w4a4, no tokens": dict(dtype=BF16, t=0, compute="w4a4"),
    "w4a4, nothing routed": dict(dtype=BF16, pattern="none", compute="w4a4"),
    "w4a4 calibrated": dict(
        dtype=BF16, bias=True, pattern="sentinel", h=48, i=80, t=40, compute="w4a4", input_scale=0.0005
    ),
    "w4a4 merge-aware": dict(dtype=BF16, bias=True, pattern="minus_one", t=40, compute="w4a4", merge_aware=True),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    use_cpu_tensors()
    merge.SLICE_BYTES = 4096  # several slices of experts, even here
    check_route()
    print("route ok", flush=True)
    for case, sizes in GLU_BACKWARDS.items():
        check_glu_backward(**sizes)
        print(f"glu_backward, {case} ok", flush=True)
    for case, sizes in LAYERS.items():
        check_layer(**sizes)
        if "w4a4" in case and sizes.get("fmt") != "mxfp4":
            multiply_block_scaled(True)
            check_layer(**sizes)
            multiply_block_scaled(False)
        print(f"{case} ok", flush=True)
    many = {True: configs.SHRINK_MANY, False: configs.SHRINK}
    with mock.patch.object(configs, "shrink_config", lambda *_, gathers: many[gathers]):
        check_layer(dtype=BF16, pattern="sentinel", t=150, e=2, h=144, ranks=(5, 16))
    print("gathers of many rows ok", flush=True)
    print("all agree")
