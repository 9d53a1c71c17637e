"""`torch-nvfp4`: whatever the user can mend is one line on standard error and exit code 2."""

from __future__ import annotations

import builtins
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from finetune_tiny import make_folder, make_text, save_packed_base, save_tokenizer

from torch_nvfp4 import cli
from torch_nvfp4.train.config import FinetuneConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli"))


class Command:
    """`torch-nvfp4 finetune` on the tiny model, with the paths in what it says replaced by their names."""

    def __init__(self, folder: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.output, self._capsys = folder, output, capsys
        self.printed = ""

    def run(self, *flags: object, model: object = None, text: object = None) -> int:
        paths = {
            "--model": model or self.folder / "base",
            "--text": text or self.folder / "a.txt",
            "--output": self.output,
        }
        arguments = [str(a) for pair in paths.items() for a in pair] + [str(flag) for flag in flags]
        quick = ["--device", "cpu", "--dtype", "float32", "--seq-len", "16", "--compile", "off", "--no-plot"]
        code = cli.run(["finetune", *arguments[:6], *quick, *arguments[6:]])
        self.printed, self.error = self._capsys.readouterr()
        return code

    def fails(self, *flags: object, **paths: object) -> str:
        """The one line of an error, without the program's name and the folders."""
        assert self.run(*flags, **paths) == 2, self.printed
        assert self.error.count("\n") == 1 and self.error.startswith("torch-nvfp4: "), self.error
        line = self.error.removeprefix("torch-nvfp4: ").rstrip("\n")
        for parent in (self.output.parent, self.folder):
            line = line.replace(f"{parent}/", "")
        return line


@pytest.fixture
def command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(folder, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--rank 0", "--rank is 0: give 1 or more"),
        ("--expert-rank 0", "--expert-rank is 0: give 1 or more"),
        ("--steps 0", "--steps is 0: give 1 or more"),
        ("--batch -1", "--batch is -1: give 1 or more"),
        ("--keep 0", "--keep is 0: give 1 or more"),
        ("--seq-len 1", "--seq-len is 1: give 2 or more"),
        ("--alpha 0", "--alpha is 0: give a number above 0"),
        ("--alpha -3", "--alpha is -3: give a number above 0"),
        ("--lr nan", "--lr is nan: give a number above 0"),
        ("--clip -1", "--clip is -1: give 0 or more"),
        ("--steps 5 --warmup 5", "--warmup 5 leaves none of the 5 steps: give fewer than --steps"),
        ("--eval-fraction 1", "--eval-fraction is 1: give a number between 0 and 1"),
        ("--dtype int4", "--dtype is 'int4': give one of bfloat16, float32"),
        ("--optim lion", "--optim is 'lion': give one of adamw, sgd"),
        ("--compile maybe", "--compile is 'maybe': give one of auto, on, off"),
        ("--device tpu", "--device is 'tpu': give one of auto, cpu, cuda"),
        ("--targets ,", "no --targets: name the modules that get an adapter, for example --targets experts"),
        ("--resume out/checkpoint-7", "out/checkpoint-7 is no checkpoint (no state.json): give --resume a "
         "checkpoint-<step> folder, or auto"),
        ("--seq-len 65", "--seq-len 65 is longer than the model's 64 positions: give 64 or less"),
    ],
)  # fmt: skip
def test_flags(command: Command, flags: str, line: str) -> None:
    assert command.fails(*flags.split()) == line


def test_flags_that_cannot_be_read(command: Command) -> None:
    # what stands between is typer's
    for flags, start in (
        ("--steps many", "Invalid value for '--steps': "),
        ("--ranks 3", "No such option: --ranks "),
    ):
        line = command.fails(*flags.split())
        assert line.startswith(start) and line.endswith(" (see torch-nvfp4 --help)")


def test_cuda_in_vain(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.match(r"--device cuda: there is (no|an) NVIDIA GPU", command.fails("--device", "cuda"))


def test_target_that_matches_nothing(command: Command) -> None:
    line = command.fails("--targets", "experts,qproj")
    assert line.startswith("--targets experts,qproj: target 'qproj' matches nothing")


def test_texts(command: Command, tmp_path: Path) -> None:
    assert command.fails(text=tmp_path / "no.txt") == "no.txt does not exist: check the path given to --text"
    assert command.fails(text=tmp_path) == f"{tmp_path} is a folder: give --text FILE, once per file"
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin1"))
    assert command.fails(text=tmp_path / "latin.txt") == (
        "latin.txt is not UTF-8 (byte 0xe9 at offset 3): convert it, for example with `iconv -f latin1 -t utf-8`"
    )
    (tmp_path / "blank.txt").write_text(" \n")
    assert command.fails(text=tmp_path / "blank.txt") == "blank.txt is empty: give a file with text in it"
    (tmp_path / "short.txt").write_text("the")
    assert re.fullmatch(
        r"the training text is too short: \d+ tokens do not fill one sequence of 16 \+ 1: "
        r"give more text or a smaller --seq-len",
        command.fails(text=tmp_path / "short.txt"),
    )
    (tmp_path / "shortish.txt").write_text(make_text(0, words=60))
    line = command.fails(text=tmp_path / "shortish.txt")
    assert line.startswith("the held-out text is too short: ")
    a = command.folder / "a.txt"
    assert command.fails("--eval-text", a) == (
        "a.txt is given to --text and to --eval-text: evaluate on a text that is not trained"
    )


def test_local_files_come_before_the_hub(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *a, **k: pytest.fail("the hub was asked"))
    no = command.output.parent / "no.txt"
    for option in ("--text", "--eval-text", "--chat-template"):
        line = command.fails(option, no, model="someone/some-moe")
        assert line == f"no.txt does not exist: check the path given to {option}"
    assert not command.output.exists()


def test_a_text_is_read_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe has nothing the second time."""
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: [read.append(path), read_bytes(path)][1])
    short = command.output.parent / "short.txt"
    short.write_text("the")
    assert "too short" in command.fails(text=short)
    assert read.count(short) == 1


def test_without_what_the_end_of_a_run_needs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_nvfp4.train.loop.load_model", lambda *a: pytest.fail("the model was loaded"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert command.fails("--plot") == (
            "matplotlib, which draws loss.png, is not installed: pip install 'torch-nvfp4[demo]', or give --no-plot"
        )
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert command.fails() == "PyYAML is not installed: pip install 'torch-nvfp4[demo]'"


def test_outputs(command: Command, tmp_path: Path) -> None:
    command.output.mkdir()
    (command.output / "thesis.tex").touch()
    assert command.fails() == "out is not empty: give another --output"
    command.output = command.output / "thesis.tex"
    assert "cannot be written (" in command.fails()


def test_model_folders(command: Command, tmp_path: Path) -> None:
    assert command.fails(model=tmp_path / "no") == "no does not exist: check the path given to --model"
    broken = tmp_path / "broken"
    broken.mkdir()
    assert command.fails(model=broken) == ("broken has no config.json: give --model the folder of a transformers model")
    shutil.copy(command.folder / "base" / "config.json", broken)
    assert command.fails(model=broken) == (
        "broken has no *.safetensors, and other formats are not read: save the model with save_pretrained, "
        "which writes them"
    )
    weights = (command.folder / "base" / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:1000])
    assert command.fails(model=broken) == ("broken has no tokenizer: save it there too with tokenizer.save_pretrained")
    (broken / "tokenizer.json").write_text("{}")
    assert command.fails(model=broken).startswith("broken: cannot load the tokenizer (")
    save_tokenizer(broken)
    assert command.fails(model=broken).startswith("broken has a damaged safetensors file (")
    assert command.fails(model=broken / "config.json") == (
        "broken/config.json is a file: give --model the folder that holds config.json"
    )
    (broken / "config.json").write_text('{"model_type": "nonesuch"}')
    assert command.fails(model=broken).startswith("broken: cannot load the config.json (")


def test_model_with_missing_weights(command: Command, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(command.folder / "base", tmp_path / "holes")
    weights = load_file(tmp_path / "holes" / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "holes" / "model.safetensors", metadata={"format": "pt"})
    assert command.fails(model=tmp_path / "holes") == (
        "holes lacks 1 weights, first model.layers.1.self_attn.q_proj.weight: copy the whole folder again"
    )


def test_model_without_experts(command: Command, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    line = command.fails(model=tmp_path / "dense")
    assert line.startswith("dense") and "expert" in line


def test_another_format_than_that_of_packed_experts(command: Command) -> None:
    save_packed_base(command.folder)
    assert command.fails("--format", "mxfp4", model=command.folder / "packed") == (
        "--format mxfp4: the experts of packed are packed already, in nvfp4: leave --format out, "
        "or give the dense model"
    )


def test_hub_that_cannot_be_reached(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect to the hub\nto load the files")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    assert command.fails(model="someone/some-moe") == (
        "someone/some-moe is no folder here, and the hub did not give its config.json (We couldn't "
        "connect to the hub to load the files): check the name and the network"
    )


def test_missing_options_and_no_command(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["finetune"]) == 2
    assert capsys.readouterr().err == "torch-nvfp4: Missing option '--model'. (see torch-nvfp4 --help)\n"
    assert cli.run(["finetun"]) == 2
    assert capsys.readouterr().err.startswith("torch-nvfp4: No such command 'finetun'.")
    assert cli.run([]) == 0
    assert "finetune" in capsys.readouterr().out


def test_every_setting_is_a_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["finetune", "--help"]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for field in fields(FinetuneConfig):
        assert re.search(rf"--{field.name.replace('_', '-')}\b", text), field.name
        assert field.metadata["help"].split()[0] in text
    assert "Default: a tenth of --steps, 10 at most." in text


def test_flags_arrive_as_settings(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FinetuneConfig] = []
    monkeypatch.setattr("torch_nvfp4.train.loop.finetune", seen.append)
    flags = "--eval-text e.txt --targets experts,q_proj --rslora --gradient-checkpointing --lr 0.5 --resume never"
    assert command.run(*flags.split(), "--text", "second.txt") == 0
    assert seen == [
        FinetuneConfig(
            model=str(command.folder / "base"),
            text=(command.folder / "a.txt", Path("second.txt")),
            output=command.output,
            eval_text=(Path("e.txt"),),
            targets=("experts", "q_proj"),
            rslora=True,
            gradient_checkpointing=True,
            lr=0.5,
            resume="never",
            device="cpu",
            dtype="float32",
            seq_len=16,
            compile="off",
            plot=False,
        )
    ]


def test_ctrl_c_outside_the_training_steps(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: FinetuneConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_nvfp4.train.loop.finetune", interrupted)
    assert command.run() == 130
    assert command.error == (
        "torch-nvfp4: stopped outside the training steps: the same command starts over from the last checkpoint\n"
    )


def test_without_typer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "typer" else find_spec(name))
    assert cli.run(["finetune"]) == 2
    assert capsys.readouterr().err == "torch-nvfp4 needs typer and rich: pip install 'torch-nvfp4[demo]'\n"


def test_without_transformers(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    assert command.fails() == "transformers is not installed: pip install 'torch-nvfp4[demo]'"


def test_help_imports_neither_transformers_nor_inductor() -> None:
    script = (
        "import sys; from torch_nvfp4 import cli; code = cli.run(['finetune', '--help']); "
        "heavy = [m for m in ('transformers', 'torch._inductor', 'matplotlib') if m in sys.modules]; "
        "sys.exit(heavy or code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
