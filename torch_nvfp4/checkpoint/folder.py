"""The files of a checkpoint folder: which there are, and which tensor lies where."""

from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .files import TensorInfo, parse_json, read_header

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_JSON = 200_000_000


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder; an empty one if there is no such file."""
    path = _inside(folder, name)
    if not path.exists():
        return {}
    try:
        _check_regular(path)
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are more than any such file has")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    value = parse_json(text, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return value


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder, from `model.safetensors` or from the shards that its index names."""
    if folder.is_file():
        raise CheckpointError(f"{folder}: is a file: give the folder that it is in, {folder.parent}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    single, index = folder / WEIGHTS, folder / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(f"{folder}: has both {WEIGHTS} and {INDEX}: which one counts?")
    if index.exists():
        return _read_shards(folder)
    if not single.exists():
        raise CheckpointError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")
    path = _inside(folder, WEIGHTS)
    _check_regular(path)
    return read_header(path)


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        path = _inside(folder, shard)
        if not path.exists():
            raise CheckpointError(f"{index}: names {shard!r}, which is missing")
        _check_regular(path)
        for name, info in read_header(path).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{path}: holds tensor {name!r}, which {INDEX} places in {weight_map.get(name)}")
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index}: places tensor {name!r} in {shard!r}, which does not hold it")
    return tensors


def _inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder; CheckpointError where the name or a link leads out of it.

    The hub's cache is the one exception: files in `snapshots/<revision>` are links into `blobs` beside `snapshots`.
    """
    if not name or name in (".", "..") or "\0" in name or any(mark in name for mark in "/\\:"):
        raise CheckpointError(f"{folder}: {name!r} is not the name of a file in this folder")
    path, home = folder / name, folder.resolve()
    try:
        target = path.resolve()
        path.exists()  # so that a name that no file can have fails here
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder}: {name!r} cannot be looked up ({error})") from error
    blobs = home.parent.parent / "blobs"
    if target.parent != home and not (home.parent.name == "snapshots" and target.parent == blobs):
        raise CheckpointError(f"{path}: is a link that leads out of the folder, to {target}")
    return path


def _check_regular(path: Path) -> None:
    if not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(f"{path}: is not a file")
