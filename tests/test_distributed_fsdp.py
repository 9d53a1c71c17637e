"""FSDP2 on packed models: the values of one process, and packed weights that travel as bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sharded_models import (
    PACKED,
    Stack,
    assert_same_model,
    close,
    language_loss,
    language_model,
    of_rank,
    routed,
    sequences,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nvfp4.distributed import shard_layers


def _same_as_one_process(adapters: str, architecture: str, options: dict[str, Any]) -> list[str]:
    model, one, ids = language_model(adapters, architecture), language_model(adapters, architecture), sequences()
    layers = shard_layers(model, **options)
    loss = language_loss(model, of_rank(ids))
    loss.backward()
    truth = language_loss(one, ids)
    truth.backward()
    assert_same_model(model, one)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    close(mean / dist.get_world_size(), truth.detach(), 1e-6)
    return layers


@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
@pytest.mark.parametrize("adapters", ["own", "peft"])
def test_gradients_are_those_of_one_process(four: Ranks, adapters: str, reshard_after_forward: bool | int) -> None:
    options = {"reshard_after_forward": reshard_after_forward}
    layers, *_ = four.run(_same_as_one_process, adapters, "qwen3_moe", options)
    prefix = "base_model.model.model" if adapters == "peft" else "model"
    assert layers == [f"{prefix}.layers.0", f"{prefix}.layers.1"]


@pytest.mark.parametrize(("architecture", "offload"), [("gpt_oss", True), ("deepseek_v3", False)])
def test_biases_and_buffers(four: Ranks, architecture: str, offload: bool) -> None:
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    four.run(_same_as_one_process, "own", architecture, options)


def _steps(num_experts: int, counts: list[int], mesh_shape: tuple[int, ...], offload: bool) -> None:
    """Two optimiser steps of two micro-batches, clipped, with FSDP2's own gradient accumulation."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model, one, world = Stack(num_experts), Stack(num_experts), dist.get_world_size()
    shard_layers(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (model, one)]
    batches = routed(counts, num_experts, idle=1)
    for _ in range(2):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            (model(*batches[dist.get_rank()]).square().sum() * world / sum(counts)).backward()
            for batch in batches:
                (one(*batch).square().sum() / sum(counts)).backward()
        assert_same_model(model, one, tolerance=1e-5)
        norms = [nn.utils.clip_grad_norm_([p for p in m.parameters() if p.requires_grad], 0.5) for m in (model, one)]
        close(whole(norms[0]), norms[1], 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(model, one, tolerance=1e-5, grads=False)


@pytest.mark.parametrize(
    ("num_experts", "counts", "mesh_shape", "offload"),
    [
        (8, [5, 3, 6, 4], (4,), False),
        (5, [5, 0, 6, 4], (4,), False),  # 5 experts on 4 ranks: 2, 2, 1 and none; a rank without tokens
        (3, [0, 0, 0, 7], (4,), False),
        (6, [5, 3, 6, 4], (2, 2), False),  # two replicas of two shards
        (5, [5, 3, 6, 4], (4,), True),
    ],
)
def test_steps(four: Ranks, num_experts: int, counts: list[int], mesh_shape: tuple[int, ...], offload: bool) -> None:
    four.run(_steps, num_experts, counts, mesh_shape, offload)


class _Gathers(TorchDispatchMode):
    """The dtype and the bytes of what each all-gather brings together, and of all reductions' inputs the dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[tuple[torch.dtype, int]] = []
        self.reduced: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_allgather_base_" in name:
            self.gathered.append((args[0].dtype, args[0].nbytes))
        elif "_reduce_scatter_base_" in name:
            self.reduced.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


def _bytes(policy: MixedPrecisionPolicy | None) -> None:
    world, experts = dist.get_world_size(), 8
    model = Stack(experts)
    adapter = sum(p.nbytes for n, p in model.layers[0].named_parameters() if "lora" in n)
    packed = sum(p.nbytes for n, p in model.layers[0].named_parameters() if n.endswith(PACKED))
    values = sum(2 * p.numel() for n, p in model.layers[0].named_parameters() if n.endswith("codes"))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith(PACKED)}
    shard_layers(model, mp_policy=policy)
    low = policy is not None
    with _Gathers() as seen:
        out = model(*routed([3] * world, experts)[dist.get_rank()])
        out.float().square().sum().backward()
    expected = packed + (adapter // 2 if low else adapter)
    # each layer in forward; again in backward the first one: the last is still there
    assert len(seen.gathered) in (3, 4), seen.gathered
    for dtype, size in seen.gathered:
        assert dtype == torch.uint8 and size == expected, (dtype, size, expected)
    assert packed < values * 2 * 0.3  # of what dense bf16 weights would take
    assert seen.reduced == {torch.float32}
    assert out.dtype == (torch.bfloat16 if low else torch.float32)
    for name, parameter in model.named_parameters():
        if name in before:
            assert torch.equal(whole(parameter.detach()), before[name]), name


def _low_precision(architecture: str, policy: MixedPrecisionPolicy) -> None:
    """One process whose floating parameters, and nothing else, are bf16: the same bits."""
    found, handed_on, ids = [], [], of_rank(sequences())
    for is_sharded in (True, False):
        model = language_model("own", architecture)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:  # as they are stored, which bf16 would round
                buffer.copy_(torch.linspace(-0.3, 0.3, buffer.numel()))
        if is_sharded:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            names = shard_layers(model, mp_policy=policy)
            model.get_submodule(names[0]).register_forward_hook(lambda *args: handed_on.append(args[-1].dtype))
        else:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(policy.param_dtype)
        output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        if is_sharded:
            assert output.logits.dtype == (policy.output_dtype or policy.param_dtype)
            assert handed_on == [policy.param_dtype]
            assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
            assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
        found.append(output)
    assert torch.equal(found[0].logits.float(), found[1].logits.float())
    assert torch.equal(found[0].loss.float(), found[1].loss.float())


@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("output_dtype", "cast"), [(None, True), (torch.float32, False)])
def test_low_precision(two: Ranks, architecture: str, output_dtype: torch.dtype | None, cast: bool) -> None:
    """Biases [E, N] of gpt-oss are parameters, DeepSeek's correction bias is a buffer."""
    two.run(_low_precision, architecture, MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype, cast))


@pytest.mark.parametrize("low", [False, True])
def test_packed_weights_are_gathered_as_bytes(four: Ranks, low: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else None
    four.run(_bytes, policy)


def _refusals() -> None:
    for model, text in ((nn.Linear(2, 2), "no packed module"), (Stack(2).layers[0].experts, "no layers")):
        with pytest.raises(ValueError, match=text):
            shard_layers(model)


def test_refusals(four: Ranks) -> None:
    four.run(_refusals)


def _recomputed() -> None:
    model, one, ids = language_model(), language_model(), sequences()
    shard_layers(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    language_loss(model, of_rank(ids)).backward()
    language_loss(one, ids).backward()
    assert_same_model(model, one)


def test_layers_recomputed_in_backward(four: Ranks) -> None:
    four.run(_recomputed)


def _compiled(num_experts: int) -> None:
    """Each layer is compiled by itself, without a graph break; FSDP2's hooks stay outside."""
    model, one, world = Stack(num_experts), Stack(num_experts), dist.get_world_size()
    for name in shard_layers(model):
        model.get_submodule(name).compile(backend="aot_eager", fullgraph=True)
    batches = routed([4] * world, num_experts)
    model(*batches[dist.get_rank()]).square().sum().backward()
    for batch in batches:
        (one(*batch).square().sum() / world).backward()
    assert_same_model(model, one)


def test_layers_compiled_one_by_one(two: Ranks) -> None:
    two.run(_compiled, 5)


def _compiled_language_model(architecture: str, adapters: str) -> None:
    """A decoder layer of transformers, with its hooks for router logits, is one graph under FSDP2."""
    model, one, ids = language_model(adapters, architecture), language_model(adapters, architecture), sequences()
    for name in shard_layers(model):
        model.get_submodule(name).compile(backend="aot_eager", fullgraph=True)
    for run, batch in ((model, of_rank(ids)), (one, ids)):
        language_loss(run, batch).backward()
    assert_same_model(model, one)


@pytest.mark.parametrize(("architecture", "adapters"), [("gpt_oss", "own"), ("qwen3_moe", "peft")])
def test_layers_of_transformers_compiled_one_by_one(two: Ranks, architecture: str, adapters: str) -> None:
    two.run(_compiled_language_model, architecture, adapters)
