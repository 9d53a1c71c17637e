"""The JSON of `moe_layer.py` and `train_model.py` as `RESULTS.md` and a plot beside it; cases and rows may be missing.

Run: `python benchmarks/report.py benchmarks/results/*.json [--out benchmarks/RESULTS.md] [--plot FILE.png|.svg]`; the
plot needs matplotlib (`pip install 'torch-nvfp4[demo]'`).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS = "torch_nvfp4"
RESIDENT = "resident"
BAR = 1.2
"""How many times a resident bf16 row's own error one of ours may be."""

COLUMNS = ("", "fwd ms", "fwd+bwd ms", "x best of ours", "x floor", "saved MiB", "peak MiB", "largest error")


def floor_ms(case: dict[str, Any]) -> float:
    return max(case["matmul_floor_ms"], case["memory_floor_ms"])


def measured(case: dict[str, Any], start: str = "") -> dict[str, dict[str, Any]]:
    """The rows that ran, or those whose names start so."""
    return {name: row for name, row in case["results"].items() if row is not None and name.startswith(start)}


def best_of_ours(case: dict[str, Any]) -> float | None:
    return min((row["fwd_bwd_ms"] for row in measured(case, OURS).values()), default=None)


def table(case: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line of cells for each row."""
    best, floor = best_of_ours(case), floor_ms(case)
    lines = [COLUMNS]
    for name, row in case["results"].items():
        if row is None:
            lines.append((name, "out of memory", *("–",) * 6))
            continue
        both = row["fwd_bwd_ms"]
        lines.append((
            name, f"{row['fwd_ms']:.3f}", f"{both:.3f}", "–" if best is None else f"{both / best:.2f}",
            f"{both / floor:.2f}", _mib(row["saved_mib"]), _mib(row["peak_mib"]), _largest_error(row["errors"]),
        ))  # fmt: skip
    return lines


def _mib(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _largest_error(errors: dict[str, float] | None) -> str:
    if not errors:
        return "–"
    name = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    return f"{errors[name]:.5f} ({name})"


def error_lines(case: dict[str, Any]) -> list[str]:
    """Whether each row of ours is within the bar: on every result, against the smallest error of a resident row."""
    theirs = [row["errors"] for row in measured(case, RESIDENT).values() if row["errors"]]
    lines = []
    for name, row in measured(case, OURS).items():
        if not theirs or not row["errors"]:
            continue
        ratios = {result: error / min(t[result] for t in theirs) for result, error in row["errors"].items()}
        missed = [f"{result} {ratio:.2f}" for result, ratio in ratios.items() if not ratio <= BAR]
        verdict = f"beyond {BAR} on " + ", ".join(missed) if missed else f"within {BAR} on every result"
        finite = [ratio for ratio in ratios.values() if ratio == ratio]
        largest = f"at most {max(finite):.2f} times" if finite else "never comparable with"
        lines.append(f"{name}: error {largest} resident bf16's, {verdict}")
    return lines


def case_title(case: dict[str, Any]) -> str:
    sizes = ", ".join(f"{letter.upper()} {case['case'][letter]}" for letter in "thiekr")
    return f"{case['case']['name']} ({sizes}): floor {floor_ms(case):.3f} ms"


def case_lines(case: dict[str, Any]) -> list[str]:
    """A case for the terminal."""
    rows = table(case)
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [case_title(case)]
    for name, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"  {name.ljust(widths[0])}  " + "  ".join(padded))
    return lines + [f"  {line}" for line in error_lines(case)]


def markdown(results: Sequence[dict[str, Any]], plot: Path | None) -> str:
    """Layers first, a section for each case; then whole models' training, a table of all rows."""
    layers = [result for result in results if "cases" in result]
    lines = ["# One MoE layer with LoRA, forward and backward"]
    if layers:
        lines += [
            "",
            "A floor is what the card's own matrix rate and copy bandwidth allow, both measured in the run. Errors are",
            "relative, to float64 on the weights that a row holds.",
        ]
    if plot is not None:
        lines += ["", f"![forward + backward as a multiple of the floor]({plot.name})"]
    for result in layers:
        lines += _run_lines(result)
        for case in result["cases"]:
            header, *rows = table(case)
            lines += ["", f"## {case_title(case)}", "", _cells(header), _cells(["---", *["---:"] * (len(header) - 1)])]
            lines += [_cells(row) for row in rows]
            errors = error_lines(case)
            lines += ["", *(f"- {line}" for line in errors)] if errors else []
    return "\n".join(lines + _training([result for result in results if "row" in result])) + "\n"


def _run_lines(result: dict[str, Any]) -> list[str]:
    rates = f"bf16 products ran at {result['matmul_tflops']:.0f} TFLOP/s, copies at {result['copy_gbytes']:.0f} GB/s."
    return ["", f"{_where(result)}; medians of {result['repeats']}. {rates}", "", f"    {result['command']}"]


def _where(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['date']}, {result['device']}, {versions}"


def _training(runs: list[dict[str, Any]]) -> list[str]:
    if not runs:
        return []
    header = (
        "model, layers", "row", "T", "R", "tokens/s", "step s", "first step s", "resident GiB", "peak GiB",
        "graphs", "graph breaks", "graphs after warm-up",
    )  # fmt: skip
    lines = ["", "# A whole model's training step", "", "What the rows are: `benchmarks/train_model.py`.", "",
             _cells(header), _cells(["---", "---", *["---:"] * (len(header) - 2)])]  # fmt: skip
    for run in runs:
        got = run["result"]
        lines.append(_cells((
            f"{run['model']}, {run['layers']}", run["row"], f"{run['seq_len']}", f"{run['rank']}",
            f"{got['tokens_per_second']:.0f}", f"{got['step_seconds']:.3f}", f"{got['first_steps_seconds'][0]:.1f}",
            f"{got['resident_gib']:.1f}", f"{got['peak_gib']:.1f}", f"{got['graphs']}", f"{got['graph_breaks']}",
            f"{got['graphs_after_warm_up']}",
        )))  # fmt: skip
    for where in dict.fromkeys(_where(run) for run in runs):
        commands = [f"    {run['command']}" for run in runs if _where(run) == where]
        lines += ["", f"{where}:", "", *commands]
    return lines


def _cells(row: Any) -> str:
    return "| " + " | ".join(row) + " |"


def write_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of forward + backward as multiples of the floor, a group for each case."""
    from matplotlib.figure import Figure

    cases = [case for result in results for case in result.get("cases", ()) if measured(case)]
    names = list(dict.fromkeys(name for case in cases for name in measured(case)))
    figure = Figure(figsize=(9, 1.2 + 0.2 * len(cases) * (len(names) + 1)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    height = 0.85 / max(len(names), 1)
    for i, name in enumerate(names):
        bars = [(y + i * height, measured(case)[name]["fwd_bwd_ms"] / floor_ms(case))
                for y, case in enumerate(cases) if name in measured(case)]  # fmt: skip
        axes.barh([y for y, _ in bars], [x for _, x in bars], height, align="edge", label=name)
    axes.set_yticks([y + 0.42 for y in range(len(cases))], [case["case"]["name"] for case in cases])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("forward + backward, times the floor")
    if names:
        axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "RESULTS.md")
    parser.add_argument("--plot", type=Path, help="default: beside --out, as .png; 'none' for no plot")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.json]
    plot = options.plot or options.out.with_suffix(".png")
    plot = None if str(plot) == "none" else plot
    if plot is not None:
        write_plot(results, plot)
    options.out.write_text(markdown(results, plot))


if __name__ == "__main__":
    main()
