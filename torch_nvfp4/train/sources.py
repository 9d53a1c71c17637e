"""Where training data comes from: text files, JSON Lines, and the datasets library. Nothing is tokenised here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_nvfp4.train.config import FinetuneError, one_line

JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Record:
    """One sample as it is written.

    Attributes:
        where: what to call it in an error: "notes.jsonl line 3".
        fields: either `messages` (a chat, perhaps with `tools`) or `text`; other fields are ignored.
    """

    where: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Sources:
    """What was read: whole documents, and samples that each stand for themselves."""

    documents: tuple[str, ...]
    records: tuple[Record, ...]


def read_sources(files: Sequence[Path], datasets: Sequence[str]) -> Sources:
    """Read all files and data sets. Raises FinetuneError, naming file and line, for what is not as it should be."""
    documents: list[str] = []
    records: list[Record] = []
    for path in files:
        text = read_text(path)
        if path.suffix.lower() in JSON_LINES:
            records += _json_lines(path, text)
        else:
            documents.append(text)
    for name in datasets:
        records += _dataset(name)
    return Sources(tuple(documents), tuple(records))


def check_file(path: Path, option: str = "--text") -> None:
    """Raise FinetuneError, naming the option, if there is no such file. Reads nothing: a pipe gives its text once."""
    if path.is_dir():
        raise FinetuneError(f"{path} is a folder: give {option} FILE, once per file")
    if not path.exists():
        raise FinetuneError(f"{path} does not exist: check the path given to {option}")


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises FinetuneError if it is missing, not UTF-8 or empty."""
    check_file(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
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


def _json_lines(path: Path, text: str) -> Iterator[Record]:
    # only "\n" ends a line: str.splitlines also cuts at characters that JSON strings may hold, such as U+2028
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            fields = json.loads(line)
        except ValueError as e:
            raise FinetuneError(f"{where} is not JSON ({one_line(e)}): mend or delete that line") from None
        yield _record(where, fields)


def _dataset(name: str) -> Iterator[Record]:
    """The rows of `NAME[:SPLIT]`, split `train` if it names none; a split may be a slice, such as train[:10%]."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as e:
        raise FinetuneError(
            f"--dataset {name}: {e.name} is not installed: pip install 'torch-nvfp4[datasets]'"
        ) from None
    dataset, _, split = name.partition(":")
    try:
        rows = load_dataset(dataset, split=split or "train")
    except Exception as e:  # its own, the hub's, the network's and the file readers': none has a common base
        raise FinetuneError(
            f"--dataset {name} cannot be loaded ({one_line(e)}): check the name, the split and the network"
        ) from e
    count = 0
    for count, row in enumerate(rows, start=1):  # noqa: B007
        yield _record(f"{name} row {count}", row)
    if not count:
        raise FinetuneError(f"--dataset {name} has no rows: give another split")


def _record(where: str, fields: Any) -> Record:
    """Check one sample's form; what its chat template makes of it is found out when it is rendered."""
    if not isinstance(fields, dict):
        raise FinetuneError(f'{where} is no JSON object: write {{"messages": [...]}} or {{"text": "..."}}')
    if fields.get("messages") is not None:
        _check_messages(where, fields["messages"])
    elif not isinstance(fields.get("text"), str):
        names = ", ".join(map(str, fields)) or "nothing"
        raise FinetuneError(f'{where} has neither "messages" nor a "text" that is a string, but {names}')
    elif not fields["text"].strip():
        raise FinetuneError(f'{where} has an empty "text": delete that line')
    return Record(where, fields)


def _check_messages(where: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise FinetuneError(f'{where}: "messages" is no list of messages')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise FinetuneError(f'{where}, message {number} is no object with a "role"')
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise FinetuneError(f'{where}, message {number} ({message["role"]}) has no "content" that is a string')
