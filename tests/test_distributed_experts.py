"""Expert parallelism against one process: output, loss, and the gradients of experts, router and input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expert_parallel as ep
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from safetensors.torch import load_file
from sharded_models import assert_stamped_without_base, close, language_loss, language_model, of_rank, sequences, whole
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_nvfp4 import load_adapter, save_adapter
from torch_nvfp4.distributed import (
    average_gradients,
    clip_gradients,
    expert_parameters,
    experts_modules,
    parallelize_experts,
    shard_layers,
    whole_adapters,
)
from torch_nvfp4.nn import set_numerics


def _same(
    counts: list[int], options: dict[str, Any], stack: dict[str, Any], micro_batches: int, compiled: bool
) -> None:
    """Each rank has its own tokens; data parallel ranks are the ep ranks."""
    mesh = ep.mesh_of(len(counts))
    model, (one, truths) = ep.RoutedStack(**stack), ep.one_process(counts, micro_batches, **stack)
    parallelize_experts(model, mesh, **options)
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.config.capture_scalar_outputs = not options  # the exact exchange's sizes become symbols
        model.layers[0].compile(fullgraph=True, backend="aot_eager")
    x, truth = ep.batches(counts)[ep.my_rank()], truths[ep.my_rank()]
    for _ in range(micro_batches):
        y = model(x)
        ep.loss_of(y).backward()
    average_gradients(model, mesh)
    expected = one(truth)
    if x.shape[0]:
        close(y.detach(), expected.detach(), 1e-6, "output")
        close(ep.loss_of(y.detach()), ep.loss_of(expected.detach()), 1e-6, "loss")
        close(x.grad, truth.grad * len(counts), 2e-6, "input")
    ep.assert_same(model, one, mesh)


EXACT: dict[str, Any] = {}
ROOMY: dict[str, Any] = {"capacity": 24}
SLOTS: dict[str, Any] = {"capacity": 24, "slots": 40}


@pytest.mark.parametrize("options", [EXACT, ROOMY, SLOTS], ids=["exact", "capacity", "slots"])
@pytest.mark.parametrize(
    ("counts", "stack", "micro_batches"),
    [([9, 13], {}, 1), ([17, 0], {}, 1), ([5, 7], {"idle": 5}, 1), ([6, 6], {"num_experts": 4, "top_k": 2}, 2)],
    ids=["uneven", "a rank without tokens", "experts without tokens", "accumulated"],
)
def test_two_ranks_give_what_one_process_gives(
    two: Ranks, options: dict[str, Any], counts: list[int], stack: dict[str, Any], micro_batches: int
) -> None:
    two.run(_same, counts, options, stack, micro_batches, False)


@pytest.mark.parametrize("options", [EXACT, ROOMY], ids=["exact", "capacity"])
def test_four_ranks_give_what_one_process_gives(four: Ranks, options: dict[str, Any]) -> None:
    four.run(_same, [11, 3, 0, 8], options, {}, 1, False)


@pytest.mark.parametrize("options", [EXACT, ROOMY], ids=["exact", "capacity"])
def test_a_block_compiles_to_one_graph(two: Ranks, options: dict[str, Any]) -> None:
    two.run(_same, [9, 13], options, {}, 1, True)


def _fits(ids: torch.Tensor, ranks: int, per_rank: int, tokens: int, slots: int) -> torch.Tensor:
    """Ids of one sender without the slots that a capacity leaves out: a loop over its slots in order."""
    kept = ids.clone()
    for rank in range(ranks):
        carried: list[int] = []
        computed = 0
        for t in range(ids.shape[0]):
            mine = [k for k in range(ids.shape[1]) if ids[t, k] >= 0 and ids[t, k] // per_rank == rank]
            if mine:
                carried.append(t)
            for k in mine:
                computed += len(carried) <= tokens
                if len(carried) > tokens or computed > slots:
                    kept[t, k] = -1
    return kept


def _overflow(options: dict[str, Any], slots: int) -> int:
    mesh, rank = ep.mesh_of(2), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(12)])
    ids[4, 1], ids[7] = -1, 8  # an id of nobody is not routed
    x, weights = torch.randn(12, 32, generator=generator), torch.rand(12, 3, generator=generator)
    one, model = ep.RoutedStack().layers[0].experts, ep.RoutedStack().layers[0].experts
    parallelize_experts(model, mesh, **options)
    y = model(x, ids, weights)
    kept = _fits(torch.where(ids < 8, ids, -1), 2, 4, options["capacity"], slots)
    close(y.detach(), one(x, kept, weights).detach(), 1e-6)
    lost = int(((ids >= 0) & (ids < 8)).sum() - (kept >= 0).sum())
    assert model.lost == lost
    return lost


@pytest.mark.parametrize(("tokens", "slots"), [(12, 36), (5, 15), (12, 9), (6, 8)])
def test_what_has_no_room_is_dropped_and_counted(two: Ranks, tokens: int, slots: int) -> None:
    lost = two.run(_overflow, {"capacity": tokens, "slots": slots, "overflow": "drop"}, slots)
    assert all(lost) == (tokens < 12 or slots < 20)


def _refused_overflow() -> str:
    model = ep.RoutedStack()
    parallelize_experts(model, ep.mesh_of(2), capacity=2)
    try:
        model(ep.batches([9, 9])[dist.get_rank()])
    except RuntimeError as e:
        return str(e)
    return ""


def test_what_has_no_room_is_refused(two: Ranks) -> None:
    assert all("more tokens for one rank than the capacity has room for" in text for text in two.run(_refused_overflow))


def _refusals() -> list[str]:
    model, mesh = ep.RoutedStack(num_experts=7), ep.mesh_of(2)
    dense, split = torch.nn.Linear(2, 2), ep.RoutedStack()
    parallelize_experts(split, mesh)
    sharded = ep.RoutedStack()
    fully_shard(sharded.layers[0].experts, mesh=mesh)
    other = ep.mesh_of(2, 1, names=("dp", "tp"))
    texts = []
    calls: list[tuple[torch.nn.Module, Any, dict[str, Any]]] = [
        (model, mesh, {}), (dense, mesh, {}), (split, mesh, {}), (sharded, mesh, {}), (ep.RoutedStack(), other, {}),
        (ep.RoutedStack(), mesh, {"slots": 4}), (ep.RoutedStack(), mesh, {"capacity": 0}),
        (ep.RoutedStack(), mesh, {"overflow": "spill"}),
    ]  # fmt: skip
    for given, over, options in calls:
        with pytest.raises(ValueError) as caught:
            parallelize_experts(given, over, **options)
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_split_is_refused_in_words(two: Ranks) -> None:
    assert two.run(_refusals)[0] == [
        "layers.0.experts: E = 7 experts cannot be split evenly over 2 ranks",
        "the model has no packed experts (NVFP4Experts) to split",
        "layers.0.experts: its experts are split already",
        "layers.0.experts: its parameters are sharded already: split experts first, then shard",
        "mesh must be 1-D or have a dim named 'ep', got 2 dims named ['dp', 'tp']",
        "slots are those of a capacity: give capacity, too",
        "capacity must be at least 1, got 0",
        "overflow must be 'refuse' or 'drop', got 'spill'",
    ]


def _two_dims(how: str) -> None:
    """Experts over "ep" and sharded or averaged over "dp"; all else over all four ranks."""
    mesh = ep.mesh_of(2, 2, names=("dp", "ep"))
    counts = [7, 4, 0, 9]
    one, truths = ep.one_process(counts, 2)
    model = ep.RoutedStack()
    parallelize_experts(model, mesh)
    if how == "fsdp":
        everyone = mesh["dp", "ep"]._flatten("everyone")
        for module in experts_modules(model).values():
            fully_shard(module, mesh=mesh["dp"])
        for layer in model.layers:
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
    run: Any = model
    if how == "ddp":
        alone = list(expert_parameters(model))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, alone)
        run = DistributedDataParallel(model)
    x = ep.batches(counts)[dist.get_rank()]
    for _ in range(2):
        ep.loss_of(run(x)).backward()
    if how == "own":
        average_gradients(model, mesh)
    elif how == "ddp":
        for parameter in expert_parameters(model).values():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
                parameter.grad /= 2
    if x.shape[0]:
        close(x.grad, truths[dist.get_rank()].grad * 4, 2e-6, "input")
    ep.assert_same(model, one, mesh["ep"], tolerance=2e-6)
    trained = [parameter for parameter in one.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
    close(clip_gradients(model, 0.5), norm, 2e-6, "norm")
    ep.assert_same(model, one, mesh["ep"], tolerance=4e-6)


@pytest.mark.parametrize("how", ["own", "ddp", "fsdp"])
def test_expert_and_data_parallel(four: Ranks, how: str) -> None:
    four.run(_two_dims, how)


def _language(adapters: str, checkpointing: bool) -> None:
    """A model of transformers, with this library's adapters or PEFT's."""
    mesh = ep.mesh_of(2)
    model, one = (language_model(adapters, num_experts=6) for _ in range(2))
    names = parallelize_experts(model, mesh)
    assert names and all("experts" in name for name in names)
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = sequences()
    found, truth = language_loss(model, of_rank(ids)), language_loss(one, ids)
    total = found.detach().clone()
    dist.all_reduce(total)
    close(total / 2, truth.detach(), 1e-6, "loss")
    found.backward()
    truth.backward()
    average_gradients(model, mesh)
    grads = {name: p.grad for name, p in one.named_parameters() if p.requires_grad}
    split = expert_parameters(model)
    rank = mesh.get_local_rank()
    assert split and len(split) < len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = expected = grads[name]
        if name in split:  # PEFT has experts fastest in B's columns
            fastest = adapters == "peft" and "lora_B" in name
            experts = 2 * parameter.shape[0] if parameter.dim() == 3 else model.config.num_experts
            stacked = whole.unflatten(1, (-1, experts)).movedim(2, 0) if fastest else whole
            mine = stacked.chunk(2)[rank]
            expected = mine.movedim(0, 2).flatten(1) if fastest else mine
        ep.close_to(parameter.grad, expected, whole, 3e-6, name)


@pytest.mark.parametrize(("adapters", "checkpointing"), [("own", True), ("peft", False)])
def test_models_of_transformers(two: Ranks, adapters: str, checkpointing: bool) -> None:
    two.run(_language, adapters, checkpointing)


def _save_both(model: Any, one: Any, adapters: str, folder: str) -> None:
    """Rank 0 writes the adapters of the split model and those of the whole one."""
    with whole_adapters(model):
        if dist.get_rank() == 0:
            for given, name in ((model, "split"), (one, "one")):
                if adapters == "own":
                    save_adapter(given, f"{folder}/{name}")
                else:
                    given.save_pretrained(f"{folder}/{name}")


def _saved(adapters: str, folder: str) -> None:
    """Within whole_adapters rank 0 writes the file that one process writes; then training goes on."""
    mesh = ep.mesh_of(2)
    model, one = (language_model(adapters, num_experts=6) for _ in range(2))
    parallelize_experts(model, mesh)
    for given in (model, one):
        set_numerics(given, merge_aware=True)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    if adapters == "own":
        with pytest.raises(ValueError, match="save within torch_nvfp4.distributed.whole_adapters"):
            save_adapter(model, f"{folder}/share")
    _save_both(model, one, adapters, folder)
    assert before == [parameter.data_ptr() for parameter in model.parameters()]
    language_loss(model, of_rank(sequences())).backward()


@pytest.mark.parametrize("adapters", ["own", "peft"])
def test_adapters_are_saved_whole(two: Ranks, adapters: str, tmp_path: Path) -> None:
    two.run(_saved, adapters, str(tmp_path))
    split, one = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("split", "one"))
    assert split.keys() == one.keys()
    assert all(torch.equal(split[key], one[key]) for key in one)
    assert_stamped_without_base(tmp_path / "split", tmp_path / "one")


def _saved_sharded(adapters: str, folder: str) -> None:
    """As above where FSDP2 shards too; what is loaded within whole_adapters is each rank's afterwards."""
    mesh = ep.mesh_of(2, 2, names=("dp", "ep"))
    model, one = (language_model(adapters, num_experts=6) for _ in range(2))
    parallelize_experts(model, mesh)
    for module in experts_modules(model).values():
        fully_shard(module, mesh=mesh["dp"])
    shard_layers(model, mesh["dp", "ep"]._flatten("everyone"))
    for given in (model, one):
        set_numerics(given, merge_aware=True)
    before = list(model.parameters())
    with torch.no_grad():
        loss = language_loss(model, of_rank(sequences()))  # what FSDP2 leaves gathered is not what trains
    _save_both(model, one, adapters, folder)
    dist.barrier()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    if adapters == "own":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kept = [parameter.detach().clone() for parameter in trained]
        with torch.no_grad():
            for parameter in trained:
                parameter.zero_()
        with whole_adapters(model):
            load_adapter(model, f"{folder}/one")
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(trained, kept, strict=True))
    with torch.no_grad():
        close(language_loss(model, of_rank(sequences())), loss, 1e-6)


@pytest.mark.parametrize("adapters", ["own", "peft"])
def test_sharded_adapters_are_saved_and_loaded_whole(four: Ranks, adapters: str, tmp_path: Path) -> None:
    four.run(_saved_sharded, adapters, str(tmp_path))
    split, one = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("split", "one"))
    assert split.keys() == one.keys()
    assert all(torch.equal(split[key], one[key]) for key in one)
    assert_stamped_without_base(tmp_path / "split", tmp_path / "one")
