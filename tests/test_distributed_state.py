"""Saving and resuming sharded runs: adapters in PEFT's format, and torch's distributed checkpoints, at any size."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_parallel import mesh_of
from hf_models import randomize_adapters
from ranks import Ranks
from sharded_models import (
    assert_same_model,
    assert_stamped_without_base,
    language_loss,
    language_model,
    of_rank,
    sequences,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_nvfp4 import lora
from torch_nvfp4._lora.sharded import whole
from torch_nvfp4.distributed import parallelize_experts, shard_layers, whole_adapters
from torch_nvfp4.nn import NVFP4Experts, set_numerics

TARGETS = ("experts", "q_proj", "o_proj")


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=sequences(), use_cache=False).logits


def _adapter(folder: str) -> None:
    """Saved by all, loaded by all, and off where asked."""
    one = language_model()
    set_numerics(one, merge_aware=True)
    sharded = copy.deepcopy(one)
    shard_layers(sharded)
    state = lora.adapter_state_dict(one)
    for name, tensor in lora.adapter_state_dict(sharded).items():
        assert torch.equal(tensor, state[name]), name
    lora.save_adapter(sharded, folder)
    dist.barrier()
    other = language_model()
    set_numerics(other, merge_aware=True)
    for parameter in other.parameters():
        if parameter.requires_grad:
            parameter.detach().zero_()
    shard_layers(other)
    lora.load_adapter(other, folder)
    assert_same_model(other, one, grads=False)
    for kind in ("experts", "all"):
        with lora.disable_adapters(one, kind), lora.disable_adapters(sharded, kind):  # type: ignore[arg-type]
            torch.testing.assert_close(_logits(sharded), _logits(one), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(_logits(sharded), _logits(one), rtol=1e-6, atol=1e-6)
    lora.remove_adapters(one)
    shard_layers(one)
    for add in (lambda: lora.add_lora(one, targets=TARGETS), lambda: lora.load_adapter(one, folder)):
        with pytest.raises(ValueError, match=r"sharded \(fully_shard\): put the adapters on it before"):
            add()


def test_adapters_of_a_sharded_model(four: Ranks, tmp_path: Path) -> None:
    four.run(_adapter, str(tmp_path))
    model = language_model()
    set_numerics(model, merge_aware=True)
    lora.save_adapter(model, tmp_path / "one")
    assert_stamped_without_base(tmp_path, tmp_path / "one")
    expected = lora.adapter_state_dict(model)
    randomize_adapters(model, std=1.0)
    lora.load_adapter(model, tmp_path)
    assert all(torch.equal(t, expected[name]) for name, t in lora.adapter_state_dict(model).items())


def _after_a_forward(folder: str, reshard_after_forward: bool | int) -> None:
    """What a forward leaves gathered, in low precision, is neither saved nor what an adapter is loaded into."""
    one, model = language_model(), language_model()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard_layers(model, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    expected = lora.adapter_state_dict(one)
    for round in range(2):
        _logits(model)
        found = lora.adapter_state_dict(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        if round == 0:
            randomize_adapters(one, std=0.2)
            lora.save_adapter(one, f"{folder}/{dist.get_rank()}")
            expected = lora.adapter_state_dict(one)
            _logits(model)
            lora.load_adapter(model, f"{folder}/{dist.get_rank()}")
    lora.export_adapter(model, f"{folder}/2d")
    assert_same_model(model, one, grads=False)


@pytest.mark.parametrize("reshard_after_forward", [False, 2])
def test_adapters_after_a_forward(four: Ranks, tmp_path: Path, reshard_after_forward: bool | int) -> None:
    four.run(_after_a_forward, str(tmp_path), reshard_after_forward)


class _Offloaded:
    """A DTensor that FSDP2 keeps on the CPU, of a mesh of GPUs, whose group cannot gather it there."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.device_mesh = torch.device(device), SimpleNamespace(device_type="meta")  # stands for "cuda"

    def to(self, device: Any) -> Any:
        return _Offloaded(str(device))

    def full_tensor(self) -> torch.Tensor:
        assert self.device.type == "meta"
        return torch.ones(2)


def test_adapters_that_are_offloaded_are_gathered_where_the_mesh_is() -> None:
    offloaded: Any = _Offloaded()
    assert torch.equal(whole(offloaded), torch.ones(2)) and whole(offloaded).device.type == "cpu"


def _trainer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, *, one: bool = False) -> None:
    language_loss(model, sequences() if one else of_rank(sequences())).backward()
    optimizer.step()
    optimizer.zero_grad()


_ADAPTERS = StateDictOptions(ignore_frozen_params=True)


def _save(folder: str, adapters: str) -> None:
    model = language_model(adapters)
    shard_layers(model)
    optimizer = _trainer(model)
    for _ in range(2):
        _step(model, optimizer)
    state, of_optimizer = get_state_dict(model, optimizer, options=_ADAPTERS)
    assert state and all("lora" in name for name in state)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)


def _resume(folder: str, adapters: str) -> None:
    model = language_model(adapters)
    randomize_adapters(model, std=1.0)
    shard_layers(model)
    optimizer = _trainer(model)
    state, of_optimizer = get_state_dict(model, optimizer, options=_ADAPTERS)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer, options=options)
    one = language_model(adapters)
    of_one = _trainer(one)
    for _ in range(3):
        _step(one, of_one, one=True)
    _step(model, optimizer)
    # AdamW's first steps divide a gradient by its own size, so a rounding of a tiny one shows
    assert_same_model(model, one, tolerance=1e-4, grads=False)


@pytest.mark.parametrize("adapters", ["own", "peft"])
def test_saved_on_four_and_resumed_on_two(four: Ranks, two: Ranks, tmp_path: Path, adapters: str) -> None:
    four.run(_save, str(tmp_path), adapters)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1 << 20
    two.run(_resume, str(tmp_path), adapters)


def _save_peft(folder: str) -> None:
    model: Any = language_model("peft")
    set_numerics(model, merge_aware=True)
    shard_layers(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()


def test_peft_saves_a_sharded_model(two: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    two.run(_save_peft, str(tmp_path / "sharded"))
    one: Any = language_model("peft")
    set_numerics(one, merge_aware=True)
    one.save_pretrained(tmp_path / "one")
    assert_stamped_without_base(tmp_path / "sharded", tmp_path / "one")
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sharded", "one"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def _split(**changes: Any) -> Any:
    model = language_model(num_experts=6, **changes)
    parallelize_experts(model, mesh_of(2))
    return model


def _state_of_a_share(folder: str) -> None:
    """It has the names of the whole and says whose it is: it loads where it came from, and nowhere else."""
    rank, whole_model, model = dist.get_rank(), language_model(num_experts=6), _split()
    state = model.state_dict()
    assert state.keys() == whole_model.state_dict().keys()
    torch.save(state, f"{folder}/{rank}.pt")
    dist.barrier()
    same, other = _split(), torch.load(f"{folder}/{1 - rank}.pt")
    randomize_adapters(same, std=1.0)
    same.load_state_dict(torch.load(f"{folder}/{rank}.pt"))
    assert all(torch.equal(tensor, state[name]) for name, tensor in same.state_dict().items())
    mine, theirs = ("experts 0 to 2 of 6", "experts 3 to 5 of 6")[:: 1 - 2 * rank]
    with pytest.raises(RuntimeError, match=f"has {theirs}, and this module holds {mine}: the state dict of split"):
        same.load_state_dict(other)
    with pytest.raises(RuntimeError, match=f"has {mine}, and this module holds all 6 experts"):
        whole_model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=f"has all 6 experts, and this module holds {mine}"):
        same.load_state_dict(whole_model.state_dict())
    layer = model.model.layers[0].mlp.experts
    small = NVFP4Experts(3, layer.hidden_size, layer.intermediate_size)
    with pytest.raises(RuntimeError, match="this module holds all 3 experts"):
        small.load_state_dict(layer.state_dict(), strict=False)
    with whole_adapters(model):
        adapters = model.state_dict()
    for name in [name for name in adapters if "lora" not in name]:
        del adapters[name]
    randomize_adapters(whole_model, std=1.0)
    whole_model.load_state_dict(adapters, strict=False)
    randomize_adapters(same, std=1.0)
    with whole_adapters(same):
        same.load_state_dict(adapters, strict=False)
    assert_same_model(whole_model, language_model(num_experts=6), grads=False)
    assert all(torch.equal(tensor, state[name]) for name, tensor in same.state_dict().items())

    with whole_adapters(model):
        dcp.save({"model": get_model_state_dict(model, options=_ADAPTERS)}, checkpoint_id=f"{folder}/dcp")
    randomize_adapters(same, std=1.0)
    with whole_adapters(same):
        of_all = get_model_state_dict(same, options=_ADAPTERS)
        dcp.load({"model": of_all}, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(same, of_all, options=StateDictOptions(ignore_frozen_params=True, strict=False))
    assert all(torch.equal(tensor, state[name]) for name, tensor in same.state_dict().items())


def test_a_share_loads_where_it_came_from(two: Ranks, tmp_path: Path) -> None:
    two.run(_state_of_a_share, str(tmp_path))
