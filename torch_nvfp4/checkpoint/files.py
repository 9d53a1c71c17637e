"""One safetensors file: its header, checked before it is believed, and its bytes.

The bytes are read, not mapped: a file that another program cuts short gives an error here, where a mapping would end
the process.
"""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_MAX_HEADER = 100_000_000  # what the safetensors library accepts
_MAX_DIMS = 32


class FileState(NamedTuple):
    """A file as its header was read: later reads refuse another one."""

    path: Path
    size: int
    modified: int


class TensorInfo(NamedTuple):
    """Where a tensor lies: `begin` and `end` count from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: FileState
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dtype} {list(self.shape)}, in {self.file.path.name})"


def parse_json(text: bytes, what: str) -> Any:
    """JSON in UTF-8, without a key that is there twice. Infinity may stand in it: configs of Mamba models have it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(f"{what}: {twice!r} is there twice")
        return result

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number or a depth beyond all use
        raise CheckpointError(f"{what}: not valid JSON ({error})") from None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file; CheckpointError for a file that is not exactly what its header says."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            state = FileState(path, stat.st_size, stat.st_mtime_ns)
            length = int.from_bytes(file.read(8), "little")
            if stat.st_size < 8 or not 2 <= length <= min(stat.st_size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or a truncated one: its header claims {length} bytes, "
                    f"the file has {stat.st_size}"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if len(text) != length or text[:1] != b"{":
        raise CheckpointError(f"{path}: not a safetensors file: its header does not begin with '{{'")
    header = parse_json(text, f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header: __metadata__ must map names to texts")
    infos = [_tensor_info(state, name, fields, 8 + length) for name, fields in header.items()]
    _check_cover(state, infos, 8 + length)
    return {info.name: info for info in infos}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor_info(state: FileState, name: str, fields: Any, data_begin: int) -> TensorInfo:
    where = f"{state.path}: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: its header entry must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
        raise CheckpointError(f"{where}: shape must be a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{where}: data_offsets must be two positions")
    begin, end = offsets
    held = state.size - data_begin
    if not begin <= end <= held:
        raise CheckpointError(
            f"{where}: its bytes {begin} to {end} do not lie in the file, which holds {held}: truncated, or corrupt"
        )
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(f"{where}: {dtype} {shape} takes {expected} bytes, data_offsets span {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), state, data_begin + begin, data_begin + end)


def _check_cover(state: FileState, infos: list[TensorInfo], data_begin: int) -> None:
    """Every byte belongs to one tensor: an overlap or a gap means that an offset is wrong."""
    position, last = data_begin, "the header"
    for info in sorted(infos, key=lambda info: (info.begin, info.end)):
        if info.begin != position:
            how = "overlaps" if info.begin < position else "leaves a gap after"
            raise CheckpointError(f"{state.path}: tensor {info.name!r} {how} {last}")
        position, last = info.end, repr(info.name)
    if position != state.size:
        raise CheckpointError(f"{state.path}: {state.size - position} bytes after {last} belong to no tensor")


class Reader:
    """Reads tensors, or slices of their first dim. Keeps files open while it is in use as a context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def read(self, info: TensorInfo, index: int | range | None = None) -> Tensor:
        """The tensor, or with `index` the part of it at that place, or those places, of its first dim."""
        shape, begin, end = info.shape, info.begin, info.end
        if isinstance(index, range):
            size = (end - begin) // max(1, shape[0])
            shape, begin, end = (len(index), *shape[1:]), begin + index.start * size, begin + index.stop * size
        elif index is not None:
            size = (end - begin) // shape[0]
            shape, begin, end = shape[1:], begin + index * size, begin + (index + 1) * size
        dtype = DTYPES[info.dtype]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._bytes(info, begin, end), dtype=dtype).view(shape)

    def number(self, info: TensorInfo) -> float:
        """The value of a tensor of one F32: checkpoints have tens of thousands, and a Tensor each takes seconds."""
        (value,) = struct.unpack("<f", self._bytes(info, info.begin, info.end))
        return value

    def _bytes(self, info: TensorInfo, begin: int, end: int) -> bytearray:
        buffer = bytearray(end - begin)
        rest = memoryview(buffer)
        try:
            file = self._file(info.file)
            file.seek(begin)
            while len(rest):
                count = file.readinto(rest)  # type: ignore[attr-defined]  # a raw file: may be less than asked for
                if not count:
                    raise CheckpointError(f"{info.file.path}: ends within tensor {info.name!r}")
                rest = rest[count:]
        except OSError as error:
            raise CheckpointError(f"{info.file.path}: tensor {info.name!r} cannot be read ({error})") from error
        return buffer

    def _file(self, state: FileState) -> BinaryIO:
        file = self._open.get(state.path)
        if file is None:
            file = self._open[state.path] = state.path.open("rb", buffering=0)
            stat = os.fstat(file.fileno())
            if (stat.st_size, stat.st_mtime_ns) != (state.size, state.modified):
                raise CheckpointError(f"{state.path}: has changed since the checkpoint was opened")
        return file


def iterate_bytes(tensor: Tensor, step: int = 2**20) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor in pieces, so that a check of them makes no second copy of all."""
    yield from tensor.flatten().view(torch.uint8).split(step)
