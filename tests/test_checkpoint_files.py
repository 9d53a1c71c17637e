"""Corrupted files of named kinds: truncated, lying headers, indices that lead astray. None is loaded or touched."""

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import (
    EXAMPLES,
    INDEX,
    LAYOUTS,
    WEIGHTS,
    Draw,
    check_refused,
    fresh,
    join_header,
    load_everything,
    make,
    refusal_of,
    split_header,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nvfp4.checkpoint import CheckpointError


def truncated(draw: Draw, folder: Path) -> str:
    path = some_weights(draw, folder)
    size = path.stat().st_size
    kept = draw(st.one_of(st.integers(0, 16), st.integers(0, size - 1), st.integers(size - 8, size - 1)))
    path.write_bytes(path.read_bytes()[:kept])
    return path.name


def longer(draw: Draw, folder: Path) -> str:
    path = some_weights(draw, folder)
    path.write_bytes(path.read_bytes() + draw(st.binary(min_size=1, max_size=64)))
    return path.name


def header_length_lies(draw: Draw, folder: Path) -> str:
    path = some_weights(draw, folder)
    raw = path.read_bytes()
    true = int.from_bytes(raw[:8], "little")
    lie = draw(
        st.one_of(
            st.integers(0, 2**64 - 1),
            st.integers(0, 4 * true),
            st.sampled_from([len(raw) - 8, len(raw), 2**31, 2**63, 2**64 - 1]),
        ).filter(lambda length: length != true)
    )
    path.write_bytes(lie.to_bytes(8, "little") + raw[8:])
    return path.name


def header_lies(entry: dict, held: int) -> dict[str, object]:
    """Name of a lie -> what stands in the header in place of a tensor's true entry."""
    begin, end = entry["data_offsets"]
    size = end - begin
    return {
        "shifted": entry | {"data_offsets": [begin + 1, end + 1]},
        "on the next": entry | {"data_offsets": [end, end + size]},
        "past the end": entry | {"data_offsets": [held, held + size]},
        "backwards": entry | {"data_offsets": [end, begin]},
        "before the start": entry | {"data_offsets": [-size, 0]},
        "too long": entry | {"data_offsets": [begin, end + 1]},
        "no integers": entry | {"data_offsets": [float(begin), float(end)]},
        "one offset": entry | {"data_offsets": [begin]},
        "another shape": entry | {"shape": [*entry["shape"], 2]},
        "a huge shape": entry | {"shape": [2**40, 2**40]},
        "a negative shape": entry | {"shape": [-1, -size]},
        "a bool in the shape": entry | {"dtype": "U8", "shape": [True, size]},
        "no shape": entry | {"shape": "no"},
        "unknown dtype": entry | {"dtype": "F4"},
        "another dtype": entry | {"dtype": "F64", "shape": [size]},
        "a list of dtypes": entry | {"dtype": ["F32"]},
        "more": entry | {"more": 1},
        "less": {"dtype": "U8"},
        "null": None,
        "a list": [],
    }


def bad_headers(header: dict) -> dict[str, str | bytes]:
    """Name -> text in place of a header."""
    text = json.dumps(header)
    name = next(name for name in header if name != "__metadata__")
    return {
        "twice": f"{text[:-1]}, {json.dumps(name)}: {json.dumps(header[name])}}}",
        "cut": text[:-1],
        "NaN": text.replace("[", "[NaN, ", 1),
        "Infinity": text.replace("[", "[Infinity, ", 1),
        "in a list": f"[{text}]",
        "a space first": " " + text,
        "deep lists": '{"a":' + "[" * 100_000,
        "deep objects": '{"a":' * 100_000,
        "a long number": text[:-1] + ', "x": ' + "9" * 10_000 + "}",
        "not UTF-8": text.encode()[:-1] + b"\xff}",
        "metadata of numbers": text[:-1] + ', "__metadata__": {"format": 1}}',
        "no metadata": text[:-1] + ', "__metadata__": null}',
    }


LIES = tuple(header_lies({"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, 1))
BAD_HEADERS = tuple(bad_headers({"a": {}}))


def header_entry_lies(draw: Draw, folder: Path) -> str:
    path = some_weights(draw, folder)
    header, data = split_header(path.read_bytes())
    name = draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    header[name] = header_lies(header[name], len(data))[draw(st.sampled_from(LIES))]
    path.write_bytes(join_header(header, data))
    return path.name


def swapped_offsets_of_other_sizes(draw: Draw, folder: Path) -> str:
    path = some_weights(draw, folder)
    header, data = split_header(path.read_bytes())
    names = [name for name in header if name != "__metadata__"]
    by_size = {header[name]["data_offsets"][1] - header[name]["data_offsets"][0]: name for name in names}
    a, b = draw(st.permutations(sorted(by_size.values())))[:2]
    header[a]["data_offsets"], header[b]["data_offsets"] = header[b]["data_offsets"], header[a]["data_offsets"]
    path.write_bytes(join_header(header, data))
    return path.name


def header_that_is_no_json(draw: Draw, folder: Path) -> str:
    path = some_weights(draw, folder)
    header, data = split_header(path.read_bytes())
    path.write_bytes(join_header(bad_headers(header)[draw(st.sampled_from(BAD_HEADERS))], data))
    return path.name


def some_weights(draw: Draw, folder: Path) -> Path:
    return draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))


def edit_index(folder: Path, change: Callable[[dict], object]) -> str:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))
    return INDEX


def index_leads_out_of_its_folder(draw: Draw, folder: Path) -> str:
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    shard = some_weights(draw, folder)
    target = outside / shard.name
    shutil.move(shard, target)
    way = draw(st.sampled_from(["relative", "absolute", "link", "folder", "through"]))
    (folder / "sub").mkdir()
    shutil.copy(target, folder / "sub" / shard.name)
    named = {
        "relative": f"../outside/{shard.name}",
        "absolute": str(target),
        "link": shard.name,
        "folder": f"sub/{shard.name}",
        "through": f"sub/../../outside/{shard.name}",
    }[way]
    if way == "link":
        shard.symlink_to(target)

    def change(index: dict) -> None:
        index["weight_map"] = {k: named if v == shard.name else v for k, v in index["weight_map"].items()}

    edit_index(folder, change)
    return shard.name


def index_names_what_its_shard_lacks(draw: Draw, folder: Path) -> str:
    shard = some_weights(draw, folder).name
    return edit_index(folder, lambda index: index["weight_map"].update({"model.extra.weight": shard}))


def index_swaps_two_shards(draw: Draw, folder: Path) -> str:
    def change(index: dict) -> None:
        name = draw(st.sampled_from(sorted(index["weight_map"])))
        shards = sorted(set(index["weight_map"].values()) - {index["weight_map"][name]})
        index["weight_map"][name] = draw(st.sampled_from(shards))

    return edit_index(folder, change)


def index_forgets_a_tensor(draw: Draw, folder: Path) -> str:
    def change(index: dict) -> None:
        del index["weight_map"][draw(st.sampled_from(sorted(index["weight_map"])))]

    return edit_index(folder, change)


BAD_INDICES = {
    "empty": "",
    "a list": "[]",
    "no map": "{}",
    "a map that is a list": '{"weight_map": []}',
    "a number": '{"weight_map": {"a": 1}}',
    "no name": '{"weight_map": {"a": ""}}',
    "the folder": '{"weight_map": {"a": "."}}',
    "zero": '{"weight_map": {"a": "\\u0000"}}',
    "half a character": '{"weight_map": {"a": "\\ud800"}}',
    "a long name": '{"weight_map": {"a": "' + "x" * 5000 + '"}}',
    "a way round": '{"weight_map": {"a": "sub/../model.safetensors.index.json"}}',
    "another system's way out": '{"weight_map": {"a": "..\\\\model.safetensors"}}',
    "a missing file": '{"weight_map": {"a": "none.safetensors"}}',
}


def index_that_makes_no_sense(draw: Draw, folder: Path) -> str:
    text = (folder / INDEX).read_text()
    changed = (text[:-5], text.replace('"weight_map"', '"weight_map": {}, "weight_map"'))
    (folder / INDEX).write_text(draw(st.sampled_from([*BAD_INDICES.values(), *changed])))
    return ""


def missing_shard(draw: Draw, folder: Path) -> str:
    path = some_weights(draw, folder)
    path.unlink()
    return path.name


def tensor_in_two_shards(draw: Draw, folder: Path) -> str:
    first, second = draw(st.permutations(sorted(folder.glob("*.safetensors"))))[:2]
    (header, data), (other, other_data) = (split_header(path.read_bytes()) for path in (first, second))
    name = draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    begin, end = header[name]["data_offsets"]
    other[name] = header[name] | {"data_offsets": [len(other_data), len(other_data) + end - begin]}
    second.write_bytes(join_header(other, other_data + data[begin:end]))
    return second.name


def two_sets_of_weights(draw: Draw, folder: Path) -> str:
    shutil.copy(some_weights(draw, folder), folder / WEIGHTS)
    return WEIGHTS


FILE_CHANGES: dict[Callable[[Draw, Path], str], tuple[int, int]] = {
    truncated: (1, 3),
    longer: (1, 3),
    header_length_lies: (1, 3),
    header_entry_lies: (1, 3),
    swapped_offsets_of_other_sizes: (1, 2),
    header_that_is_no_json: (1, 3),
    index_leads_out_of_its_folder: (2, 3),
    index_names_what_its_shard_lacks: (2, 3),
    index_swaps_two_shards: (2, 3),
    index_forgets_a_tensor: (2, 3),
    index_that_makes_no_sense: (2, 3),
    missing_shard: (2, 3),
    tensor_in_two_shards: (2, 3),
    two_sets_of_weights: (2, 3),
}


@pytest.mark.parametrize("change", FILE_CHANGES, ids=lambda change: change.__name__)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_changed_files_are_refused(tmp_path: Path, change: Callable[[Draw, Path], str], data: st.DataObject) -> None:
    made = make(data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(0, 2**32)))
    folder = made.write(fresh(tmp_path), shards=data.draw(st.integers(*FILE_CHANGES[change])))
    named = change(data.draw, folder)
    check_refused(folder, named, at_open=True)


@settings(max_examples=20 * EXAMPLES)
@given(data=st.data())
def test_any_bytes_of_a_header_load_as_they_were_or_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Some bytes of the length or of the JSON, or all of it, replaced: a CheckpointError, or a file that is whole."""
    path = tmp_path / "checkpoint" / WEIGHTS
    if not path.exists():
        make("qwen3", e=1).write(path.parent)
        (tmp_path / "raw").write_bytes(path.read_bytes())
    raw = bytearray((tmp_path / "raw").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 6))):
            raw[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    else:
        raw[8 : 8 + length] = data.draw(st.binary(max_size=200))
    path.write_bytes(raw)
    try:
        load_everything(path.parent)
    except CheckpointError as refusal:
        assert str(path.parent) in str(refusal)


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_in_a_header_is_refused(tmp_path: Path, lie: str) -> None:
    folder = make("qwen3", e=1).write(tmp_path)
    header, data = split_header((folder / WEIGHTS).read_bytes())
    name = "model.layers.0.self_attn.q_proj.weight"
    (folder / WEIGHTS).write_bytes(join_header(header | {name: header_lies(header[name], len(data))[lie]}, data))
    check_refused(folder, repr(name), at_open=True)


@pytest.mark.parametrize("bad", BAD_HEADERS)
def test_each_header_that_is_no_json_is_refused(tmp_path: Path, bad: str) -> None:
    folder = make("qwen3", e=1).write(tmp_path)
    header, data = split_header((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).write_bytes(join_header(bad_headers(header)[bad], data))
    check_refused(folder, WEIGHTS, at_open=True)


@pytest.mark.parametrize("bad", BAD_INDICES)
def test_each_index_that_makes_no_sense_is_refused(tmp_path: Path, bad: str) -> None:
    folder = make("qwen3", e=1).write(tmp_path, shards=2)
    (folder / INDEX).write_text(BAD_INDICES[bad])
    check_refused(folder, "", at_open=True)


def test_each_byte_belongs_to_one_tensor(tmp_path: Path) -> None:
    folder = make("qwen3", e=1).write(tmp_path)
    header, data = split_header((folder / WEIGHTS).read_bytes())
    names = sorted((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    begin, end = header[names[3]]["data_offsets"]
    moved = {name: dict(header[name]) for name in names}
    for name in names[4:]:
        moved[name]["data_offsets"] = [at + 8 for at in header[name]["data_offsets"]]
    (folder / WEIGHTS).write_bytes(join_header(moved, data[:end] + bytes(8) + data[end:]))
    assert re.search(rf"tensor {names[4]!r} leaves a gap after {names[3]!r}", refusal_of(folder))
    shared = header | {"z": header[names[3]]}
    (folder / WEIGHTS).write_bytes(join_header(shared, data))
    assert re.search(rf"tensor '?.*'? overlaps {names[3]!r}|tensor {names[3]!r} overlaps 'z'", refusal_of(folder))
    (folder / WEIGHTS).write_bytes(join_header(header, data + bytes(3)))
    assert f"3 bytes after {names[-1]!r} belong to no tensor" in refusal_of(folder)
    (folder / WEIGHTS).write_bytes(join_header(header, data[:-3]))
    assert f"tensor {names[-1]!r}: its bytes" in refusal_of(folder) and "truncated" in refusal_of(folder)


def test_a_header_cannot_make_the_reader_allocate(tmp_path: Path) -> None:
    folder = make("qwen3").write(tmp_path)
    header, data = split_header((folder / WEIGHTS).read_bytes())
    huge = {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}
    for raw in (
        join_header(header, data, length=2**62),
        join_header(header, data, length=99_000_000),
        join_header(header | {"model.norm.weight": huge}, data),
        join_header(header | {"model.norm.weight": huge | {"shape": [2**20] * 32}}, data),
    ):
        (folder / WEIGHTS).write_bytes(raw)
        tracemalloc.start()
        try:
            refusal_of(folder)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    assert refusal_of(tmp_path / "none").endswith("no such folder")
    assert refusal_of(tmp_path) == f"DIR: has neither {WEIGHTS} nor {INDEX}"
    (tmp_path / "notes").touch()
    assert refusal_of(tmp_path / "notes").endswith(f"is a file: give the folder that it is in, {tmp_path}")
    (tmp_path / WEIGHTS).mkdir()
    assert refusal_of(tmp_path).endswith("is not a file")
