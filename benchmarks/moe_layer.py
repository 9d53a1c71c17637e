"""One MoE layer with LoRA on a CUDA card, forward and forward + backward, against what public torch gives.

Baselines of the same run, fifteen lines of torch each, eager and compiled: `packed` dequantises all experts with bit
arithmetic and multiplies with `torch._grouped_mm`; `resident` keeps the dense bf16 weights instead. The floor is the
larger of two: twice the forward's base FLOPs (frozen weights have no gradient) at the matrix rate, and the packed
weights read twice at the copy bandwidth, both as this run measures them.

Errors are relative, to float64 on the very weights that a row holds: the packed ones' exact values, those in bf16, or
the merged ones. The row with 4-bit activations has none: one that rounds to the next code is off by a whole step, so
that its distance to float64 says how many values lie near a border, and nothing of the kernels.

Run: `python benchmarks/moe_layer.py [--cases NAME …] [--only ROW …] [--out FILE.json]`, then
`python benchmarks/report.py FILE.json`. The file is written after each case.
"""

import argparse
import datetime
import gc
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from moe_cases import CASES, RESULTS, Case, Inputs, Kind
from report import BAR, OURS, case_lines
from torch import Tensor
from torch_layers import packed_layer, reference, resident_layer

from torch_nvfp4._explain.card import Card, measure, median_ms

Forward = Callable[[], Tensor]


def ours(
    x: Tensor, ids: Tensor, weights: Tensor, factors: list[Tensor], gate_up: Any, down: Any, kind: Kind, **numbers: Any
) -> Tensor:
    return torch.ops.nvfp4.moe_lora(
        x, ids, weights, *gate_up, *down, *factors, kind.gate_up_bias, kind.down_bias, activation=kind.activation,
        limit=kind.limit, **numbers,
    )  # fmt: skip


merge_aware = partial(ours, merge_aware=True)
w4a4 = partial(ours, compute="w4a4")


@dataclass(frozen=True)
class Row:
    """One way to run the layer. CUDA graphs are for few tokens, where the host's launches cost more than kernels.

    mode: torch.compile's; under `reduce-overhead` weights and factors lie where they lie, as a model's do.
    held: the weights that `reference` is to use, None where there is nothing to compare with.
    """

    name: str
    layer: Callable[..., Tensor]
    compile: bool = False
    graph: bool = False
    mode: str | None = None
    held: str | None = "packed"

    @property
    def is_baseline(self) -> bool:
        return not self.name.startswith(OURS)

    def fits(self, case: Case) -> bool:
        return not (self.graph or self.mode) or case.t <= 512

    def forward(self, inputs: Inputs) -> Forward:
        weights: list[Any] = [inputs.gate_up, inputs.down]
        if self.held == "bf16":
            weights = [torch.ops.nvfp4.dequantize(*packed, dtype=torch.bfloat16) for packed in weights]
        layer = torch.compile(self.layer, fullgraph=True, mode=self.mode) if self.compile else self.layer
        if self.mode == "reduce-overhead":
            for tensor in (*inputs.gate_up, *inputs.down, *inputs.factors):
                torch._dynamo.mark_static_address(tensor)
        return lambda: layer(inputs.x, inputs.ids, inputs.weights, inputs.factors, *weights, inputs.kind)


ROWS = (
    Row(f"{OURS} eager", ours),
    Row(f"{OURS} compiled", ours, compile=True),
    Row(f"{OURS} reduce-overhead", ours, compile=True, mode="reduce-overhead"),
    Row(f"{OURS} CUDA graph", ours, graph=True),
    Row(f"{OURS} merge-aware", merge_aware, held="merged"),
    Row(f"{OURS} w4a4", w4a4, held=None),
    Row("packed eager", packed_layer),
    Row("packed compiled", packed_layer, compile=True),
    Row("resident eager", resident_layer, held="bf16"),
    Row("resident compiled", resident_layer, compile=True, held="bf16"),
)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as a CUDA graph; a call replays it and returns the tensors that it wrote."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def relative_error(actual: Tensor, expected: Tensor) -> float:
    scale = expected.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return ((actual.float() - expected).norm() / scale).item()


def memory(inputs: Inputs, forward: Forward) -> tuple[int, int]:
    """(bytes that forward keeps for backward, peak of both) above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    saved = torch.cuda.memory_allocated() - before - out.nbytes
    torch.autograd.grad(out, inputs.leaves, inputs.grad)
    return saved, torch.cuda.max_memory_allocated() - before


def run_row(row: Row, inputs: Inputs, repeats: int, expected: list[Tensor] | None) -> dict[str, Any]:
    """Times, memory above what was resident (not known of a graph, which keeps its own), and errors."""
    forward = row.forward(inputs)

    def step() -> tuple[Tensor, ...]:
        out = forward()
        return (out.detach(), *torch.autograd.grad(out, inputs.leaves, inputs.grad))

    def inference() -> Tensor:
        with torch.no_grad():
            return forward()

    both: Callable[[], Any] = captured(step) if row.graph else step
    alone: Callable[[], Any] = captured(inference) if row.graph else inference
    results = both()
    errors = None
    if expected is not None:
        errors = {n: relative_error(a, b) for n, a, b in zip(RESULTS, results, expected, strict=True)}
    del results
    saved, peak = (None, None) if row.graph else (x / 2**20 for x in memory(inputs, forward))
    return dict(
        fwd_ms=median_ms(alone, repeats), fwd_bwd_ms=median_ms(both, repeats),
        saved_mib=saved, peak_mib=peak, errors=errors,
    )  # fmt: skip


def attempt(row: Row, inputs: Inputs, repeats: int, expected: list[Tensor] | None) -> dict[str, Any] | None:
    """As `run_row`; None where a baseline needs more memory than there is."""
    try:
        return run_row(row, inputs, repeats, expected)
    except torch.OutOfMemoryError:
        if not row.is_baseline:
            raise
        return None


def free() -> None:
    """Give back what a row held: its graphs' pools, its compiled code, what the allocator keeps."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def run_case(case: Case, rows: list[Row], repeats: int, card: Card, check: bool) -> dict[str, Any]:
    inputs = Inputs(case)
    results: dict[str, Any] = {}
    expected: dict[str, list[Tensor]] = {}
    for row in rows:
        if not row.fits(case):
            continue
        if check and row.held is not None and row.held not in expected:
            expected = {row.held: reference(inputs, row.held)}  # one at a time is in memory
            free()
        results[row.name] = attempt(row, inputs, repeats, expected.get(row.held or ""))
        free()
    flops, nbytes = 2 * case.forward_flops, 2 * case.weight_bytes
    return dict(case=asdict(case), matmul_floor_ms=card.floor_ms(flops, 0), memory_floor_ms=card.floor_ms(0, nbytes),
                results=results)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"An error is within the bar up to {BAR} times a resident row's."
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", help="rows: " + ", ".join(names))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--fast", action="store_true", help="10 repeats, and no baselines in eager mode")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="leave out the float64 reference")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a CUDA device, and there is none")
    return options


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    if options.only:
        return [row for row in ROWS if row.name in options.only]
    return [
        row for row in ROWS
        if not (row.is_baseline and (options.no_baselines or (options.fast and not row.compile)))
    ]  # fmt: skip


def main() -> None:
    options = parse()
    torch.backends.cuda.matmul.allow_tf32 = False
    repeats = min(options.repeats, 10) if options.fast else options.repeats
    card = measure()
    torch.cuda.empty_cache()
    result: dict[str, Any] = dict(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(), device=card.name,
        versions={"torch": torch.__version__, "triton": triton.__version__},
        command=shlex.join(["python", "benchmarks/moe_layer.py", *sys.argv[1:]]),
        matmul_tflops=card.flops / 1e12, copy_gbytes=card.bandwidth / 1e9, repeats=repeats, cases=[],
    )  # fmt: skip
    print(f"{card.name}: {card.flops / 1e12:.0f} TFLOP/s in bf16, {card.bandwidth / 1e9:.0f} GB/s", flush=True)
    for case in CASES:
        if case.name not in options.cases:
            continue
        result["cases"].append(run_case(case, chosen_rows(options), repeats, card, not options.no_check))
        print("\n".join(case_lines(result["cases"][-1])), flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
