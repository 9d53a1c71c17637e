"""Savers of PEFT and of transformers where experts are split over ranks: they refuse to write one rank's share."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch.distributed as dist
from expert_parallel import mesh_of
from golden_models import load
from packed_models import Style, export, make_stock
from peft import LoraConfig
from ranks import Ranks
from safetensors.torch import load_file
from sharded_models import language_loss, language_model, of_rank, sequences
from transformers import Trainer, TrainingArguments

from torch_nvfp4.checkpoint import CheckpointError
from torch_nvfp4.distributed import parallelize_experts, whole_adapters
from torch_nvfp4.hf import save_packed

SAVE_WITHIN = r"save within torch_nvfp4.distributed.whole_adapters\(model\)"


def _peft(folder: str) -> None:
    model, path = language_model("peft", num_experts=6), Path(folder)
    parallelize_experts(model, mesh_of(2))
    state = model.state_dict()
    for options in ({}, {"state_dict": state}, {"selected_adapters": ["default"]}, {"is_main_process": False}):
        with pytest.raises(ValueError, match=SAVE_WITHIN):
            model.save_pretrained(path / "share", **options)
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=1, max_steps=1, report_to=[], disable_tqdm=True
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in sequences()]
    trainer = Trainer(model, arguments, train_dataset=rows)
    with pytest.raises(ValueError, match=SAVE_WITHIN) if trainer.args.should_save else contextlib.nullcontext():
        trainer.save_model(str(path / "share"))
    assert not (path / "share" / "adapter_model.safetensors").exists()
    with whole_adapters(model):
        if dist.get_rank() == 0:
            model.save_pretrained(path / "whole")
    with pytest.raises(ValueError, match=SAVE_WITHIN):  # it ends with the block
        model.save_pretrained(path / "share")
    dist.barrier()
    language_loss(model, of_rank(sequences())).backward()


def test_peft(two: Ranks, tmp_path: Path) -> None:
    two.run(_peft, str(tmp_path))
    one = language_model("peft", num_experts=6)
    one.save_pretrained(tmp_path / "one")
    whole, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "one"))
    assert whole.keys() == expected.keys()
    assert all(whole[key].equal(expected[key]) for key in expected)


def _transformers(folder: str) -> None:
    """Its own adapters (`add_adapter`), and packed weights, of which every rank has a share for good."""
    model = load(Path(folder, "source"))
    parallelize_experts(model, mesh_of(2))
    for save in (model.save_pretrained, lambda to: save_packed(model, to)):
        with pytest.raises(CheckpointError, match="experts holds this rank's share of the experts: save the model bef"):
            save(f"{folder}/packed")
    model = load(Path(folder, "source"))
    model.add_adapter(LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    parallelize_experts(model, mesh_of(2))
    with pytest.raises(ValueError, match=SAVE_WITHIN):
        model.save_pretrained(f"{folder}/adapter")
    with whole_adapters(model):
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/adapter")


def test_transformers(two: Ranks, tmp_path: Path) -> None:
    export(make_stock("mixtral"), tmp_path / "source", Style())
    two.run(_transformers, str(tmp_path))
    assert not list((tmp_path / "packed").glob("*.safetensors"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved and all(2 * 4 in tensor.shape for tensor in saved.values())
