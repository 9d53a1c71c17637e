"""A copy of a checkpoint's folder in which some tensors have other bytes, and all else is as it was, file by file."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .errors import CheckpointError
from .files import FileState, TensorInfo
from .write import NewFolder

_STEP = 1 << 24


def write_patched(
    folder: Path, tensors: Iterable[TensorInfo], out: Path, replaced: Collection[str],
    entries: Iterable[tuple[str, Tensor]],
) -> None:  # fmt: skip
    """Write `out`: the files of `folder`, with the tensors named in `replaced` as `entries` gives them.

    tensors: all of the folder's. Each of `replaced` is given once, in any order, with as many bytes as it had.
    One entry at a time is in memory. What lies beside the weights is copied; other files of weights are not.
    """
    infos = {info.name: info for info in tensors}
    by_file: dict[FileState, list[TensorInfo]] = defaultdict(list)
    for info in infos.values():
        by_file[info.file].append(info)
    missing = set(replaced)
    with NewFolder(out) as new:
        for state, held in by_file.items():
            _copy_without(state, [info for info in held if info.name in missing], new.partial / state.path.name)
        for name, tensor in entries:
            if name not in missing:
                raise CheckpointError(f"{out}: tensor {name!r} was not to be replaced, or is there twice")
            _put(new.partial / infos[name].file.path.name, infos[name], tensor)
            missing.remove(name)
        if missing:
            raise CheckpointError(f"{out}: {len(missing)} tensors are missing, {min(missing)!r} for one")
        new.copy_beside(folder)
        new.take_name()


def _copy_without(state: FileState, holes: list[TensorInfo], to: Path) -> None:
    """Copy a file but for the bytes of some tensors, which stay zero."""
    with state.path.open("rb") as source, to.open("wb") as target:
        target.truncate(state.size)
        position = 0
        for info in sorted(holes, key=lambda info: info.begin):
            _copy_range(source, target, state, position, info.begin)
            position = info.end
        _copy_range(source, target, state, position, state.size)


def _copy_range(source: BinaryIO, target: BinaryIO, state: FileState, begin: int, end: int) -> None:
    source.seek(begin)
    target.seek(begin)
    while begin < end:
        part = source.read(min(_STEP, end - begin))
        if not part:
            raise CheckpointError(f"{state.path}: has changed since the checkpoint was opened")
        target.write(part)
        begin += len(part)


def _put(file: Path, info: TensorInfo, tensor: Tensor) -> None:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    if len(raw) != info.end - info.begin:
        raise CheckpointError(f"{file}: tensor {info} would have {len(raw)} bytes, it has {info.end - info.begin}")
    with file.open("r+b") as target:
        target.seek(info.begin)
        target.write(raw.numpy().data)
