"""Samples of any length to rows of one length, several to a row, without one seeing another.

A row is what a compiled step wants: every batch has one shape. Where a sample starts its positions start at 0
again, and transformers blocks attention between what lies on both sides of such a jump (its masks look for it
when they get position ids and no attention mask). That is asked of the model before it trains: `check_separation`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from torch_nvfp4.train.chat import Sample
from torch_nvfp4.train.config import FinetuneError, one_line

# Models that make their masks without looking at the position ids (transformers 5.23): theirs are made here.
_MASKED_HERE = frozenset({"gpt_oss"})


@dataclass(frozen=True)
class Marks:
    """What goes with the tokens of rows, `[windows, seq_len + 1]` each.

    Attributes:
        trained_WS: bool; the tokens that are learnt. Never a sample's first one: nothing of it comes before.
        positions_WS: int64; counted from each sample's start, or None where every row is one sample.
    """

    trained_WS: Tensor
    positions_WS: Tensor | None

    def __getitem__(self, rows: Any) -> Marks:
        positions = self.positions_WS
        return Marks(self.trained_WS[rows], None if positions is None else positions[rows])


def group(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which samples share a row: longest first, each into the fullest row that has room for it.

    Rows come in the order of their first samples, so that the first rows are as good as any for an evaluation.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        at = bisect_left(free, (lengths[n], -1))
        if at < len(free):
            room, row = free.pop(at)
            rows[row].append(n)
        else:
            room, row = capacity, len(rows)
            rows.append([n])
        if room > lengths[n]:
            insort(free, (room - lengths[n], row))
    return sorted(sorted(row) for row in rows)


def lay_out(samples: Sequence[Sample], seq_len: int, *, pack: bool) -> tuple[Tensor, Marks]:
    """Tokens int64 `[rows, seq_len + 1]` and their marks; samples of at most `seq_len + 1` tokens.

    What is left of a row is token 0, set apart like a sample of its own and never learnt.
    """
    width = seq_len + 1
    lengths = [len(sample.tokens) for sample in samples]
    rows = group(lengths, width) if pack else [[n] for n in range(len(samples))]
    tokens_WS = torch.zeros(len(rows), width, dtype=torch.int64)
    trained_WS = torch.zeros(len(rows), width, dtype=torch.bool)
    positions_WS = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, members in enumerate(rows):
        start = 0
        for n in members:
            stop = start + lengths[n]
            tokens_WS[row, start:stop] = torch.tensor(samples[n].tokens)
            trained_WS[row, start + 1 : stop] = torch.tensor(samples[n].trained[1:], dtype=torch.bool)
            positions_WS[row, start:stop] = torch.arange(lengths[n])
            start = stop
        positions_WS[row, start:] = torch.arange(width - start)
    return tokens_WS, Marks(trained_WS, positions_WS if pack else None)


def digest(samples: Sequence[Sample]) -> bytes:
    """Fingerprint of what samples teach, whatever they are called."""
    result = hashlib.sha256()
    for sample in samples:
        result.update(content(sample))
    return result.digest()


def content(sample: Sample) -> bytes:
    """Fingerprint of one sample: its tokens, and which are learnt."""
    tokens = torch.tensor(sample.tokens, dtype=torch.int64).numpy().tobytes()
    return hashlib.sha256(tokens + bytes(sample.trained)).digest()


def separated(model: Any, positions_BS: Tensor) -> dict[str, Any]:
    """The arguments that have a model keep samples apart, of rows with these position ids."""
    result = {"position_ids": positions_BS}
    if model.config.model_type in _MASKED_HERE:
        shaped_like = model.get_input_embeddings().weight.new_empty(*positions_BS.shape, 0)
        result["attention_mask"] = create_masks_for_generate(model.config, shaped_like, None, None, positions_BS)
    return result


def check_separation(model: Any, name: str, batch: int, device: str) -> None:
    """Raise FinetuneError, which names --no-pack, if what comes before a sample in its row reaches it.

    Asked by differentiation, because that a model takes position ids does not mean that it heeds them (a state
    space layer or a linear attention carries its state on): the logits of the second of two samples must have a
    gradient of exactly 0 in the embeddings of the first.
    """
    half = 4
    tokens_BS = torch.arange(2 * half, device=device).expand(batch, -1)
    positions_BS = torch.arange(half, device=device).repeat(2).expand(batch, -1)
    embedded = model.get_input_embeddings()(tokens_BS).detach().requires_grad_()
    try:
        logits = model(inputs_embeds=embedded, use_cache=False, **separated(model, positions_BS)).logits
        (gradient,) = torch.autograd.grad(logits[:, half:].float().square().sum(), embedded)
    except (TypeError, ValueError, NotImplementedError) as e:
        raise FinetuneError(
            f"{name} cannot be asked whether it keeps packed samples apart ({one_line(e)}): use --no-pack"
        ) from e
    if not gradient[:, half:].any():
        raise FinetuneError(
            f"{name} cannot be asked whether it keeps packed samples apart (its logits do not "
            "depend on its input): use --no-pack"
        )
    if gradient[:, :half].any():
        raise FinetuneError(
            f"{name} lets a sample see the one before it in its row, whatever the position ids say: use --no-pack"
        )
