"""Files and data sets: what is wrong with one is said with its name and line, before anything trains."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from chat_tiny import CHATML, END, PLAIN, chat_tokenizer, says
from finetune_tiny import make_text, save_model, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from torch_nvfp4.train.chat import Sample
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError
from torch_nvfp4.train.data import IGNORE, TokenData, load_data, split_samples
from torch_nvfp4.train.loop import finetune
from torch_nvfp4.train.sources import read_sources

pytestmark = pytest.mark.usefixtures("one_thread")


def chat(n: int, words: int = 3) -> dict[str, Any]:
    return {"messages": [says("user", f"{n}?"), says("assistant", make_text(n, words=words))]}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(tmp_path: Path, **changes: Any) -> TokenData:
    settings: dict[str, Any] = {"text": (tmp_path / "chats.jsonl",), "seq_len": 60, "eval_batches": 99}
    config = tiny_config(tmp_path, tmp_path / "out", **settings | changes)
    return load_data(config, chat_tokenizer(CHATML), 300)


GOOD = json.dumps(chat(0))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"messages": [', "is not JSON (Expecting value: line 1 column 15 (char 14)): mend or delete that line"),
        ("[1, 2]", 'is no JSON object: write {"messages": [...]} or {"text": "..."}'),
        ('{"prompt": 1, "id": 2}', 'has neither "messages" nor a "text" that is a string, but prompt, id'),
        ('{"text": 3}', 'has neither "messages" nor a "text" that is a string, but text'),
        ('{"text": " "}', 'has an empty "text": delete that line'),
        ('{"messages": []}', '"messages" is no list of messages'),
        ('{"messages": "hello"}', '"messages" is no list of messages'),
        ('{"messages": [{"content": "a"}]}', 'message 1 is no object with a "role"'),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}',
         'message 2 (assistant) has no "content" that is a string'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no assistant turn to learn from (roles: user)"),
        (json.dumps({"messages": [says("user", "long " * 60), says("assistant", "b")]}),
         "has no token to learn among its first 61 (the first is token 319): raise --seq-len, or delete it"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_learnt_is_named(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(FinetuneError) as error:
        load(tmp_path)
    said = str(error.value)
    assert said.startswith(f"{path} line 3") and said.endswith(text), said
    assert said.removesuffix(text) in (f"{path} line 3 ", f"{path} line 3: ", f"{path} line 3, ")


def test_a_template_that_marks_no_turn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [chat(0)])
    (tmp_path / "empty.jinja").write_text("a{% generation %}{% endgeneration %} chat")
    with pytest.raises(FinetuneError, match=rf"^{path} line 1 has no token to learn: delete it$"):
        load(tmp_path, chat_template=tmp_path / "empty.jinja")


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three"
    line = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "a.JSONL").write_bytes(f"\ufeff{line}\r\n{line}".encode())
    found = read_sources([tmp_path / "a.JSONL"], [])
    assert [record.fields["text"] for record in found.records] == [text, text]
    assert found.records[1].where == f"{tmp_path / 'a.JSONL'} line 2" and not found.documents


def learnt(data: TokenData, split: str = "train") -> list[str]:
    """The stretches that a split learns, decoded, in order of rows."""
    tokens_WS, marks = (data.train_WS, data.train_marks) if split == "train" else (data.eval_WS, data.eval_marks)
    assert marks is not None
    result = []
    for row, trained in zip(tokens_WS.tolist(), marks.trained_WS.tolist(), strict=True):
        text = chat_tokenizer(None).decode([t if keep else 0 for t, keep in zip(row, trained, strict=True)])
        result += [part for part in text.split("<eos>") if part]
    return result


@pytest.mark.parametrize("pack", [True, False])
def test_every_answer_is_learnt_or_held_out(tmp_path: Path, pack: bool) -> None:
    write_lines(tmp_path / "chats.jsonl", [chat(n) for n in range(20)])
    data = load(tmp_path, pack=pack, eval_fraction=0.25)
    train, held_out = learnt(data), learnt(data, "eval")
    assert sorted(train + held_out) == sorted(make_text(n, words=3) + END for n in range(20))
    assert len(held_out) == 5 and data.packed == pack
    assert len(data.train_WS) == 15 if not pack else len(data.train_WS) < 15
    assert data.note.startswith("samples: 15 of ") and data.note.endswith(" of them learnt")
    assert data.eval_tokens == sum(len(chat_tokenizer(None)(text)["input_ids"]) for text in held_out)


def test_texts_of_lines_are_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    texts = [make_text(n, words=words) for n, words in enumerate((2, 70, 200))]
    write_lines(tmp_path / "chats.jsonl", [{"text": text} for text in texts])
    write_lines(tmp_path / "eval.jsonl", [chat(1)])
    data = load(tmp_path, pack=False, eval_text=(tmp_path / "eval.jsonl",))
    assert data.train_marks is not None
    tokens = [chat_tokenizer(None)(text)["input_ids"] + [0] for text in texts]
    expected = [t for sequence in tokens for t in sequence[1:]]
    assert data.train_WS[data.train_marks.trained_WS].tolist() == expected


def test_a_long_chat_is_cut_and_that_is_said(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", [chat(0, words=90), *(chat(n) for n in range(1, 5))])
    assert load(tmp_path).note.endswith("; 1 were longer than a sequence and are cut")


def test_documents_beside_chats(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", [chat(n) for n in range(8)])
    (tmp_path / "a.txt").write_text(make_text(1))
    both = load(tmp_path, text=(tmp_path / "a.txt", tmp_path / "chats.jsonl"))
    text_alone = load(tmp_path, text=(tmp_path / "a.txt",))
    assert text_alone.train_marks is None and both.train_marks is not None
    assert both.train_marks.positions_WS is not None
    plain = {tuple(row) for row in text_alone.train_WS.tolist()}
    whole = [n for n, row in enumerate(both.train_WS.tolist()) if tuple(row) in plain]
    assert len(whole) == len(text_alone.train_WS) < len(both.train_WS)
    assert both.train_marks.trained_WS[whole, 1:].all()
    assert torch.equal(both.train_marks.positions_WS[whole[0]], torch.arange(61))


def test_all_on_demand(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", [chat(n) for n in range(4)])
    assert all(text.startswith("user\n") for text in learnt(load(tmp_path, train_on="all", pack=False)))


@given(st.lists(st.integers(0, 12), min_size=2, max_size=30), st.floats(0.05, 0.95))
def test_a_sample_is_never_in_both_splits(values: list[int], fraction: float) -> None:
    samples = [Sample(f"line {n}", [value, 1, 2], [True] * 3) for n, value in enumerate(values)]
    if len(set(values)) == 1:
        with pytest.raises(FinetuneError, match="there are not two different samples, one to train on and one to"):
            split_samples(samples, fraction)
        return
    train, held_out = split_samples(samples, fraction)
    assert {s.where for s in train} | {s.where for s in held_out} == {s.where for s in samples}
    assert train and held_out and not {s.tokens[0] for s in train} & {s.tokens[0] for s in held_out}
    assert split_samples(samples, fraction) == (train, held_out)
    again = split_samples(samples[::-1], fraction)[1]
    assert {s.where for s in again} == {s.where for s in held_out}, "by content, not by place"


def test_the_fingerprint_follows_what_is_learnt(tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", [chat(n) for n in range(4)])
    first = load(tmp_path).text_hash
    assert load(tmp_path, text=(chats.rename(tmp_path / "other.jsonl"),)).text_hash == first
    write_lines(tmp_path / "chats.jsonl", [chat(n) for n in range(3)])
    assert load(tmp_path).text_hash != first
    (tmp_path / "template.jinja").write_text(PLAIN)
    other = {"text": (tmp_path / "other.jsonl",)}
    assert load(tmp_path, **other).text_hash == first
    assert load(tmp_path, **other, chat_template=tmp_path / "template.jinja").text_hash != first


class FakeDatasets(ModuleType):
    """Stands for the datasets library."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[str, str]] = []

    def load_dataset(self, name: str, *, split: str) -> list[dict[str, Any]]:
        self.asked.append((name, split))
        if name == "none":
            raise RuntimeError("Dataset 'none' doesn't exist\non the hub")
        rows = {"empty": [], "bad": [chat(0), {"question": "a"}]}.get(name, [chat(n) for n in range(6)])
        return rows


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> FakeDatasets:
    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def test_data_sets(tmp_path: Path, datasets: FakeDatasets) -> None:
    names = ("someone/chats", "someone/chats:train[:10%]")
    data = load(tmp_path, text=(), dataset=names, eval_dataset=("held:test",))
    assert datasets.asked == [("someone/chats", "train"), ("someone/chats", "train[:10%]"), ("held", "test")]
    assert len(learnt(data)) == 12 and len(learnt(data, "eval")) == 6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "--dataset none cannot be loaded (Dataset 'none' doesn't exist on the hub): check the name, the "
         "split and the network"),
        ("empty:test", "--dataset empty:test has no rows: give another split"),
        ("bad", 'bad row 2 has neither "messages" nor a "text" that is a string, but question'),
    ],
)  # fmt: skip
def test_data_sets_that_cannot_be_read(tmp_path: Path, datasets: FakeDatasets, name: str, text: str) -> None:
    with pytest.raises(FinetuneError) as error:
        load(tmp_path, text=(), dataset=(name,))
    assert str(error.value) == text


def test_without_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FinetuneError) as error:
        load(tmp_path, text=(), dataset=("a/b",))
    assert str(error.value) == "--dataset a/b: datasets is not installed: pip install 'torch-nvfp4[datasets]'"


def run(config: FinetuneConfig) -> tuple[Any, str]:
    output = io.StringIO()
    return finetune(config, console=Console(file=output, width=200, color_system=None)), output.getvalue()


def test_a_fine_tune_on_chats(tmp_path: Path) -> None:
    """It learns; and the loss is a mean over what is learnt in the whole step, however it is cut into batches."""
    save_model(tmp_path / "base")
    (tmp_path / "template.jinja").write_text(CHATML)
    chat_tokenizer(None).save_pretrained(tmp_path / "base")
    # answers of very different lengths: a mean of means would show
    write_lines(tmp_path / "chats.jsonl", [chat(n, words=1 + 12 * (n % 2)) for n in range(24)])
    config = tiny_config(
        tmp_path, tmp_path / "one", text=(tmp_path / "chats.jsonl",), chat_template=tmp_path / "template.jinja",
        seq_len=60, steps=6, batch=4, warmup=1, eval_every=0, pack=False,
    )  # fmt: skip
    one, printed = run(config)
    assert "samples: 22 of " in printed and one.final_loss < one.quantized_loss - 0.05
    assert one.loss_history[0][1] == pytest.approx(one.quantized_loss, abs=0.3), "of learnt tokens, not of all"
    four, _ = run(replace(config, output=tmp_path / "four", batch=1, grad_accum=4))
    for (_, a), (_, b) in zip(one.loss_history, four.loss_history, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    packed, _ = run(replace(config, output=tmp_path / "packed", pack=True))
    assert packed.base_loss == pytest.approx(one.base_loss, abs=1e-5), "packing changes no loss"
    assert packed.quantized_loss == pytest.approx(one.quantized_loss, abs=1e-5)
    assert load_file(tmp_path / "packed" / "adapter_model.safetensors")


def test_ignored_targets_are_those_that_are_not_learnt() -> None:
    assert IGNORE == torch.nn.CrossEntropyLoss().ignore_index
