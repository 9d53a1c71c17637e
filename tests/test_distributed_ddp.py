"""Data parallelism, as `torchrun`, Accelerate and transformers' Trainer do it, on packed models."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sharded_models import (
    Stack,
    assert_same_model,
    language_loss,
    language_model,
    of_rank,
    routed,
    sequences,
)
from torch.nn.parallel import DistributedDataParallel


def _same_as_one_process(adapters: str) -> None:
    model, one = language_model(adapters), language_model(adapters)
    wrapped = DistributedDataParallel(model)
    ids = sequences()
    loss = language_loss(wrapped, of_rank(ids))
    loss.backward()
    language_loss(one, ids).backward()
    assert_same_model(wrapped, one)


@pytest.mark.parametrize("adapters", ["own", "peft"])
def test_gradients_are_those_of_one_process(two: Ranks, adapters: str) -> None:
    two.run(_same_as_one_process, adapters)


def _broadcast() -> None:
    """Ranks that begin with other weights: DDP sends rank 0's, integers and all."""
    truth = Stack(3)
    model = Stack(3)
    if dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    assert_same_model(DistributedDataParallel(model), truth, grads=False)


def test_packed_parameters_are_broadcast_by_their_bytes(two: Ranks) -> None:
    two.run(_broadcast)


def _idle(counts: list[int], micro_batches: int) -> None:
    """Experts that no token of a rank meets; a rank without tokens; several micro-batches with and without no_sync."""
    model, one, world = Stack(5), Stack(5), dist.get_world_size()
    wrapped = DistributedDataParallel(model)  # find_unused_parameters is False
    tokens = sum(counts) * micro_batches
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        batches = routed(counts, 5, idle=2)
        with contextlib.nullcontext() if last else wrapped.no_sync():
            (wrapped(*batches[dist.get_rank()]).square().sum() * world / tokens).backward()
        for batch in batches:
            (one(*batch).square().sum() / tokens).backward()
    assert_same_model(wrapped, one)
    assert not model.layers[0].experts.gate_up_lora_a.grad[3:].any()


@pytest.mark.parametrize("counts", [[7, 4], [9, 0]])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_idle_experts_and_a_rank_without_tokens(two: Ranks, counts: list[int], micro_batches: int) -> None:
    two.run(_idle, counts, micro_batches)


def _trainer(folder: str) -> list[float]:
    from transformers import Trainer, TrainingArguments

    model, rows = language_model("peft"), [{"input_ids": ids, "labels": ids} for ids in sequences()]
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=2,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, save_strategy="no",
        ddp_find_unused_parameters=False, logging_strategy="no", train_sampling_strategy="sequential", optim="sgd",
        max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel), type(trainer.model_wrapped)
    one = language_model("peft")
    optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        language_loss(one, sequences()).backward()
        optimizer.step()
    assert_same_model(model, one, tolerance=1e-5, grads=False)
    return [p.sum().item() for p in model.parameters() if p.requires_grad]


def test_trainer_with_accelerate(two: Ranks, tmp_path: Path) -> None:
    first, second = two.run(_trainer, str(tmp_path))
    assert first == second
