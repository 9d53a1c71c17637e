"""A checkpoint folder that takes its name only when it is whole: shards and their index, configs, and what lies beside.

Tensors come one by one and leave the memory with their shard. Until `finish` everything lies in `NAME.partial`, so what
an interrupted run leaves is never mistaken for a checkpoint.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError
from .folder import INDEX, WEIGHTS

SHARD_BYTES = 5 * 10**9
_OWN = ("config.json", "hf_quant_config.json", INDEX)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
"""Endings of files that hold weights: those of the source are not the new folder's."""


@dataclass(frozen=True)
class Written:
    """What is in a new folder.

    weights: packed ones, by their tensors of codes. inexact: how many of their global scales and static scales of
    activations will not come back to the bit, because fp32 has no reciprocal for them: what they multiply then differs
    in the last bit.
    """

    weights: int
    inexact: int


class NewFolder:
    """A folder that is filled under another name. Use as a context manager; leaving it without `take_name` removes it.

    Raises CheckpointError where `out` exists and is not an empty folder.
    """

    def __init__(self, out: Path) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out}: exists; the new checkpoint wants a name of its own")
        self._out, self.partial = out, out.with_name(out.name + ".partial")

    def __enter__(self) -> Self:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self.partial.exists():
            shutil.rmtree(self.partial)

    def copy_beside(self, source: Path, without: Collection[str] = ()) -> None:
        """Copy what lies in a checkpoint's folder, but for weights and these names."""
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name not in without and file.suffix not in _WEIGHTS:
                shutil.copyfile(file, self.partial / file.name)

    def take_name(self) -> None:
        if self._out.exists():
            self._out.rmdir()
        self.partial.rename(self._out)


class FolderWriter(NewFolder):
    """Tensors one by one, into shards of bounded size, then `finish`."""

    def __init__(self, out: Path, shard_bytes: int = SHARD_BYTES) -> None:
        super().__init__(out)
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._shards_written = 0
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor; it is kept until its shard is full."""
        if name in self._pending or name in self._shard_of:
            raise CheckpointError(f"{self._out}: tensor {name!r} is there twice")
        nbytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._pending_bytes += nbytes
        self._total_bytes += nbytes

    def finish(self, documents: Mapping[str, Mapping[str, Any] | None], beside: Path | None) -> None:
        """Write what is left, the index and these JSON files, copy other files of the folder `beside`, take the name.

        A file with None is not wanted. `beside` is the source's folder, if there is one: of what lies in it, weights
        and the configs that every checkpoint has of its own are not copied.
        """
        self._flush()
        count = self._shards_written
        files = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for i, name in enumerate(files):
            self._shard_path(i).rename(self.partial / name)
        if count > 1:
            weight_map = {tensor: files[i] for tensor, i in self._shard_of.items()}
            self._json(INDEX, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})
        for name, value in documents.items():
            if value is not None:
                self._json(name, value)
        if beside is not None:
            self.copy_beside(beside, _OWN)
        self.take_name()

    def _flush(self) -> None:
        if not self._pending:
            return
        save_file(self._pending, self._shard_path(self._shards_written), metadata={"format": "pt"})
        self._shard_of |= dict.fromkeys(self._pending, self._shards_written)
        self._shards_written += 1
        self._pending, self._pending_bytes = {}, 0

    def _shard_path(self, i: int) -> Path:
        return self.partial / f"shard-{i:05d}.safetensors"

    def _json(self, name: str, value: Mapping[str, Any]) -> None:
        (self.partial / name).write_text(json.dumps(value, indent=2) + "\n")
