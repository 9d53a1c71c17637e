"""`finetune --merge-aware`: what it ends with is the merged model, and a resumed run is the same run."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tiny import COMPILED, make_folder, tiny_config
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from torch_nvfp4 import lora
from torch_nvfp4.checkpoint import quantize_folder
from torch_nvfp4.hf import skeletons
from torch_nvfp4.merge import merge_folder
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError
from torch_nvfp4.train.config_file import read
from torch_nvfp4.train.data import eval_batches, load_data
from torch_nvfp4.train.loop import finetune
from torch_nvfp4.train.model import load_description
from torch_nvfp4.train.report import FinetuneResult
from torch_nvfp4.train.step import mean_loss

SETTINGS: dict[str, Any] = {"merge_aware": True, "merge_aware_start": 0.5, "lr": 3e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("aware"))
    for name in ("base", "one_layer"):
        quantize_folder(made / name, made / f"{name}_packed", share_gate_up=False)
    return made


def run(folder: Path, output: Path, **changes: Any) -> tuple[FinetuneResult, str]:
    console = Console(file=io.StringIO(), width=400, color_system=None)
    settings = {"model": str(folder / "base_packed"), "targets": ("experts",)} | SETTINGS | changes
    result = finetune(tiny_config(folder, output, **settings), console=console)
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[FinetuneResult, str]:
    return run(folder, folder / "trained", keep=9)


def held_out_loss(folder: Path, model: nn.Module) -> float:
    config = tiny_config(folder, folder / "unused")
    _, tokenizer = load_description(config)
    return mean_loss(model, eval_batches(load_data(config, tokenizer, 300), config.batch), "cpu")


def test_the_loss_is_that_of_the_merged_model(folder: Path, trained: tuple[FinetuneResult, str]) -> None:
    result, told = trained
    merge_folder(folder / "base_packed", result.adapter_dir, folder / "merged", skeletons=skeletons)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    assert held_out_loss(folder, merged) == pytest.approx(result.final_loss, abs=1e-5)
    unmerged = AutoModelForCausalLM.from_pretrained(folder / "base_packed", dtype=torch.float32)
    with pytest.warns(UserWarning, match="trained merge-aware"):
        lora.load_adapter(unmerged, result.adapter_dir)
    assert held_out_loss(folder, unmerged) == pytest.approx(result.unmerged_loss, abs=1e-5)
    assert abs(result.final_loss - (result.unmerged_loss or 0.0)) > 1e-5
    assert result.final_loss < result.quantized_loss
    for text in (
        "merge-aware from step 7 on: the forward uses the 4-bit weights that torch-nvfp4 merge writes",
        "held-out loss: fine-tuned, as merged", "held-out loss: fine-tuned, adapter not merged",
        "(merge-aware: for torch-nvfp4 merge)",
    ):  # fmt: skip
        assert text in told


def stamped(folder: Path) -> bool:
    return "torch_nvfp4" in json.loads((folder / "adapter_config.json").read_text())


def test_the_adapter_is_stamped_once_it_is_merge_aware(trained: tuple[FinetuneResult, str]) -> None:
    output = trained[0].adapter_dir
    marks = {path.name[-2:]: stamped(path) for path in output.glob("checkpoint-*")}
    assert stamped(output) and marks == {"03": False, "06": False, "09": True, "12": True}


@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_resumed_run_is_the_same_run(
    step: int, folder: Path, trained: tuple[FinetuneResult, str], tmp_path: Path
) -> None:
    name = f"checkpoint-{step:08}"
    shutil.copytree(trained[0].adapter_dir / name, tmp_path / "out" / name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*merge-aware")
        result, told = run(folder, tmp_path / "out")
    assert f"{step} of 12 steps are done" in told
    wanted, got = (load_file(path / "adapter_model.safetensors") for path in (trained[0].adapter_dir, tmp_path / "out"))
    assert all(torch.equal(wanted[key], got[key]) for key in wanted)
    assert (result.final_loss, result.unmerged_loss) == (trained[0].final_loss, trained[0].unmerged_loss)


def test_a_dense_base_is_the_same_run_and_how_to_make_it_is_said(
    folder: Path, trained: tuple[FinetuneResult, str], tmp_path: Path
) -> None:
    result, told = run(folder, tmp_path / "out", model=str(folder / "base"))
    assert result.final_loss == pytest.approx(trained[0].final_loss, abs=1e-5)
    assert f"torch-nvfp4 quantize {folder / 'base'} OUT --no-share-gate-up" in told
    assert "torch-nvfp4 quantize" not in trained[1]


def test_compiled(folder: Path, tmp_path: Path) -> None:
    options = COMPILED | {"model": str(folder / "one_layer_packed"), "save_every": 0, "merge_aware_start": 2.0}
    compiled, told = run(folder, tmp_path / "compiled", **options)
    eager, _ = run(folder, tmp_path / "eager", **(options | {"compile": "off"}))
    assert compiled.path.startswith("compiled") and "merge-aware from step 3 on\n" in told
    assert compiled.final_loss == pytest.approx(eager.final_loss, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"merge_aware_start": 0.5}, "--merge-aware-start says when, and not that: give --merge-aware too"),
        (
            {"merge_aware": True, "merge_aware_start": 12.0},
            "--merge-aware-start is 12: give a whole step below",
        ),
        ({"merge_aware": True, "merge_aware_start": 2.5}, "--merge-aware-start is 2.5: give a whole step"),
        ({"merge_aware": True, "merge_aware_start": -1.0}, "--merge-aware-start is -1: give"),
        ({"merge_aware": True, "merge_aware_start": float("nan")}, "--merge-aware-start is nan: give"),
    ],
)
def test_a_start_that_is_none(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=text):
        tiny_config(tmp_path, tmp_path / "out", **changes).validate()


def test_adapters_on_dense_layers_alone_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="--merge-aware: no adapter is on packed weights"):
        run(folder, tmp_path / "out", targets=("q_proj",))


def test_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\noutput: o\ntext: t\nmerge-aware: true\nmerge-aware-start: 50\n")
    config = FinetuneConfig(**read(file))
    assert config.merge_aware_from == 50
    assert FinetuneConfig(**(read(file) | {"merge_aware_start": 0.25})).merge_aware_from == 50
    assert FinetuneConfig(**(read(file) | {"merge_aware_start": 0.0})).merge_aware_from == 0
