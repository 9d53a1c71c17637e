"""transformers' Trainer under FSDP2: Accelerate's sharding, and models that `shard_layers` has sharded before.

Accelerate has FSDP2 for accelerators alone, and gives CPUs DistributedDataParallel without a word. So that it runs over
gloo, it is told here that its processes have GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_models import load
from packed_models import Style, export, make_stock
from peft import LoraConfig, get_peft_model
from ranks import Ranks
from safetensors.torch import load_file
from sharded_models import assert_same_model, close, language_loss, sequences, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torch_nvfp4._lora.sharded import copy_whole
from torch_nvfp4.distributed import shard_layers
from torch_nvfp4.distributed.load import empty_model, load_shards

STEPS = 2


def _adapted(model: nn.Module) -> nn.Module:
    names = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "o_proj"], target_parameters=names))


def _started(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in _trained(model).values():
            copy_whole(parameter, 0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """By the names that PEFT gives in files."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name.replace(".default.", ".").replace("_checkpoint_wrapped_module.", ""): p for name, p in named.items()}


def _one_process(folder: str) -> Iterator[nn.Module]:
    """The model after each step."""
    model = _started(_adapted(load(Path(folder, "packed"))))
    optimizer = torch.optim.AdamW(list(_trained(model).values()), lr=1e-2, eps=1e-2, weight_decay=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        language_loss(model, sequences()).backward()
        optimizer.step()
        yield model


def _sharded_before(folder: str) -> nn.Module:
    model = _adapted(empty_model(Path(folder, "packed"), dtype=torch.float32))
    shard_layers(model)
    load_shards(model)
    return model


def _train(folder: str, config: dict[str, Any], before: bool) -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in sequences()]

    def trained(resume: str | None) -> nn.Module:
        arguments = TrainingArguments(
            f"{folder}/run", use_cpu=True, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            max_steps=STEPS, save_steps=1, learning_rate=1e-2, lr_scheduler_type="constant", adam_epsilon=1e-2,
            weight_decay=0.0, max_grad_norm=0.0, train_sampling_strategy="sequential", report_to=[],
            disable_tqdm=True, logging_strategy="no", fsdp=True, fsdp_config=config,
        )  # fmt: skip
        assert PartialState().distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        model = _sharded_before(folder) if before else _adapted(load(Path(folder, "packed")))
        trainer = Trainer(_started(model), arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    model = trained(None)
    layers = [name for name, module in model.named_modules() if isinstance(module, FSDPModule) and "layers." in name]
    assert len({name.split("layers.")[1][0] for name in layers}) == model.config.num_hidden_layers == 2
    for step, one in enumerate(_one_process(folder), 1):
        saved = load_file(f"{folder}/run/checkpoint-{step}/adapter_model.safetensors")
        expected = _trained(one)
        assert saved.keys() == expected.keys(), (sorted(saved), sorted(expected))
        for name, value in saved.items():
            close(value, expected[name].detach(), 1e-5, name)
    assert_same_model(model, one, tolerance=1e-5, grads=False)
    resumed = _trained(trained(f"{folder}/run/checkpoint-1"))
    for name, parameter in _trained(model).items():
        close(whole(resumed[name].detach()), whole(parameter.detach()), 1e-6, name)


@pytest.mark.parametrize(
    ("config", "before"),
    [
        ({"activation_checkpointing": True}, False),
        ({"cpu_ram_efficient_loading": True, "reshard_after_forward": False}, False),
        ({"auto_wrap_policy": "NO_WRAP"}, True),
    ],
)
def test_trainer(two: Ranks, tmp_path: Path, config: dict[str, Any], before: bool) -> None:
    export(make_stock("mixtral"), tmp_path / "packed", Style())
    two.run(_train, str(tmp_path), config, before)
