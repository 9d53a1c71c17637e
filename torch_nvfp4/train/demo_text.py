"""The demo's two texts, which every Python has: documentation for the base, its source for the fine-tune."""

from __future__ import annotations

import importlib
import math
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from torch_nvfp4.train.config import FinetuneError

T = TypeVar("T")

HOLD_OUT_EVERY = 10
SHORTEST_TOPIC = 300  # characters
SOURCE_SIZES = (4_000, 24_000)  # bytes: no stubs, and no file that outweighs the others
SOURCE_FILES = 60
FEWEST_FILES = 20


def documentation() -> list[str]:
    """The documentation that `help()` shows, one text per topic, longest first, no paragraph twice.

    Topics quote one another at length ("while" is a section of "compound"), which would give a held-out
    topic away: a paragraph stays in the longest topic alone, and what is short then is dropped.
    Raises FinetuneError where Python lacks the texts.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        raise FinetuneError(
            "this Python has no documentation texts (module pydoc_data.topics), which the demo's base model "
            "learns from: use a Python from python.org, conda, uv or your system's full package"
        ) from None
    return [text for text in drop_repeats(topics.values()) if len(text) >= SHORTEST_TOPIC]


def drop_repeats(texts: Iterable[str]) -> list[str]:
    """The texts, longest first, without paragraphs that an earlier one has (white space aside)."""
    seen: set[str] = set()
    result = []
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        fresh = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph)
        result.append("\n\n".join(fresh))
    return result


def source_files(folder: Path | None = None) -> list[Path]:
    """Standard library modules of middling size, sorted by name. Raises FinetuneError where they are few.

    Args:
        folder: where to look, not recursively; this Python's standard library if not given.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    smallest, largest = SOURCE_SIZES
    files = [
        path for path in sorted(folder.glob("*.py")) if smallest <= path.stat().st_size <= largest and _is_utf8(path)
    ][:SOURCE_FILES]
    if len(files) < FEWEST_FILES:
        raise FinetuneError(
            f"{folder} holds {len(files)} source files of {smallest} to {largest} bytes, the demo fine-tunes "
            f"on {FEWEST_FILES} or more: use a Python that is installed with its sources"
        )
    return files


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def hold_out(documents: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split whole documents, every tenth held out: (training, held out), disjoint."""
    chosen = set(range(HOLD_OUT_EVERY // 2, len(documents), HOLD_OUT_EVERY))
    train = [document for n, document in enumerate(documents) if n not in chosen]
    return train, [documents[n] for n in sorted(chosen)]


def unigram_entropy(tokens: Sequence[int]) -> float:
    """Entropy of the token frequencies, in nat: the loss of the best guess that looks at no other token."""
    counts = torch.bincount(torch.tensor(tokens)).double()
    probabilities = counts[counts > 0] / counts.sum()
    entropy = -(probabilities * probabilities.log()).sum().item()
    return math.fabs(entropy)  # one distinct token gives -0.0
