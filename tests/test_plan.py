"""The calculator of layouts: held to what was measured, to models' own counts, and to its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scaling_doc import DOCS, MODELS, page

from torch_nvfp4._explain.model_config import ConfigError
from torch_nvfp4._plan.card import CARDS, FEW_TOLERANCE, LAYER_TOLERANCE, STEP_TOLERANCE, experts_seconds
from torch_nvfp4._plan.layout import Job, Layout, candidates, plan
from torch_nvfp4._plan.model import read_model
from torch_nvfp4._plan.report import choose, report
from torch_nvfp4.cli import run

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
QWEN_30B: dict[str, Any] = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip


def _cases() -> list[dict[str, Any]]:
    found = [case for file in sorted(RESULTS.glob("layer_*.json")) for case in json.loads(file.read_text())["cases"]]
    return [case for case in found if "torch_nvfp4 compiled" in case["results"]]


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case["case"]["name"])
def test_experts_take_what_was_measured(case: dict[str, Any]) -> None:
    sizes, measured = case["case"], case["results"]["torch_nvfp4 compiled"]["fwd_bwd_ms"]
    weights = sizes["e"] * 3 * sizes["h"] * sizes["i"] * 9 / 16
    rows = sizes["t"] * sizes["k"]
    found = 1e3 * experts_seconds(CARDS["h200"], rows, sizes["h"], sizes["i"], weights)
    tolerance = LAYER_TOLERANCE if rows >= 512 * sizes["e"] else FEW_TOLERANCE
    assert found == pytest.approx(measured, rel=tolerance)


def test_a_step_takes_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_30B))
    measured = json.loads((RESULTS / "training_1_packed.json").read_text())["result"]
    model = read_model(tmp_path, rank=16)
    found = plan(model, CARDS["h200"], Layout(1, 1, False), Job(4096, 1))
    assert found.step_s == pytest.approx(measured["step_seconds"], rel=STEP_TOLERANCE)
    assert found.peak / 2**30 == pytest.approx(measured["peak_gib"], rel=0.02)
    assert found.weights / 2**30 == pytest.approx(measured["resident_gib"], rel=0.002)


@pytest.mark.parametrize(("name", "billions"), list(zip(MODELS, (235.1, 671.0, 1026.4), strict=True)))
def test_parameters_are_what_the_makers_state(name: str, billions: float) -> None:
    assert read_model(DOCS / "scaling" / f"{name}.json", rank=16).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_the_page_is_what_the_calculator_prints() -> None:
    assert (DOCS / "scaling.md").read_text() == page(), "python tests/scaling_doc.py writes it anew"


def test_layouts_hold_all_weights_once() -> None:
    model = read_model(DOCS / "scaling" / "deepseek-v3.json", rank=16)
    job, card = Job(4096, 1), CARDS["h200"]
    whole = model.packed_bytes + model.plain_bytes
    for layout in candidates(model, 64):
        found = plan(model, card, layout, job)
        copies = found.weights * 64 / whole
        assert copies == pytest.approx(1, rel=1e-6) if layout.shard else copies > 1
        assert layout.gpus % layout.ep == 0 and model.experts % layout.ep == 0
        assert (found.exchanged > 0) == (layout.ep > 1)
        assert (found.gathered > 0) == layout.shard
    ep8 = plan(model, card, Layout(8, 8, False), job)
    assert ep8.weights == model.packed_bytes // 8 + model.plain_bytes


def test_the_choice_fits_or_says_what_would() -> None:
    model = read_model(DOCS / "scaling" / "kimi-k2.json", rank=16)
    small, large = (report(model, card, 8, Job(4096, 1)) for card in (CARDS["h100"], CARDS["b200"]))
    assert "None fits H100: EP 8 x FSDP2 needs" in small
    assert "the fastest that fits; too large: DDP" in large
    plans = [plan(model, CARDS["h200"], layout, Job(4096, 1)) for layout in candidates(model, 64)]
    chosen = choose(plans)
    assert chosen is not None and chosen.fits
    assert all(chosen.step_s <= 1.02 * other.step_s for other in plans if other.fits)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = DOCS / "scaling" / "qwen3-235b-a22b.json"
    assert run(["plan", "--model-config", str(file), "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed in page() + "\n"
    assert run(["plan", "--model-config", str(file), "--gpus", "12"]) == 2
    assert "--gpus is 12: above 8, whole nodes of 8" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in QWEN_30B.items() if k != "vocab_size"}))
    assert run(["plan", "--model-config", str(tmp_path), "--gpus", "8"]) == 2
    assert "does not give vocab_size" in capsys.readouterr().err


def test_experts_without_a_gate_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_30B | {"hidden_act": "relu2"}))
    with pytest.raises(ConfigError, match="without a gate"):
        read_model(tmp_path, rank=16)
