"""The benchmark's report, from a small made result; and that the benchmark itself says what it lacks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

ERRORS = {"out": 0.005, "x": 0.006}
CASE = dict(name="small", t=2, h=4, i=8, e=3, k=1, r=1, skew=0.0)


def made_row(both: float, errors: dict[str, float] | None = None, **other: Any) -> dict[str, Any]:
    return dict(fwd_ms=both / 3, fwd_bwd_ms=both, saved_mib=10.0, peak_mib=20.0, errors=errors) | other


def made_result(**rows: dict[str, Any] | None) -> dict[str, Any]:
    case = dict(case=CASE, matmul_floor_ms=0.5, memory_floor_ms=1.0, results=rows)
    return dict(date="2026-01-02", device="a card", versions={"torch": "2.13.0", "triton": "3.7.1"}, command="python x",
                matmul_tflops=700.0, copy_gbytes=4000.0, repeats=3, cases=[case])  # fmt: skip


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)


def report(result: dict[str, Any], folder: Path, *flags: object) -> str:
    (folder / "result.json").write_text(json.dumps(result))
    done = run(BENCHMARKS / "report.py", folder / "result.json", "--out", folder / "RESULTS.md", *flags)
    assert done.returncode == 0, done.stderr
    return (folder / "RESULTS.md").read_text()


def test_report(tmp_path: Path) -> None:
    rows = {
        "torch_nvfp4 eager": made_row(4.0, ERRORS),
        "torch_nvfp4 CUDA graph": made_row(2.0, {"out": 0.01, "x": float("nan")}, saved_mib=None, peak_mib=None),
        "packed compiled": None,
        "resident compiled": made_row(3.0, ERRORS),
    }
    text = report(made_result(**rows), tmp_path)
    assert (tmp_path / "RESULTS.png").read_bytes().startswith(b"\x89PNG")
    for line in (
        "2026-01-02, a card, torch 2.13.0, triton 3.7.1; medians of 3. "
        "bf16 products ran at 700 TFLOP/s, copies at 4000 GB/s.",
        "    python x",
        "![forward + backward as a multiple of the floor](RESULTS.png)",
        "## small (T 2, H 4, I 8, E 3, K 1, R 1): floor 1.000 ms",
        "| torch_nvfp4 eager | 1.333 | 4.000 | 2.00 | 4.00 | 10 | 20 | 0.00600 (x) |",
        "| torch_nvfp4 CUDA graph | 0.667 | 2.000 | 1.00 | 2.00 | – | – | nan (x) |",
        "| packed compiled | out of memory | – | – | – | – | – | – |",
        "- torch_nvfp4 eager: error at most 1.00 times resident bf16's, within 1.2 on every result",
        "- torch_nvfp4 CUDA graph: error at most 2.00 times resident bf16's, beyond 1.2 on out 2.00, x nan",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize("rows", [{}, {"packed eager": None}, {"resident eager": made_row(1.0)}], ids=len)
def test_report_of_what_is_there(tmp_path: Path, rows: dict[str, Any]) -> None:
    text = report(made_result(**rows), tmp_path, "--plot", tmp_path / "plot.svg")
    assert "## small" in text and "(plot.svg)" in text and "<svg" in (tmp_path / "plot.svg").read_text()
    text = report(made_result() | {"cases": []}, tmp_path, "--plot", "none")
    assert "##" not in text and "![" not in text


def test_report_of_several_runs(tmp_path: Path) -> None:
    numbers = dict(tokens_per_second=1234.4, step_seconds=0.5, first_steps_seconds=[20.0, 0.5], resident_gib=18.0,
                   peak_gib=33.04, graphs=1, graph_breaks=0, graphs_after_warm_up=2)  # fmt: skip
    training = dict(date="2026-01-03", device="a card", versions={"torch": "2.13.0"}, command="python train", rank=16,
                    model="small", row="layers", seq_len=4096, layers=48, result=numbers)  # fmt: skip
    runs = [made_result(**{"resident eager": made_row(1.0)}), made_result(), training]
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, content in zip(paths, runs, strict=True):
        path.write_text(json.dumps(content))
    done = run(BENCHMARKS / "report.py", *paths, "--out", tmp_path / "RESULTS.md", "--plot", "none")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("## small") == 2 and text.count("    python x") == 2
    assert "| small, 48 | layers | 4096 | 16 | 1234 | 0.500 | 20.0 | 18.0 | 33.0 | 1 | 0 | 2 |" in text
    assert text.endswith("2026-01-03, a card, torch 2.13.0:\n\n    python train\n")


def test_results_are_of_the_kept_runs(tmp_path: Path) -> None:
    kept = sorted((BENCHMARKS / "results").glob("*.json"))
    done = run(BENCHMARKS / "report.py", *kept, "--out", tmp_path / "RESULTS.md")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "RESULTS.md").read_text() == (BENCHMARKS / "RESULTS.md").read_text()


def test_a_small_model_trains_from_a_checkpoint_that_the_benchmark_wrote(tmp_path: Path) -> None:
    flags = ("--model", "tiny", "--row", "eager", "--seq-len", "16", "--steps", "4", "--folder", tmp_path / "model")
    done = run(BENCHMARKS / "train_model.py", *flags, "--out", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["result"]["tokens_per_second"] > 0 and told["result"]["graph_breaks"] == 0
    assert report(told, tmp_path, "--plot", "none").count("| tiny, 3 | eager | 16 | 16 |") == 1


def test_benchmark_says_what_it_can_do_and_what_it_lacks() -> None:
    done = run(BENCHMARKS / "moe_layer.py", "--help")
    assert done.returncode == 0 and "resident compiled" in " ".join(done.stdout.split()), done.stderr
    for script in ("moe_layer.py", "dense_limit.py"):
        if not torch.cuda.is_available():
            done = run(BENCHMARKS / script)
            assert done.returncode == 2 and "there is none" in done.stderr


def test_bytes_of_the_launches_beside_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row with H = I = 1, in numbers: gathers 4, GLU 3, shrink 1, GLU backward 6, gradients 5, combine 4."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from dense_limit import other_bytes
    from moe_cases import Case

    assert other_bytes(Case("one", t=1, h=1, i=1, e=1, k=1, r=1)) == 2 * (4 + 3 + 1 + 6 + 5 + 4)
    assert other_bytes(Case("a large rank", t=1, h=1, i=1, e=1, k=1, r=17)) == 2 * (4 + 3 + 1 + 6 + 2 + 5 + 4)


GPT_OSS = dict(activation="swiglu_oai", limit=7.0, bias=True, format="mxfp4")


@pytest.mark.parametrize("kind", [{}, GPT_OSS], ids=["silu", "gpt-oss"])
def test_rows_and_reference_compute_one_layer(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from moe_cases import RESULTS, Case, Inputs
    from moe_layer import ROWS, relative_error
    from torch_layers import reference

    inputs = Inputs(Case("tiny", t=24, h=64, i=32, e=4, k=2, r=16, **kind), "cpu")
    for row in ROWS:
        if row.compile:
            continue
        out = row.forward(inputs)()
        results = (out.detach(), *torch.autograd.grad(out, inputs.leaves, inputs.grad))
        # 4-bit activations have no reference of their own: they are as far from the exact ones as 4 bits are.
        expected = reference(inputs, row.held or "packed")
        for name, a, b in zip(RESULTS, results, expected, strict=True):
            assert relative_error(a, b) < (0.02 if row.held else 0.3), (row.name, name)


@pytest.mark.gpu
def test_benchmark_on_one_token(tmp_path: Path) -> None:
    flags = ("--cases", "qwen3-30b-a3b-1", "--repeats", "2", "--out", tmp_path / "result.json")
    done = run(BENCHMARKS / "moe_layer.py", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["cases"][0]["results"]) == 10
    assert "qwen3-30b-a3b-1" in report(result, tmp_path, "--plot", "none")
