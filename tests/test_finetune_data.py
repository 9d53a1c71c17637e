"""The text a fine-tune sees: reading, splitting, windows, data order, learning rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tiny import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from torch_nvfp4.train.config import FinetuneError
from torch_nvfp4.train.data import (
    IGNORE,
    TokenData,
    eval_batches,
    load_data,
    read_text,
    split_documents,
    train_batch,
    windows,
)
from torch_nvfp4.train.schedule import learning_rate


class Characters:
    """A tokenizer whose tokens are code points."""

    eos_token_id = 3

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def documents() -> st.SearchStrategy[list[list[int]]]:
    """Documents of tokens that are all different, so that a token tells where it comes from."""
    lengths = st.lists(st.integers(1, 40), min_size=1, max_size=4)
    return lengths.map(lambda ns: [list(range(sum(ns[:i]), sum(ns[: i + 1]))) for i in range(len(ns))])


@given(documents(), st.floats(0.01, 0.99))
def test_split_keeps_every_token_once_and_holds_out_ends(docs: list[list[int]], fraction: float) -> None:
    train, held_out = split_documents(docs, fraction)
    assert [a + b for a, b in zip(train, held_out, strict=True)] == docs
    assert all(held_out)
    for doc, part in zip(docs, held_out, strict=True):
        assert abs(len(part) - fraction * len(doc)) <= 1


@given(documents(), st.integers(2, 9), st.sampled_from([None, 10_000]))
def test_windows_make_every_token_a_target_once(docs: list[list[int]], seq_len: int, separator: int | None) -> None:
    stream = [t for doc in docs for t in (*doc, *([] if separator is None else [separator]))]
    window_WS = windows(docs, seq_len, separator)
    count = (len(stream) - 1) // seq_len
    assert window_WS.shape == (count, seq_len + 1) and window_WS.dtype == torch.int64
    assert window_WS[:, 1:].flatten().tolist() == stream[1 : 1 + count * seq_len]
    assert window_WS[:, :-1].flatten().tolist() == stream[: count * seq_len]


def test_tokens_of_training_and_evaluation_are_disjoint(tmp_path: Path) -> None:
    # 400 different characters in two files: a shared character is a shared token
    (tmp_path / "a.txt").write_text("".join(map(chr, range(1000, 1200))), encoding="utf-8")
    (tmp_path / "b.txt").write_text("".join(map(chr, range(2000, 2200))), encoding="utf-8")
    config = tiny_config(tmp_path, tmp_path / "out", seq_len=8, eval_fraction=0.25, eval_batches=99)
    data = load_data(config, Characters(), 5000)
    train, held_out = (set(t.flatten().tolist()) - {Characters.eos_token_id} for t in (data.train_WS, data.eval_WS))
    assert train and held_out and not train & held_out
    assert {t // 1000 for t in held_out} == {1, 2}, "both documents are evaluated on"
    again = load_data(config, Characters(), 5000)
    assert torch.equal(data.train_WS, again.train_WS) and torch.equal(data.eval_WS, again.eval_WS)


def test_eval_text_is_evaluated_and_nothing_else_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 33)
    (tmp_path / "b.txt").write_text("b" * 17)
    config = tiny_config(tmp_path, tmp_path / "out", text=(tmp_path / "a.txt",), eval_text=(tmp_path / "b.txt",))
    data = load_data(config, Characters(), 5000)
    assert data.train_WS.tolist() == [[97] * 17] * 2
    assert data.eval_WS.tolist() == [[98] * 17] and data.eval_tokens == 16


def test_text_hash_follows_the_content_not_the_name(tmp_path: Path) -> None:
    for name, text in (("a", "x" * 90), ("b", "x" * 90), ("c", "y" * 90)):
        (tmp_path / name).write_text(text)

    def hash_of(*names: str) -> str:
        config = tiny_config(tmp_path, tmp_path / "out", text=tuple(tmp_path / n for n in names), eval_fraction=0.3)
        return load_data(config, Characters(), 5000).text_hash

    assert hash_of("a") == hash_of("b") != hash_of("c")
    assert hash_of("a", "c") != hash_of("c", "a")


@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**40))
def test_every_epoch_visits_every_window_once(count: int, batch: int, grad_accum: int, seed: int) -> None:
    data = TokenData(torch.arange(count)[:, None].expand(count, 3), torch.empty(0, 3), "")
    config = tiny_config(Path("."), Path("."), batch=batch, grad_accum=grad_accum, seq_len=2, seed=seed)
    steps = math.ceil(3 * count / (batch * grad_accum))
    seen = [train_batch(data, config, s, m)[0][:, 0].tolist() for s in range(steps) for m in range(grad_accum)]
    flat = [row for rows in seen for row in rows]
    for epoch in range(3):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert train_batch(data, config, 0, 0)[0][:, 0].tolist() == seen[0], "a batch does not depend on those before"


def test_order_differs_between_seeds_and_epochs() -> None:
    data = TokenData(torch.arange(50)[:, None].expand(50, 3), torch.empty(0, 3), "")
    orders = set()
    for seed, step in ((0, 0), (1, 0), (0, 1)):
        config = tiny_config(Path("."), Path("."), batch=50, seq_len=2, seed=seed)
        orders.add(tuple(train_batch(data, config, step, 0)[0][:, 0].tolist()))
    assert len(orders) == 3


@given(st.integers(1, 9), st.integers(1, 4))
def test_eval_batches_have_one_shape_and_count_every_target_once(count: int, batch: int) -> None:
    window_WS = torch.arange(count * 4).view(count, 4)
    batches = eval_batches(TokenData(window_WS, window_WS, ""), batch)
    assert {tuple(t.shape) for pair in batches for t in pair} == {(batch, 3)}
    targets = torch.cat([t for _, t in batches]).flatten()
    assert targets[targets != IGNORE].tolist() == window_WS[:, 1:].flatten().tolist()


@given(st.floats(1e-6, 1.0), st.integers(0, 20), st.integers(1, 100))
def test_learning_rate_rises_then_falls(peak: float, warmup: int, more: int) -> None:
    steps = warmup + more
    rates = [learning_rate(s, peak, warmup, steps) for s in range(steps)]
    assert all(0 < r <= peak for r in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == peak


def test_learning_rate_is_half_the_peak_halfway_down_the_cosine() -> None:
    assert learning_rate(60, 1.0, warmup=20, steps=100) == pytest.approx(0.5)
    assert [learning_rate(s, 1.0, 3, 10) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_read_text_drops_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read_text(tmp_path / "a.txt") == "hello"


def test_tokens_beyond_the_embeddings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("z" * 200)
    config = tiny_config(tmp_path, tmp_path / "out", text=(tmp_path / "a.txt",))
    with pytest.raises(FinetuneError, match="gives token 122, the model has 100 embeddings"):
        load_data(config, Characters(), 100)
