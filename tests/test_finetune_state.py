"""Checkpoints: exact, whole or absent, refused when they belong to another run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tiny import tiny_config
from torch import nn

from torch_nvfp4 import lora
from torch_nvfp4.nn import NVFP4Experts
from torch_nvfp4.train import state
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError
from torch_nvfp4.train.state import Progress, check_fingerprint, checkpoints, load_checkpoint, prepare_output

FINGERPRINT = {"rank": 2, "seq_len": 16, "model": "abc"}


class Crash(Exception):
    """Stands for the process dying."""


class Trainer:
    """A model with adapters on experts and on a linear layer, and an optimiser that takes random steps."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.experts = NVFP4Experts.from_dense(torch.randn(3, 64, 32), torch.randn(3, 32, 32))
        self.model.q_proj = nn.Linear(16, 8)
        lora.add_lora(self.model, r=2, expert_r=3, targets=("experts", "q_proj"))
        self.optimizer = optimizer(list(state.trainable(self.model).values()), lr=0.1, **options)
        self.progress = Progress(base_loss=2.0, quantized_loss=2.5)

    def step(self) -> None:
        for parameter in state.trainable(self.model).values():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.progress.step += 1
        self.progress.train_losses.append((self.progress.step, 1 / 3))

    def save(self, config: FinetuneConfig) -> Path:
        return state.save_checkpoint(config, self.model, self.optimizer, self.progress, FINGERPRINT)

    def load(self, path: Path) -> None:
        self.progress = load_checkpoint(path, self.model, self.optimizer)

    def bits(self) -> dict[str, bytes]:
        """Everything that training goes on from."""
        tensors = {**state.trainable(self.model), "rng": torch.get_rng_state()}
        for name, parameter in state.trainable(self.model).items():
            tensors |= {f"{name}/{k}": v for k, v in self.optimizer.state[parameter].items() if v is not None}
        return {name: t.detach().contiguous().numpy().tobytes() for name, t in tensors.items()}


@pytest.fixture
def config(tmp_path: Path) -> FinetuneConfig:
    return tiny_config(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("optimizer", "options"), [(torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})]
)
def test_a_loaded_trainer_goes_on_bit_for_bit(
    config: FinetuneConfig, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    prepare_output(config)
    first = Trainer(optimizer, **options)
    first.step()
    path = first.save(config)
    saved = first.bits()
    first.step()

    second = Trainer(optimizer, **options)
    second.load(path)
    assert second.bits() == saved
    second.step()
    assert second.bits() == first.bits()
    assert second.progress == first.progress


def test_a_checkpoint_is_an_adapter_that_can_be_loaded_by_itself(config: FinetuneConfig) -> None:
    prepare_output(config)
    trainer = Trainer()
    trainer.step()
    path = trainer.save(config)
    other = Trainer()
    lora.load_adapter(other.model, path)
    saved, loaded = lora.adapter_state_dict(trainer.model), lora.adapter_state_dict(other.model)
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[key], loaded[key]) for key in saved)


def test_old_checkpoints_are_pruned_and_newer_ones_are_not(config: FinetuneConfig) -> None:
    prepare_output(config)
    trainer = Trainer()
    for _ in range(4):
        trainer.step()
        trainer.save(config)
    assert [p.name for p in checkpoints(config.output)] == ["checkpoint-00000003", "checkpoint-00000004"]
    trainer.progress.step = 1  # as after a resume from an older one
    trainer.step()
    trainer.save(config)
    assert [int(p.name[-8:]) for p in checkpoints(config.output)] == [2, 3, 4]


def _crashing(monkeypatch: pytest.MonkeyPatch, crash_at: int) -> list[str]:
    """Make the `crash_at`-th change to the disk raise, half done if it can be; returns the changes."""
    done: list[str] = []

    def patch(owner: Any, name: str, half: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            if len(done) == crash_at:
                half(*args)
                raise Crash(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    def half_a_file(tensors: Any, path: Path) -> None:
        path.write_bytes(b"\x40\x00\x00")

    def half_an_adapter(model: nn.Module, folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"\x40")

    def half_a_folder(path: Path) -> None:
        next(iter(path.iterdir())).unlink()

    patch(state, "save_file", half_a_file)
    patch(lora, "save_adapter", half_an_adapter)
    patch(state, "_sync", lambda path: None)
    patch(os, "rename", lambda old, new: None)
    patch(shutil, "rmtree", half_a_folder)
    return done


def test_a_crash_at_any_write_leaves_a_checkpoint_to_resume_from(config: FinetuneConfig) -> None:
    prepare_output(config)
    trainer = Trainer()
    bits = {}
    for _ in range(2):
        trainer.step()
        trainer.save(config)
        bits[trainer.progress.step] = trainer.bits()
    trainer.step()
    bits[3], rng = trainer.bits(), torch.get_rng_state()
    before = config.output.with_name("before")
    config.output.rename(before)

    outcomes = []
    for crash_at in range(1, 99):
        shutil.rmtree(config.output, ignore_errors=True)
        shutil.copytree(before, config.output)
        torch.set_rng_state(rng)
        with pytest.MonkeyPatch.context() as monkeypatch:
            done = _crashing(monkeypatch, crash_at)
            try:
                trainer.save(config)
            except Crash as e:
                outcomes.append(str(e))
        found = prepare_output(config)
        assert found is not None
        again = Trainer()
        again.load(found)
        assert again.bits() == bits[again.progress.step], f"crash {crash_at} in {done[-1]}"
        assert all(p.name.startswith("checkpoint-") for p in config.output.iterdir()), "leftovers are removed"
        if len(done) < crash_at:
            break
    assert again.progress.step == 3, "the last round did not crash"
    assert set(outcomes) == {"save_file", "save_adapter", "_sync", "rename", "rmtree"}


def test_saving_a_step_again_replaces_it(config: FinetuneConfig) -> None:
    prepare_output(config)
    trainer = Trainer()
    trainer.step()
    trainer.save(config)
    trainer.progress.eval_losses.append((1, 0.5))
    path = trainer.save(config)
    assert load_checkpoint(path, trainer.model, trainer.optimizer).eval_losses == [(1, 0.5)]
    assert [p.name for p in config.output.iterdir()] == [path.name]


def test_another_configuration_is_refused(config: FinetuneConfig) -> None:
    prepare_output(config)
    trainer = Trainer()
    path = trainer.save(config)
    check_fingerprint(path, FINGERPRINT)
    with pytest.raises(FinetuneError, match=r"was made with seq_len=16, this run has 32: use the same"):
        check_fingerprint(path, FINGERPRINT | {"seq_len": 32})
    with pytest.raises(FinetuneError, match=r"was made with another model \(and 1 more\)"):
        check_fingerprint(path, FINGERPRINT | {"model": "def", "rank": 4})


def test_every_setting_that_changes_the_numbers_is_in_the_fingerprint(config: FinetuneConfig) -> None:
    same = {
        "output": Path("x"),
        "save_every": 1,
        "eval_every": 1,
        "keep": 9,
        "compile": "on",
        "plot": True,
        "model": "moved",
    }
    assert replace(config, **same).fingerprint() == config.fingerprint()
    for change in (
        {"rank": 9}, {"expert_rank": 9}, {"alpha": 9.0}, {"rslora": True}, {"targets": ("experts",)},
        {"lr": 9.0}, {"steps": 99}, {"batch": 9}, {"seq_len": 9}, {"grad_accum": 9}, {"warmup": 9},
        {"weight_decay": 9.0}, {"clip": 9.0}, {"lora_dtype": "bfloat16"}, {"dtype": "bfloat16"},
        {"optim": "sgd"}, {"seed": 9}, {"gradient_checkpointing": True}, {"eval_fraction": 0.9},
    ):  # fmt: skip
        assert replace(config, **change).fingerprint() != config.fingerprint(), change
    json.dumps(config.fingerprint())


@pytest.mark.parametrize("name", ["state.json", "training.safetensors", "adapter_model.safetensors"])
def test_a_damaged_file_is_named_as_such(config: FinetuneConfig, name: str) -> None:
    prepare_output(config)
    trainer = Trainer()
    trainer.step()
    path = trainer.save(config)
    (path / name).write_bytes((path / name).read_bytes()[:20])
    with pytest.raises(FinetuneError, match="is damaged .*: delete that folder"):
        trainer.load(path)


def test_output_folders(config: FinetuneConfig) -> None:
    assert prepare_output(config) is None
    (config.output / ".checkpoint-00000003.partial").mkdir()
    assert prepare_output(config) is None and not any(config.output.iterdir())
    trainer = Trainer()
    path = trainer.save(config)
    assert prepare_output(config) == path
    assert prepare_output(replace(config, resume=str(path))) == path
    with pytest.raises(FinetuneError, match="is not empty: resume it with --resume auto or give another --output"):
        prepare_output(replace(config, resume="never"))
    with pytest.raises(FinetuneError, match="is no checkpoint"):
        prepare_output(replace(config, resume=str(config.output)))
    shutil.rmtree(path)
    (config.output / "thesis.tex").touch()
    with pytest.raises(FinetuneError, match="out is not empty: give another --output"):
        prepare_output(config)
    with pytest.raises(FinetuneError, match="cannot be written"):
        prepare_output(replace(config, output=config.output / "thesis.tex"))
