"""Packed checkpoints loaded in parts: the values of a whole load, and no more bytes read than a rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import modelopt
from packed_models import COMPRESSED, W123, Style, export, make_stock
from peft import LoraConfig, get_peft_model
from ranks import Ranks
from sharded_models import assert_same_model, close, language_loss, of_rank, sequences, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from torch_nvfp4 import lora
from torch_nvfp4.checkpoint import PackedWeight, use_input_scales
from torch_nvfp4.checkpoint.files import Reader
from torch_nvfp4.distributed import (
    ParallelExperts,
    expert_parameters,
    experts_modules,
    parallelize_experts,
    shard_layers,
)
from torch_nvfp4.distributed.load import empty_model, load_shards
from torch_nvfp4.nn import NVFP4Experts


def calibrated(stem: str, packed: PackedWeight) -> dict[str, Tensor]:
    """With a scale of its activations."""
    largest = torch.tensor(0.002 + 1e-5 * float(packed.codes.float().mean()))
    return modelopt(stem, packed) | {f"{stem}.input_scale": largest}


STYLES = {
    "mixtral": Style(write=calibrated, renames=W123),
    "deepseek_v3": Style(**COMPRESSED),
    "gpt_oss": Style(),
    "glm_moe_dsa": Style(),  # a layer of it cannot stay packed
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for architecture, style in STYLES.items():
        folder = tmp_path_factory.mktemp(architecture)
        export(make_stock(architecture), folder, style)
        made[architecture] = str(folder)
    return made


def assert_same_tensors(found: nn.Module, expected: nn.Module) -> None:
    for of_found, of_expected in ((found.named_parameters(), expected.named_parameters()),
                                  (found.named_buffers(), expected.named_buffers())):  # fmt: skip
        ours, theirs = dict(of_found), dict(of_expected)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            value, truth = whole(tensor.detach()), theirs[name].detach()
            assert value.dtype == truth.dtype and torch.equal(value, truth), name


@pytest.mark.parametrize("architecture", STYLES)
def test_without_a_group_the_model_is_that_of_from_pretrained(folders: dict[str, str], architecture: str) -> None:
    folder = folders[architecture]
    whole_model, model = AutoModelForCausalLM.from_pretrained(folder), empty_model(folder)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    load_shards(model)
    assert_same_tensors(model, whole_model)
    ids = sequences()
    assert torch.equal(model(input_ids=ids).logits, whole_model(input_ids=ids).logits)


class _Counting:
    """What is read of each file, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, original = 0, Reader._bytes

        def counted(reader: Reader, info: Any, begin: int, end: int) -> bytearray:
            self.count += end - begin
            return original(reader, info, begin, end)

        monkeypatch.setattr(Reader, "_bytes", counted)


def _shards(folder: str, rows: int) -> int:
    """Load on all ranks; every value is right; returns the bytes that this rank read of the weights' files."""
    model = empty_model(folder)
    shard_layers(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counting = _Counting(monkeypatch)
        load_shards(model)
    held = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_same_tensors(model, AutoModelForCausalLM.from_pretrained(folder))
    # beside what it holds: a few global scales more than once, and the decoded layer's 4-bit codes
    assert counting.count <= held + rows, (counting.count, held)
    return counting.count


@pytest.mark.parametrize("architecture", STYLES)
def test_each_rank_reads_its_part(four: Ranks, folders: dict[str, str], architecture: str) -> None:
    counts = four.run(_shards, folders[architecture], 4096)
    total = sum(p.nbytes for p in empty_model(folders[architecture]).parameters())
    assert max(counts) < total / 2, (counts, total)


def _own_experts(folder: str) -> tuple[int, int]:
    """Experts split: their bytes that this rank read, and those of all; every value is right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    whole_model, counts = AutoModelForCausalLM.from_pretrained(folder), []
    for sharded in (False, True):
        model = empty_model(folder)
        parallelize_experts(model, mesh)
        if sharded:
            for module in experts_modules(model).values():
                fully_shard(module, mesh=mesh["dp"])
            shard_layers(model, mesh["dp", "ep"]._flatten("everyone"))
        with pytest.MonkeyPatch.context() as monkeypatch:
            counting = _Counting(monkeypatch)
            load_shards(model)
        held = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
        assert counting.count <= held + 4096, (counting.count, held)
        split, truths = expert_parameters(model), dict(whole_model.named_parameters())
        for name, parameter in model.named_parameters():
            truth = truths[name].detach()
            truth = truth.chunk(2)[mesh["ep"].get_local_rank()] if name in split else truth
            assert torch.equal(whole(parameter.detach()), truth), name
        assert all(not m.lost for m in model.modules() if isinstance(m, ParallelExperts))
        counts.append(sum(getattr(p, "_local_tensor", p).nbytes for p in split.values()))
    return counts[0], counts[1]


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_each_rank_reads_its_own_experts(four: Ranks, folders: dict[str, str], architecture: str) -> None:
    model = empty_model(folders[architecture])
    experts = sum(p.nbytes for m in model.modules() if isinstance(m, NVFP4Experts) for p in m.parameters())
    assert four.run(_own_experts, folders[architecture]) == [(experts / 2, experts / 4)] * 4


def _scales_of_activations(folder: str) -> None:
    """Calibrated ones, put to use before the model has memory or afterwards."""
    one, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), sequences()
    plain = one(input_ids=ids).logits
    use_input_scales(one)
    truth = one(input_ids=ids).logits
    assert (truth - plain).abs().max() > 1e-2 * plain.abs().max()
    for split in (False, True):
        for before in (True, False):
            model = empty_model(folder, dtype=torch.float32)
            if before:
                use_input_scales(model)
            if split:
                parallelize_experts(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
            else:
                shard_layers(model)
            load_shards(model)
            if not before:
                use_input_scales(model)
            found, expected = (
                {name: buffer for name, buffer in m.named_buffers() if name.endswith("input_scale")}
                for m in (model, one)
            )
            assert found.keys() == expected.keys() and len({int(scale) for scale in found.values()}) > 2
            assert all(torch.equal(scale, expected[name]) for name, scale in found.items())
            close(model(input_ids=ids).logits.detach(), truth.detach(), 1e-3 if split else 0.0)


def test_scales_of_activations_are_those_of_a_whole_model(two: Ranks, folders: dict[str, str]) -> None:
    two.run(_scales_of_activations, folders["mixtral"])


def _train(folder: str, adapters: str) -> None:
    model, one = empty_model(folder, dtype=torch.float32), AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    models: list[Any] = [model, one]
    if adapters == "own":
        for m in models:
            lora.add_lora(m, r=3, targets=("experts", "q_b_proj", "o_proj"))
    else:
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(r=3, target_modules=["q_b_proj", "o_proj"], target_parameters=targets)
        models = [get_peft_model(m, config) for m in models]
    model, one = models
    shard_layers(model)
    load_shards(model)
    names = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                start = whole(parameter)
                b = "lora_b" in name.lower()
                assert not start.any() if b else start.abs().max() <= 1 / start.shape[-1] ** 0.5 and start.std() > 0
                names[name].copy_(start)
                if b:  # else A has no gradient
                    parameter.fill_(0.01)
                    names[name].fill_(0.01)
    ids = sequences()
    for m, rows in ((model, of_rank(ids)), (one, ids)):
        language_loss(m.train(), rows).backward()
    assert_same_model(model, one, tolerance=1e-5)


@pytest.mark.parametrize("adapters", ["own", "peft"])
def test_adapters_made_without_memory_train(four: Ranks, folders: dict[str, str], adapters: str) -> None:
    four.run(_train, folders["deepseek_v3"], adapters)


def test_refusals(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nope is no folder here: only a packed checkpoint in one"):
        empty_model("nope")
    with pytest.raises(ValueError, match=r"has no config.json that transformers can read \(") as refusal:
        empty_model(tmp_path)
    assert refusal.value.__cause__ is not None
    make_stock("mixtral").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no folder of a packed checkpoint"):
        empty_model(tmp_path)
    model = empty_model(folders["mixtral"])
    model.model.norm.extra = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(ValueError, match=r"no tensor for 1 parameters, first model\.norm\.extra"):
        load_shards(model)
    targets = ["experts.gate_up_proj"]
    config = LoraConfig(r=3, target_modules=[], target_parameters=targets, init_lora_weights=False)
    with pytest.raises(ValueError, match="init_lora_weights=False"):
        load_shards(get_peft_model(empty_model(folders["mixtral"]), config))
