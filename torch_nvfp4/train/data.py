"""Text files to token windows: a held-out split that shares no token with training, a stateless order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_nvfp4.train.config import FinetuneConfig, FinetuneError

IGNORE = -100  # a target that counts for nothing: fills the last evaluation batch


@dataclass(frozen=True)
class TokenData:
    """Windows of `seq_len + 1` tokens: the first `seq_len` are the input, the last `seq_len` the targets.

    Attributes:
        train_WS: int64 [windows, seq_len + 1].
        eval_WS: the same for the held-out split.
        text_hash: sha256 over the bytes of the files, training and evaluation apart.
    """

    train_WS: Tensor
    eval_WS: Tensor
    text_hash: str

    @property
    def eval_tokens(self) -> int:
        return self.eval_WS.shape[0] * (self.eval_WS.shape[1] - 1)


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises FinetuneError if it is missing, not UTF-8 or empty."""
    if path.is_dir():
        raise FinetuneError(f"{path} is a folder: give --text FILE, once per file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FinetuneError(f"{path} does not exist: check the path given to --text") from None
    except UnicodeDecodeError as e:
        raise FinetuneError(
            f"{path} is not UTF-8 (byte 0x{e.object[e.start]:02x} at offset {e.start}): convert it, "
            f"for example with `iconv -f latin1 -t utf-8`"
        ) from None
    except OSError as e:
        raise FinetuneError(f"{path} cannot be read: {e.strerror}") from None
    if not text.strip():
        raise FinetuneError(f"{path} is empty: give a file with text in it")
    return text


def text_hash(config: FinetuneConfig, documents: Sequence[str], eval_documents: Sequence[str]) -> str:
    """Fingerprint of what is trained and evaluated on, whatever the files are called."""
    digest = hashlib.sha256()
    for part in (documents, eval_documents):
        for document in part:
            digest.update(hashlib.sha256(document.encode()).digest())
        digest.update(b"|")
    return digest.hexdigest()


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
    """Read, tokenise, split and cut the texts. Raises FinetuneError if one split has not a single window."""
    both = {p.resolve() for p in config.text} & {p.resolve() for p in config.eval_text}
    if both:
        raise FinetuneError(
            f"{min(both)} is given to --text and to --eval-text: evaluate on a text that is not trained"
        )
    texts = [read_text(path) for path in config.text]
    eval_texts = [read_text(path) for path in config.eval_text]
    train = [_tokenize(tokenizer, text) for text in texts]
    held_out = [_tokenize(tokenizer, text) for text in eval_texts]
    if not held_out:
        train, held_out = split_documents(train, config.eval_fraction)
    highest = max((max(tokens) for tokens in (*train, *held_out) if tokens), default=0)
    if highest >= vocab_size:
        raise FinetuneError(
            f"the tokenizer gives token {highest}, the model has {vocab_size} embeddings: use the model's own tokenizer"
        )
    train_WS, eval_WS = (windows(part, config.seq_len, tokenizer.eos_token_id) for part in (train, held_out))
    for name, part, tensor in (("training", train, train_WS), ("held-out", held_out, eval_WS)):
        if not len(tensor):
            raise FinetuneError(
                f"the {name} text is too short: {sum(map(len, part))} tokens do not fill one sequence of "
                f"{config.seq_len} + 1: give more text or a smaller --seq-len"
            )
    limit = config.eval_batches * config.batch
    return TokenData(train_WS, eval_WS[:limit], text_hash(config, texts, eval_texts))


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: no warning of documents longer than the model, because they are cut into windows
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def train_batch(data: TokenData, config: FinetuneConfig, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a micro-batch, int64 [batch, seq_len]: a function of seed, step and micro alone.

    Every epoch visits all windows once in an order drawn from (seed, epoch); a batch may span two epochs.
    """
    count = len(data.train_WS)
    first = (step * config.grad_accum + micro) * config.batch
    rows = [int(_epoch_order(count, config.seed, n // count)[n % count]) for n in range(first, first + config.batch)]
    window_BS = data.train_WS[rows]
    return window_BS[:, :-1].contiguous(), window_BS[:, 1:].contiguous()


def eval_batches(data: TokenData, batch: int) -> list[tuple[Tensor, Tensor]]:
    """All held-out windows in order: inputs and targets, int64 [batch, seq_len] each.

    Every batch has the training batch's shape, so that a compiled step needs no second compilation; padding
    fills the last one, with IGNORE for targets.
    """
    batches = []
    for start in range(0, len(data.eval_WS), batch):
        window_BS = data.eval_WS[start : start + batch]
        inputs, targets = window_BS[:, :-1], window_BS[:, 1:]
        missing = batch - len(window_BS)
        if missing:
            inputs = torch.cat([inputs, inputs[:1].expand(missing, -1)])
            targets = torch.cat([targets, torch.full_like(targets[:1], IGNORE).expand(missing, -1)])
        batches.append((inputs.contiguous(), targets.contiguous()))
    return batches


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the windows: int64 [count]."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(count, generator=generator)
