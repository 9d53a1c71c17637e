"""`finetune --ep`, with `--fsdp` and without: the numbers of one process, its files, and what does not fit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tiny import WORDS, make_folder, save_model, save_packed_base, save_tokenizer, tiny_config
from ranks import Ranks, free_port
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from torch_nvfp4.train import compilers, loop
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError
from torch_nvfp4.train.report import FinetuneResult
from torch_nvfp4.train.sharded import check_experts

GROUPED = False  # finetune makes its own process group
OPTIONS: dict[str, Any] = {"steps": 3, "grad_accum": 4, "batch": 1, "save_every": 2, "eval_every": 2, "lr": 1e-3}

# Kinds of runs, each of which one process does too. The first clips every step, and SGD's steps are as long as clipped.
KINDS: dict[str, dict[str, Any]] = {
    "clipped": {
        "model": "untied", "targets": ("experts", "q_proj", "lm_head"), "optim": "sgd", "lr": 1.0, "clip": 0.05,
        "gradient_checkpointing": True, "format": "mxfp4",
    },
    "chats": {
        "model": "packed", "text": "chats.jsonl", "seq_len": 32, "merge_aware": True, "merge_aware_start": 1,
    },
}  # fmt: skip
Losses = tuple[float, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("split"))
    save_model(made / "untied", tie_word_embeddings=False)
    save_tokenizer(made / "untied")
    save_packed_base(made)
    samples = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(3 + n % 5)) for n in range(1, 40)]
    (made / "chats.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in samples))
    return made


def _config(folder: Path, output: str, kind: str = "", **changes: Any) -> FinetuneConfig:
    settings = OPTIONS | KINDS.get(kind, {}) | changes
    if "text" in settings:
        settings["text"] = (folder / settings["text"],)
    settings["model"] = str(folder / settings.get("model", "base"))
    return tiny_config(folder, folder / output, **settings)


def _losses(result: FinetuneResult) -> Losses:
    evals = [loss for _, loss in result.eval_history]
    return (result.final_loss, result.expert_adapters_zeroed_loss, *evals, *(loss for _, loss in result.loss_history))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Losses]:
    """Each kind of run by one process, into `one-<kind>`."""
    return {kind: _losses(loop.finetune(_config(folder, f"one-{kind}", kind))) for kind in KINDS}


def _runs(configs: Sequence[FinetuneConfig], ports: Sequence[int]) -> list[Losses]:
    """One run after the other in the same processes, each with a group of its own."""
    losses = []
    for config, port in zip(configs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        losses.append(_losses(loop.finetune(config)))
    return losses


def _together(ranks: Ranks, *configs: FinetuneConfig) -> list[Losses]:
    results = ranks.run(_runs, configs, [free_port() for _ in configs])
    assert all(result == results[0] for result in results)
    losses: list[Losses] = results[0]
    return losses


# Merge-aware weights are rounded to 4 bits: a factor's last bit may move one of them, and AdamW what follows from it.
ADAPTERS, LOSSES = {"clipped": 1e-5, "chats": 5e-3}, {"clipped": 1e-6, "chats": 1e-5}


def _assert_same(found: Path, expected: Path) -> None:
    """The same files with the same numbers: adapters, and the moments in checkpoints."""
    tolerance = ADAPTERS[found.name.split("-")[0]]
    moments = [str(path.relative_to(expected)) for path in expected.glob("checkpoint-*/training.safetensors")]
    assert len(moments) == 2
    for name in ("adapter_model.safetensors", *moments):
        ours, theirs = load_file(found / name), load_file(expected / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            if not key.startswith("rng/"):
                assert tensor.shape == theirs[key].shape, key
                assert (tensor - theirs[key]).norm() <= tolerance * theirs[key].norm(), key


def _from(folder: Path, finished: str, output: str, step: int = 2) -> None:
    """As if a finished run had been stopped after a step."""
    name = f"checkpoint-{step:08d}"
    shutil.copytree(folder / finished / name, folder / output / name)


def test_any_layout_gives_what_one_process_gives(
    four: Ranks, two: Ranks, folder: Path, alone: dict[str, Losses]
) -> None:
    layouts = {
        "clipped-2x2": {"ep": 2, "fsdp": 2},
        "clipped-4": {"ep": 4},
        "chats-2": {"ep": 2},
    }
    found = _together(four, *(_config(folder, name, name.split("-")[0], **flags) for name, flags in layouts.items()))
    for name, losses in zip(layouts, found, strict=True):
        kind = name.split("-")[0]
        assert losses == pytest.approx(alone[kind], rel=LOSSES[kind]), name
        _assert_same(folder / name, folder / f"one-{kind}")

    _from(folder, "clipped-4", "clipped-4-to-1")
    _from(folder, "clipped-2x2", "clipped-2x2-to-2")
    _from(folder, "one-chats", "chats-1-to-2x1")
    _from(folder, "chats-2", "chats-2-to-fsdp")
    goes_on = {
        "clipped-2x2-to-2": {"ep": 2},
        "chats-1-to-2x1": {"ep": 2, "fsdp": 1},
        "chats-2-to-fsdp": {"fsdp": 2},
    }
    _together(two, *(_config(folder, name, name.split("-")[0], **flags) for name, flags in goes_on.items()))
    loop.finetune(_config(folder, "clipped-4-to-1", "clipped"))
    for name in (*goes_on, "clipped-4-to-1"):
        _assert_same(folder / name, folder / f"one-{name.split('-')[0]}")


def _compiled(configs: Sequence[FinetuneConfig], ports: Sequence[int]) -> list[Losses]:
    """Layer by layer; Dynamo's graphs alone, as Inductor takes a minute."""
    from torch._dynamo.utils import counters

    original, compilers.probe = nn.Module.compile, lambda device: compilers.CompilerProbe()
    nn.Module.compile = lambda module, **options: original(module, backend="eager", **options)  # type: ignore
    losses = []
    for config, port in zip(configs, ports, strict=True):
        torch._dynamo.reset()
        losses += _runs([config], [port])
        # where experts are sharded apart from their layer, FSDP2's hooks about them are not traced
        breaks = [reason for reason in counters["graph_break"] if not (config.ep and "`disable`" in reason)]
        assert counters["stats"]["unique_graphs"] > 0 and not breaks, counters
        counters.clear()
    return losses


def test_compiled_layer_by_layer(two: Ranks, folder: Path) -> None:
    options: dict[str, Any] = {"model": "one_layer", "targets": ("experts",), "steps": 2, "warmup": 0, "grad_accum": 2}
    truth = _losses(loop.finetune(_config(folder, "not-compiled", **options)))
    layouts: dict[str, dict[str, int]] = {"both": {"ep": 2, "fsdp": 1}, "fsdp": {"fsdp": 2}}
    configs = [_config(folder, f"compiled-{n}", **options, **flags, compile="on") for n, flags in layouts.items()]
    for found in two.run(_compiled, configs, [free_port() for _ in configs]):
        for name, losses in zip(layouts, found, strict=True):
            assert losses == pytest.approx(truth, rel=1e-6), name


def test_a_start_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refused(text: str, **changes: Any) -> None:
        with pytest.raises(FinetuneError, match=text):
            loop.finetune(_config(folder, "refused", **changes))

    refused("--ep 2 needs its processes: start it as torchrun --nproc-per-node 2 -m torch_nvfp4 finetune", ep=2)
    refused("--ep 2 --fsdp 2 needs 4 processes: start it as torchrun --nproc-per-node 4", ep=2, fsdp=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused("--ep 2 --fsdp 4 needs 2 x 4 = 8 processes, and torchrun started 4", ep=2, fsdp=4)
    refused("--ep 3 does not divide the 4 processes", ep=3)
    refused("--grad-accum 2 is no multiple of the 4 processes", ep=4, grad_accum=2)
    refused("--ep is -1: give 0 or more", ep=-1)
    assert not (folder / "refused").exists()
    config = _config(folder, "refused", ep=3)
    with pytest.raises(FinetuneError, match="--ep 3 does not divide the 4 experts of"):
        check_experts(config, AutoConfig.from_pretrained(config.model))
