"""Settings from a file: the flags' names, flags win, and what a run stores gives the same run."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from finetune_tiny import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nvfp4 import cli
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError
from torch_nvfp4.train.config_file import ELSEWHERE, read, resolve, write

DOCS = Path(__file__).parent.parent / "docs" / "finetune.md"
NAMES = {f.name for f in fields(FinetuneConfig)}


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_kind_of_setting(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        "model: base\noutput: run\ntext: [a.txt, b c.jsonl]\neval-text: e.txt\nrank: 8\nlr: 2e-4\nalpha: 16\n"
        "rslora: true\ntargets: experts, q_proj\nseq_len: 32\ndataset:\n- a/b:test\nchat_template: null\n",
    )
    assert read(path) == {
        "model": "base", "output": Path("run"), "text": (Path("a.txt"), Path("b c.jsonl")),
        "eval_text": (Path("e.txt"),), "rank": 8, "lr": 2e-4, "alpha": 16.0, "rslora": True,
        "targets": ("experts", "q_proj"), "seq_len": 32, "dataset": ("a/b:test",), "chat_template": None,
    }  # fmt: skip
    assert type(read(path)["alpha"]) is float


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = file_of(tmp_path, "model: base\noutput: run\nrank: 8\nrslora: true\n")
    config = resolve(path, {"rank": 4, "rslora": False, "steps": None, "output": Path("other")})
    assert (config.rank, config.rslora, config.steps, config.output) == (4, False, 200, Path("other"))
    assert config.model == "base" and resolve(path, {}).rank == 8


@pytest.mark.parametrize("word", ["on", "off", "auto", "'off'"])
def test_compile_is_said_without_quotes(tmp_path: Path, word: str) -> None:
    assert read(file_of(tmp_path, f"compile: {word}")) == {"compile": word.strip("'")}


def test_one_alone_is_a_list_of_one() -> None:
    config = FinetuneConfig(model="base", output=Path("run"), text=Path("a.txt"), dataset="a/b", targets="experts")
    assert (config.text, config.dataset, config.targets) == ((Path("a.txt"),), ("a/b",), ("experts",))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (4, 0), (50, 5), (100, 10), (1000, 10)])
def test_warm_up_takes_a_tenth_of_the_steps(tmp_path: Path, steps: int, warmup: int) -> None:
    config = FinetuneConfig(model="base", output=Path("run"), text=(Path("a.txt"),), steps=steps)
    config.validate()
    assert config.warmup == config.fingerprint()["warmup"] == warmup
    assert FinetuneConfig(model="base", output=Path("run"), steps=steps, warmup=3).warmup == 3


def values(kind: Any) -> st.SearchStrategy[Any]:
    text = st.text(st.characters(exclude_categories=["C"]), min_size=1).filter(lambda s: s == s.strip())
    paths = text.map(Path)
    strategies: dict[Any, st.SearchStrategy[Any]] = {
        "int": st.integers(), "float": st.floats(allow_nan=False), "bool": st.booleans(), "str": text, "Path": paths,
        "Path | None": st.none() | paths, "tuple[Path, ...]": st.lists(paths).map(tuple),
        "tuple[str, ...]": st.lists(text.filter(lambda s: "," not in s)).map(tuple),
    }  # fmt: skip
    return strategies[kind]


@settings(max_examples=20)
@given(st.fixed_dictionaries({f.name: values(f.type) for f in fields(FinetuneConfig)}))
def test_what_is_written_is_read(tmp_path: Path, values: dict[str, Any]) -> None:
    config = FinetuneConfig(**values)
    write(config, tmp_path / "config.yaml")
    assert resolve(tmp_path / "config.yaml", {}) == config


def test_the_defaults_too(tmp_path: Path) -> None:
    write(tiny_config(tmp_path, tmp_path / "out"), tmp_path / "config.yaml")
    assert resolve(tmp_path / "config.yaml", {}) == tiny_config(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rnk: 4", "there is no setting 'rnk': the closest flag is --rank"),
        ("grad-acum: 4", "there is no setting 'grad-acum': the closest flag is --grad-accum"),
        ("lora_r: 4", "there is no setting 'lora_r': the closest flag is --rank"),
        ("micro_batch_size: 4", "there is no setting 'micro_batch_size': the closest flag is --batch"),
        ("rank: '4'", "rank is '4': give a whole number"),
        ("rank: true", "rank is True: give a whole number"),
        ("rank: 4.0", "rank is 4.0: give a whole number"),
        ("lr: fast", "lr is 'fast': give a number"),
        ("lr: true", "lr is True: give a number"),
        ("rslora: 1", "rslora is 1: give true or false"),
        ("text: 3", "text is 3: give a path, or a list of paths"),
        ("text: [3]", "text is [3]: give a path, or a list of paths"),
        ("optim: null", "optim is None: give a text"),
        ("resume: no", "resume is False: give a text (in quotes: YAML reads it as something else)"),
        ("rank: 4\nrank: 5", "'rank' is there twice: delete one"),
        ("seq-len: 4\nseq_len: 5", "'seq_len' is there twice: delete one"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, line: str) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(FinetuneError) as error:
        read(path)
    assert str(error.value) == f"{path}: {line}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=r"no.yaml cannot be read \(No such file or directory\): check the path"):
        read(tmp_path / "no.yaml")
    with pytest.raises(FinetuneError, match=r"run.yaml is not YAML \(.*\): mend it"):
        read(file_of(tmp_path, "a: [1"))
    with pytest.raises(FinetuneError, match=r"is not YAML \(.*python/object.*\): mend it"):
        read(file_of(tmp_path, "model: !!python/object/apply:os.getcwd []"))
    with pytest.raises(FinetuneError, match="run.yaml holds no settings: write one a line, such as `rank: 16`"):
        read(file_of(tmp_path, "- rank"))
    assert read(file_of(tmp_path, "# nothing yet\n")) == {}


def test_without_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(FinetuneError, match=r"PyYAML is not installed: pip install 'torch-nvfp4\[demo\]'"):
        read(file_of(tmp_path, "rank: 4"))


def test_the_command_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[FinetuneConfig] = []
    monkeypatch.setattr("torch_nvfp4.train.loop.finetune", seen.append)
    path = file_of(tmp_path, "model: base\noutput: run\ntext: a.txt\nrank: 8\npack: false\ntargets: [experts]\n")
    assert cli.run(["finetune", "--config", str(path), "--rank", "4", "--pack", "--text", "b.txt"]) == 0
    assert seen == [
        FinetuneConfig(model="base", output=Path("run"), text=(Path("b.txt"),), rank=4, targets=("experts",))
    ]
    path.write_text("model: base\n")
    assert cli.run(["finetune", "--config", str(path)]) == 2
    assert capsys.readouterr().err == "torch-nvfp4: Missing option '--output'. (see torch-nvfp4 --help)\n"
    assert cli.run(["finetune", "--model", "base", "--output", "run"]) == 2
    assert capsys.readouterr().err.startswith("torch-nvfp4: nothing to train on: give --text FILE or --dataset NAME")


def test_names_from_elsewhere_lead_to_flags_and_are_none() -> None:
    assert set(ELSEWHERE.values()) <= NAMES and not ELSEWHERE.keys() & NAMES


def test_the_documented_mapping_is_what_errors_say() -> None:
    """Every row of the table: a key of axolotl's, and the flag that an error names for it."""
    table = DOCS.read_text(encoding="utf-8").partition("## From axolotl")[2]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", table, re.M)
    assert len(rows) > 15
    for keys, counterpart in rows:
        flags = re.findall(r"`--([\w-]+)", counterpart)
        for key in re.findall(r"`(\w+)`", keys):
            assert counterpart.startswith("none") == (not flags), key
            assert all(name.removeprefix("no-").replace("-", "_") in NAMES for name in flags), key
            if key in ELSEWHERE:
                assert ELSEWHERE[key].replace("_", "-") in [name.removeprefix("no-") for name in flags], key
            elif flags:
                assert key in NAMES, f"{key} has a flag, and an error does not name it"
