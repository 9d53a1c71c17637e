"""The demo's parts, small; the whole of it runs by `make demo`."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tiny import make_folder, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_nvfp4.train import demo, demo_base, demo_merge, demo_text
from torch_nvfp4.train.config import FinetuneError
from torch_nvfp4.train.demo_base import BaseRecipe, BaseReport
from torch_nvfp4.train.demo_merge import MergeFigures
from torch_nvfp4.train.report import FinetuneResult

BASE = BaseReport(parameters=1_000_000, held_out_loss=3.9, unigram_entropy=5.5, seconds=1.0)
RESULT = FinetuneResult(
    base_loss=5.0,
    quantized_loss=5.05,
    final_loss=3.9,
    expert_adapters_zeroed_loss=4.3,
    steps=10,
    tokens_per_second=1.0,
    peak_memory_bytes=1,
    predicted_peak_bytes=1,
    path="eager",
    experts_bytes_before=32_000,
    experts_bytes_after=4_600,
    adapter_dir=Path("adapter"),
    plot_path=Path("adapter/loss.png"),
    loss_history=(),
    eval_history=(),
)
PEFT_LOSS = 3.9005
ORDINARY = MergeFigures(beside=4.2, merged=4.3, trained=4.2, kept=0.1)
AWARE = MergeFigures(beside=4.4, merged=4.20005, trained=4.2, kept=0.5)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


# -- texts ---------------------------------------------------------------------------------------------------


def test_documentation_has_no_paragraph_twice_so_that_no_held_out_topic_is_learned() -> None:
    train, held_out = demo_text.hold_out(demo_text.documentation())
    assert len(train) >= 20 and len(held_out) >= 3
    learned = {" ".join(p.split()) for text in train for p in text.split("\n\n")}
    for text in held_out:
        assert not {" ".join(p.split()) for p in text.split("\n\n")} & learned


def test_repeats_are_dropped_from_the_shorter_text() -> None:
    texts = ["short\n\n  a  section", "long long long\n\na\nsection\n\nmore", "a section"]
    assert demo_text.drop_repeats(texts) == ["long long long\n\na\nsection\n\nmore", "short", ""]


def test_python_without_documentation_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FinetuneError, match="no documentation texts") as e:
        demo_text.documentation()
    assert "\n" not in str(e.value)


def write_files(folder: Path, count: int) -> None:
    for n in range(count):
        (folder / f"m{n:02}.py").write_text("x = 1\n" * 1000)


def test_source_files_are_the_same_every_time_and_split_by_file() -> None:
    files = demo_text.source_files()
    assert files == demo_text.source_files() == sorted(files)
    train, held_out = demo_text.hold_out(files)
    assert set(train).isdisjoint(held_out) and set(train) | set(held_out) == set(files)
    assert len(held_out) >= 2


def test_source_files_of_odd_size_or_encoding_are_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, 30)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 1000)
    (tmp_path / "stub.py").write_text("x = 1\n")
    (tmp_path / "vast.py").write_text("x = 1\n" * 9000)
    (tmp_path / "zlast.txt").write_text("x = 1\n" * 1000)
    assert [path.name for path in demo_text.source_files(tmp_path)] == [f"m{n:02}.py" for n in range(30)]


def test_python_without_sources_is_one_line(tmp_path: Path) -> None:
    write_files(tmp_path, 3)
    with pytest.raises(FinetuneError, match="holds 3 source files") as e:
        demo_text.source_files(tmp_path)
    assert "\n" not in str(e.value)


@given(st.integers(0, 200))
def test_hold_out_splits_whole_documents(count: int) -> None:
    documents = list(range(count))
    train, held_out = demo_text.hold_out(documents)
    assert sorted(train + held_out) == documents
    assert abs(len(held_out) - count / demo_text.HOLD_OUT_EVERY) < 1


# -- entropy -------------------------------------------------------------------------------------------------


def test_unigram_entropy_of_known_distributions() -> None:
    assert demo_text.unigram_entropy([7, 7, 7]) == 0.0
    assert demo_text.unigram_entropy([0, 3, 9, 1023]) == pytest.approx(math.log(4), abs=1e-12)
    assert demo_text.unigram_entropy([0, 0, 1, 2]) == pytest.approx(1.5 * math.log(2), abs=1e-12)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=100))
def test_unigram_entropy_is_the_best_loss_without_context(tokens: list[int]) -> None:
    counts = {token: tokens.count(token) for token in tokens}
    loss = -sum(math.log(counts[token] / len(tokens)) for token in tokens) / len(tokens)
    assert demo_text.unigram_entropy(tokens) == pytest.approx(loss, abs=1e-9)


# -- base model ----------------------------------------------------------------------------------------------


def test_base_is_a_model_folder_and_the_same_for_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = demo_text.documentation()[8:20]
    monkeypatch.setattr(demo_base, "documentation", lambda: texts)
    recipe = BaseRecipe(steps=2, batch=2, seq_len=32, warmup=1)
    reports = [
        demo_base.make_base(tmp_path / name, recipe=recipe, seed=seed, console=quiet())
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name, use_safetensors=True) for name in ("a", "b", "c")]
    same, other = (
        all(torch.equal(p, q) for p, q in zip(models[0].parameters(), m.parameters(), strict=True)) for m in models[1:]
    )
    assert same and not other
    assert reports[0].held_out_loss == reports[1].held_out_loss != reports[2].held_out_loss
    assert 900_000 < reports[0].parameters < 1_200_000
    assert 5.0 < reports[0].unigram_entropy < math.log(1024)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "def f(x):\n    return {x: 'é', 'y': [1, 2]}  # \u4f60\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 1024


# -- verdict -------------------------------------------------------------------------------------------------


def failing(
    base: BaseReport = BASE, result: FinetuneResult = RESULT, peft_loss: float = PEFT_LOSS, aware: MergeFigures = AWARE
) -> list[str]:
    return [claim.text for claim in demo.judge(base, result, peft_loss, ORDINARY, aware) if not claim.holds]


MISSES = [
    ({"base": replace(BASE, held_out_loss=4.01)}, "base, documentation"),
    ({"result": replace(RESULT, quantized_loss=5.11)}, "experts in NVFP4"),
    ({"result": replace(RESULT, experts_bytes_after=8_000)}, "memory of the experts"),
    ({"result": replace(RESULT, base_loss=4.58, quantized_loss=4.6)}, "fine-tuned"),
    ({"result": replace(RESULT, expert_adapters_zeroed_loss=4.19)}, "expert adapters zeroed"),
    ({"peft_loss": 3.9011}, "adapter in stock PEFT"),
    ({"peft_loss": 3.8989}, "adapter in stock PEFT"),
    ({"peft_loss": math.nan}, "adapter in stock PEFT"),
    ({"result": replace(RESULT, expert_adapters_zeroed_loss=math.nan)}, "expert adapters zeroed"),
    ({"result": replace(RESULT, quantized_loss=math.nan)}, "experts in NVFP4"),
    ({"aware": replace(AWARE, merged=4.2002)}, "merge-aware, merged alone"),
    ({"aware": replace(AWARE, merged=4.1998)}, "merge-aware, merged alone"),
    ({"aware": replace(AWARE, merged=math.nan)}, "merge-aware, merged alone"),
]


def test_every_claim_can_hold() -> None:
    assert failing() == []


@pytest.mark.parametrize(("figures", "claim"), MISSES, ids=[f"{n}-{claim}" for n, (_, claim) in enumerate(MISSES)])
def test_every_claim_can_fail(figures: dict[str, Any], claim: str) -> None:
    assert failing(**figures) == [claim]


@pytest.mark.parametrize(("final_loss", "code", "word"), [(3.9, 0, "PASS: all"), (4.3, 1, "FAIL: 1 of")])
def test_exit_code_and_last_line_follow_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, final_loss: float, code: int, word: str
) -> None:
    result = replace(RESULT, final_loss=final_loss, expert_adapters_zeroed_loss=final_loss + 0.4)
    monkeypatch.setattr(demo, "make_base", lambda *args, **kwargs: BASE)
    monkeypatch.setattr(demo, "finetune", lambda *args, **kwargs: result)
    monkeypatch.setattr(demo, "stock_peft_loss", lambda *args: final_loss + 1e-4)
    monkeypatch.setattr(demo_merge, "train_and_merge", lambda *args: (ORDINARY, AWARE))
    console = quiet()
    assert demo.run_demo(tmp_path / "out", console=console) == code
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].startswith(word)


# -- merging -------------------------------------------------------------------------------------------------


def test_two_adapters_are_trained_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_merge, "STEPS", 6)
    config, console = tiny_config(make_folder(tmp_path), tmp_path / "adapter"), quiet()
    ordinary, aware = demo_merge.train_and_merge(config, tmp_path, console)
    assert ordinary.beside == ordinary.trained != ordinary.merged
    assert aware.beside != aware.trained and abs(aware.merged - aware.trained) < 1e-5
    assert {path.name for path in tmp_path.iterdir()} >= set(demo_merge.PARTS)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].startswith("merge-aware adapter")


def test_the_demo_in_mxfp4_goes_through_its_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too short to learn anything, so claims fail; the numbers of MXFP4 still agree in PEFT and after merging."""
    texts, whole = demo_text.documentation()[8:20], demo.finetune_config
    small = dict(steps=2, batch=2, seq_len=32, eval_batches=1, eval_every=0, warmup=1)
    monkeypatch.setattr(demo_base, "documentation", lambda: texts)
    monkeypatch.setattr(demo, "BaseRecipe", lambda: BaseRecipe(steps=2, batch=2, seq_len=32, warmup=1))

    def shrunk(*args: Any) -> Any:
        config = whole(*args)
        return replace(config, text=config.text[:3], eval_text=config.eval_text[:1], **small)

    monkeypatch.setattr(demo, "finetune_config", shrunk)
    monkeypatch.setattr(demo_merge, "STEPS", 2)
    console = quiet()
    assert demo.run_demo(tmp_path / "out", format="mxfp4", console=console) == 1
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    verdicts = {line.split("  ")[0]: line.rstrip().endswith("PASS") for line in text.splitlines() if "  " in line}
    assert all(f" {act}. " in text for act in range(1, 6)) and "quantised to MXFP4" in text
    for claim in ("experts in MXFP4", "memory of the experts", "adapter in stock PEFT", "merge-aware, merged alone"):
        assert verdicts[claim], text


# -- folder --------------------------------------------------------------------------------------------------


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "thesis.txt").write_text("years of work")
    with pytest.raises(FinetuneError, match="not empty"):
        demo.prepare_folder(tmp_path)
    assert (tmp_path / "base" / "thesis.txt").read_text() == "years of work"


def test_an_earlier_demo_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    demo.prepare_folder(folder)
    (folder / "adapter").mkdir()
    (folder / "notes.txt").write_text("kept")
    demo.prepare_folder(folder)
    assert not (folder / "adapter").exists() and (folder / "notes.txt").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FinetuneError, match="cannot be written"):
        demo.prepare_folder(tmp_path / "file" / "out")
