"""What was seen, sorted into one line for each op and path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .report import OpReport
from .watch import Launch, OpRun, PlainOps, Watch, tile_sizes

_CPU = "the tensors are on the CPU; Triton kernels and templates need a CUDA device"
_BLOCK_SCALED = "matrix instructions take the weight's codes and block scales, and those of 4-bit rows, as they are"
_EMULATED = "4-bit rows are multiplied as the exact values of their codes and block scales, in the activation's dtype: "
_EMULATED_MX = "a block-scaled instruction takes one format of scales, and this weight's are MXFP4"
_EMULATED_CARD = "Triton emits block-scaled instructions for sm_100, sm_103, sm_120 and, from 3.8 on, sm_121 only"
_PLAIN = "no kernel of the library computes it"


def observed_ops(watch: Watch, sizes: Watch, generated: Sequence[Any], compiled: bool) -> list[OpReport]:
    """Ops by path: those whose kernels were called, and those that `sizes` (an eager run) has and generated code took.

    Generated code's sizes are those of the eager run, so what fusion saves is not subtracted.
    """
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[OpRun]] = {}
    for run in watch.runs:
        groups.setdefault((run.op, *_path(run, compiled), tuple(map(_line, run.launches))), []).append(run)
    reports = [
        OpReport(op, path, why, len(runs), kernels, len(kernels) * len(runs), _sum(runs, "nbytes"), _sum(runs, "flops"))
        for (op, path, why, kernels), runs in groups.items()
    ]
    called = Counter(run.op for run in watch.runs)
    for op, wanted in Counter(run.op for run in sizes.runs).items():
        if called[op] < wanted:
            lowered = [run for run in sizes.runs if run.op == op][called[op] :]
            reports.append(_lowered(op, lowered, generated))
    order = list(dict.fromkeys(run.op for run in sizes.runs))
    return sorted(reports, key=lambda report: order.index(report.op) if report.op in order else len(order))


def _path(run: OpRun, compiled: bool) -> tuple[str, str]:
    """(path, why)."""
    caller = "; generated code calls it, as no lowering took it" if compiled else ""
    if run.device == "cpu":
        return "CPU kernel", _CPU + caller
    if not run.launches:
        return "plain torch", _PLAIN + caller
    if any(launch.decodes_to_scratch for launch in run.launches):
        return "decode to scratch", "an expert has rows enough to pay for decoding its weight once" + caller
    if any(launch.is_block_scaled for launch in run.launches):
        return "block-scaled product", _BLOCK_SCALED + caller
    if any(launch.kernel == "quantize_rows" for launch in run.launches):
        mx = any(dict(launch.constants).get("B") == "32" for launch in run.launches)
        return "emulated w4a4", _EMULATED + (_EMULATED_MX if mx else _EMULATED_CARD) + caller
    return "Triton kernel", "; ".join(["the tensors are on a CUDA device", *run.reasons]) + caller


def _lowered(op: str, runs: list[OpRun], generated: Sequence[Any]) -> OpReport:
    launches = [g for g in generated if f"nvfp4.{op}" in g.ops or f"_{op}_" in g.kernel]
    template = any(g.is_template for g in launches)
    kernels = tuple(f"{g.kernel} {tile_sizes(g.constants)}".rstrip() for g in launches)
    path, why = "Inductor template" if template else "Inductor", "a lowering put it into generated code"
    return OpReport(op, path, why, len(runs), kernels, len(kernels), _sum(runs, "nbytes"), _sum(runs, "flops"))


def plain_ops(watch: Watch, plain: PlainOps, compiled: bool) -> list[OpReport]:
    """The library's launches outside its ops, and plain torch around them."""
    # Generated code launches for ops, whose bytes are counted there.
    why = "launched by generated code for an op above" if compiled else "part of a layer that is no op"
    reports = []
    for line, launches in _by_line(watch.loose).items():
        total = 0 if compiled else sum(launch.nbytes for launch in launches)
        name, calls = launches[0].kernel, len(launches)
        reports.append(OpReport(name, "Triton kernel", why, calls, (line,), calls, total))
    if plain.ops:
        names = ", ".join(f"{op.calls} x {name}" for name, op in plain.ops.items())
        calls, total = (sum(getattr(op, part) for op in plain.ops.values()) for part in ("calls", "nbytes"))
        reports.append(OpReport("plain torch", "plain torch", f"what is around the ops: {names}", calls, nbytes=total))
    return reports


def _by_line(launches: list[Launch]) -> dict[str, list[Launch]]:
    lines: dict[str, list[Launch]] = {}
    for launch in launches:
        lines.setdefault(_line(launch), []).append(launch)
    return lines


def _line(launch: Launch) -> str:
    return f"{launch.kernel} {launch.config}".rstrip()


def _sum(runs: list[OpRun], part: str) -> int:
    return sum(getattr(run, part) for run in runs)
