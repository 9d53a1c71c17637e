"""From sources to batches: a held-out split that shares no token with training, rows, a stateless order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_nvfp4.train import packing
from torch_nvfp4.train.chat import Sample, chat_sample
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError
from torch_nvfp4.train.packing import Marks
from torch_nvfp4.train.sources import Record, Sources, read_sources, read_text

IGNORE = -100  # a target that counts for nothing: what is not learnt, and what fills the last evaluation batch

# inputs and targets, int64 [batch, seq_len]; where samples are packed, position ids of the same shape too
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class TokenData:
    """Rows of `seq_len + 1` tokens: the first `seq_len` are the input, the last `seq_len` the targets.

    Attributes:
        train_WS: int64 [windows, seq_len + 1].
        eval_WS: the same for the held-out split.
        text_hash: sha256 over the text of documents and the tokens of samples, training and evaluation apart.
        train_marks, eval_marks: which tokens are learnt, and positions; None where all are, and no row is packed.
        note: a line about the samples to show, or "".
    """

    train_WS: Tensor
    eval_WS: Tensor
    text_hash: str
    train_marks: Marks | None = None
    eval_marks: Marks | None = None
    note: str = ""

    @property
    def eval_tokens(self) -> int:
        if self.eval_marks is not None:
            return int(self.eval_marks.trained_WS.sum())
        return self.eval_WS.shape[0] * (self.eval_WS.shape[1] - 1)

    @property
    def packed(self) -> bool:
        """Whether a row may hold more than one sample."""
        return self.train_marks is not None and self.train_marks.positions_WS is not None


@dataclass(frozen=True)
class _Tokens:
    """One split: documents, which are joined and cut, and samples, which stand for themselves."""

    documents: list[list[int]]
    samples: list[Sample]


def split_documents(documents: Sequence[list[int]], eval_fraction: float) -> tuple[list[list[int]], list[list[int]]]:
    """Hold out the last `eval_fraction` of every document's tokens: (training parts, held-out parts)."""
    cuts = [len(tokens) - max(1, round(len(tokens) * eval_fraction)) for tokens in documents]
    train = [tokens[:cut] for tokens, cut in zip(documents, cuts, strict=True)]
    held_out = [tokens[cut:] for tokens, cut in zip(documents, cuts, strict=True)]
    return train, held_out


def windows(documents: Sequence[list[int]], seq_len: int, separator: int | None) -> Tensor:
    """Join documents, each followed by `separator` if there is one, and cut: int64 [windows, seq_len + 1].

    Neighbouring windows share one token (the last target of one is the first input of the next), so that
    every token is a target once. A rest shorter than a window is dropped.
    """
    stream: list[int] = []
    for tokens in documents:
        stream += tokens
        if separator is not None and tokens:
            stream.append(separator)
    flat = torch.tensor(stream, dtype=torch.int64)
    if len(stream) <= seq_len:
        return flat.new_empty(0, seq_len + 1)
    return flat.unfold(0, seq_len + 1, seq_len).contiguous()


def load_data(config: FinetuneConfig, tokenizer: Any, vocab_size: int) -> TokenData:
    """Read, tokenise, split and cut what is trained and evaluated on. Raises FinetuneError if a split is empty."""
    both = {p.resolve() for p in config.text} & {p.resolve() for p in config.eval_text}
    if both:
        raise FinetuneError(
            f"{min(both)} is given to --text and to --eval-text: evaluate on a text that is not trained"
        )
    sources = read_sources(config.text, config.dataset)
    eval_sources = read_sources(config.eval_text, config.eval_dataset)
    template = None if config.chat_template is None else read_text(config.chat_template)
    train, held_out = (_tokenize(config, tokenizer, template, part) for part in (sources, eval_sources))
    hashed = _text_hash((sources, train), (eval_sources, held_out))
    too_long = sum(len(sample.tokens) > config.seq_len + 1 for sample in (*train.samples, *held_out.samples))
    train, held_out = (_Tokens(part.documents, _shorten(part.samples, config.seq_len)) for part in (train, held_out))
    if not (held_out.documents or held_out.samples):
        train, held_out = _hold_out(train, config.eval_fraction)
    _check_vocabulary((train, held_out), vocab_size)
    marked = bool(train.samples or held_out.samples)
    train_WS, train_marks = _rows(config, tokenizer, "training", train, marked)
    eval_WS, eval_marks = _rows(config, tokenizer, "held-out", held_out, marked)
    limit = slice(config.eval_batches * config.batch)
    eval_marks = eval_marks and eval_marks[limit]
    note = _note(train, too_long) if marked else ""
    return TokenData(train_WS, eval_WS[limit], hashed, train_marks, eval_marks, note)


def split_samples(samples: Sequence[Sample], eval_fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Hold out a share of the samples: (training, held out).

    Chosen, and ordered, by a hash of what they say: a sample that is there twice is in one split alone, and a
    file that is sorted by subject gives some of each.
    """
    contents = [packing.content(sample) for sample in samples]
    distinct = sorted(set(contents))
    if len(distinct) < 2:
        raise FinetuneError(
            "there are not two different samples, one to train on and one to hold out: give more, or --eval-text"
        )
    count = min(len(distinct) - 1, max(1, round(len(distinct) * eval_fraction)))
    chosen = set(distinct[:count])
    order = sorted((key, n) for n, key in enumerate(contents) if key in chosen)
    return [s for s, key in zip(samples, contents, strict=True) if key not in chosen], [samples[n] for _, n in order]


def _tokenize(config: FinetuneConfig, tokenizer: Any, template: str | None, sources: Sources) -> _Tokens:
    return _Tokens(
        [_text_tokens(tokenizer, text) for text in sources.documents],
        [sample for record in sources.records for sample in _samples(config, tokenizer, template, record)],
    )


def _text_tokens(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: no warning of documents longer than the model, because they are cut into windows
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _samples(config: FinetuneConfig, tokenizer: Any, template: str | None, record: Record) -> list[Sample]:
    """A chat is one sample. A text that is too long for a row becomes several, which share a token at the cuts."""
    if record.fields.get("messages") is not None:
        return [chat_sample(tokenizer, record.where, record.fields, template=template, train_on=config.train_on)]
    tokens = _text_tokens(tokenizer, record.fields["text"])
    if tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
    if len(tokens) < 2:
        raise FinetuneError(f"{record.where} is a single token, with nothing to learn: delete that line")
    pieces = [tokens[start : start + config.seq_len + 1] for start in range(0, len(tokens) - 1, config.seq_len)]
    return [Sample(record.where, piece, [True] * len(piece)) for piece in pieces]


def _shorten(samples: Sequence[Sample], seq_len: int) -> list[Sample]:
    """Cut samples to a row. Raises FinetuneError, naming the sample, if that leaves nothing to learn."""
    result = []
    for sample in samples:
        kept = Sample(sample.where, sample.tokens[: seq_len + 1], sample.trained[: seq_len + 1])
        if not any(kept.trained[1:]):
            what, remedy = "has no token to learn", "delete it"
            if any(sample.trained[1:]):
                first = sample.trained.index(True, 1)
                what += f" among its first {seq_len + 1} (the first is token {first + 1})"
                remedy = "raise --seq-len, or delete it"
            raise FinetuneError(f"{sample.where} {what}: {remedy}")
        result.append(kept)
    return result


def _hold_out(tokens: _Tokens, eval_fraction: float) -> tuple[_Tokens, _Tokens]:
    documents, eval_documents = split_documents(tokens.documents, eval_fraction)
    samples, eval_samples = split_samples(tokens.samples, eval_fraction) if tokens.samples else ([], [])
    return _Tokens(documents, samples), _Tokens(eval_documents, eval_samples)


def _check_vocabulary(splits: Sequence[_Tokens], vocab_size: int) -> None:
    sequences = [tokens for split in splits for tokens in (*split.documents, *(s.tokens for s in split.samples))]
    highest = max((max(tokens) for tokens in sequences if tokens), default=0)
    if highest >= vocab_size:
        raise FinetuneError(
            f"the tokenizer gives token {highest}, the model has {vocab_size} embeddings: use the model's own tokenizer"
        )


def _rows(
    config: FinetuneConfig, tokenizer: Any, name: str, part: _Tokens, marked: bool
) -> tuple[Tensor, Marks | None]:
    """All rows of a split; with marks if either split has samples, so that every batch is of one kind."""
    seq_len = config.seq_len
    window_WS = windows(part.documents, seq_len, tokenizer.eos_token_id)
    if not len(window_WS) and (part.documents or not part.samples):
        raise FinetuneError(
            f"the {name} text is too short: {sum(map(len, part.documents))} tokens do not fill one sequence of "
            f"{seq_len} + 1: give more text or a smaller --seq-len"
        )
    if not marked:
        return window_WS, None
    sample_WS, marks = packing.lay_out(part.samples, seq_len, pack=config.pack)
    trained_WS = torch.ones_like(window_WS, dtype=torch.bool)
    trained_WS[:, :1] = False
    trained_WS = torch.cat([trained_WS, marks.trained_WS])
    positions_WS = marks.positions_WS
    if positions_WS is not None:
        positions_WS = torch.cat([torch.arange(seq_len + 1).expand_as(window_WS), positions_WS])
    row_WS, marks = torch.cat([window_WS, sample_WS]), Marks(trained_WS, positions_WS)
    if len(window_WS) and len(sample_WS):  # an evaluation of the first rows is to see both
        order = _epoch_order(len(row_WS), 0, 0)
        row_WS, marks = row_WS[order], marks[order]
    return row_WS, marks


def _note(train: _Tokens, too_long: int) -> str:
    """What became of the samples."""
    tokens = sum(len(sample.tokens) for sample in train.samples)
    learnt = sum(sum(sample.trained[1:]) for sample in train.samples)
    text = f"samples: {len(train.samples):,} of {tokens:,} tokens, {learnt:,} of them learnt"
    return text + (f"; {too_long:,} were longer than a sequence and are cut" if too_long else "")


def _text_hash(*splits: tuple[Sources, _Tokens]) -> str:
    """Fingerprint of what is trained and evaluated on, whatever the files are called."""
    result = hashlib.sha256()
    for sources, tokens in splits:
        for document in sources.documents:
            result.update(hashlib.sha256(document.encode()).digest())
        if tokens.samples:
            result.update(packing.digest(tokens.samples))
        result.update(b"|")
    return result.hexdigest()


def train_batch(data: TokenData, config: FinetuneConfig, step: int, micro: int) -> Batch:
    """A micro-batch: a function of seed, step and micro alone.

    Every epoch visits all windows once in an order drawn from (seed, epoch); a batch may span two epochs.
    """
    count = len(data.train_WS)
    first = (step * config.grad_accum + micro) * config.batch
    rows = [int(_epoch_order(count, config.seed, n // count)[n % count]) for n in range(first, first + config.batch)]
    return _batch(data.train_WS[rows], data.train_marks and data.train_marks[rows])


def eval_batches(data: TokenData, batch: int) -> list[Batch]:
    """All held-out rows in order.

    Every batch has the training batch's shape, so that a compiled step needs no second compilation; copies of a
    row fill the last one, with IGNORE for targets.
    """
    batches = []
    for start in range(0, len(data.eval_WS), batch):
        part = slice(start, start + batch)
        tensors = _batch(data.eval_WS[part], data.eval_marks and data.eval_marks[part])
        missing = batch - len(tensors[0])
        if missing:
            tensors = tuple(torch.cat([t, t[:1].expand(missing, -1)]) for t in tensors)
            tensors[1][-missing:] = IGNORE
        batches.append(tensors)
    return batches


def _batch(row_BS: Tensor, marks: Marks | None) -> Batch:
    inputs_BS, targets_BS = row_BS[:, :-1].contiguous(), row_BS[:, 1:].contiguous()
    if marks is None:
        return inputs_BS, targets_BS
    targets_BS = targets_BS.masked_fill(~marks.trained_WS[:, 1:], IGNORE)
    if marks.positions_WS is None:
        return inputs_BS, targets_BS
    return inputs_BS, targets_BS, marks.positions_WS[:, :-1].contiguous()


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the windows: int64 [count]."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(count, generator=generator)
