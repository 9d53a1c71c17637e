"""`finetune --fsdp`: the numbers of one process on any number of ranks, resumed on another, and a rank that dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from finetune_tiny import make_folder, save_packed_base, tiny_config
from ranks import Ranks, free_port
from safetensors.torch import load_file

from torch_nvfp4.train import compilers, loop
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, Interrupted

GROUPED = False  # finetune makes its own process group
OPTIONS: dict[str, Any] = {"steps": 6, "grad_accum": 4, "batch": 1, "save_every": 2, "eval_every": 3, "lr": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("sharded"))
    save_packed_base(made)
    return made


def _run(config: FinetuneConfig) -> tuple[Any, ...]:
    result = loop.finetune(config)
    return (result.base_loss, result.final_loss, result.expert_adapters_zeroed_loss, *result.loss_history)


def _auto(config: FinetuneConfig) -> tuple[Any, ...]:
    """Eager, though this machine has all that compiling takes."""
    compilers.probe = lambda device: compilers.CompilerProbe()
    result = loop.finetune(config)
    assert result.path == "eager"
    return result.base_loss, result.final_loss


def _stopped(config: FinetuneConfig, rank: int, at: int) -> str:
    """One rank gets SIGTERM before a step."""
    original, calls = loop._optimizer_step, 0

    def step(run: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == at and run.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run)

    loop._optimizer_step = step
    try:
        loop.finetune(config)
    except Interrupted as e:
        return str(e)
    finally:
        loop._optimizer_step = original
    return "ran to its end"


def assert_same_run(found: Path, expected: Path) -> None:
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() <= 1e-3 * theirs[name].norm(), name


def test_stopped_on_four_and_resumed_on_two(four: Ranks, two: Ranks, folder: Path) -> None:
    one = tiny_config(folder, folder / "one", **OPTIONS)
    expected = _run(one)
    config = tiny_config(folder, folder / "many", **OPTIONS, fsdp=4)
    texts = four.run(_stopped, config, 2, 3)
    assert texts == ["stopped after step 3 of 6, saved: the same command goes on from there"] * 4
    assert [path.name for path in sorted((folder / "many").glob("checkpoint-*"))] == [
        "checkpoint-00000002",
        "checkpoint-00000003",
    ]
    results = two.run(_run, tiny_config(folder, folder / "many", **OPTIONS, fsdp=2))
    assert results[0] == results[1]
    found = results[0]
    for (_, loss), (_, truth) in zip(found[3:], expected[3:], strict=True):
        assert loss == pytest.approx(truth, rel=1e-5)
    assert found[1:3] == pytest.approx(expected[1:3], rel=1e-5)
    assert_same_run(folder / "many", folder / "one")


def test_a_packed_folder_is_read_in_parts_and_goes_on_from_one_process(two: Ranks, folder: Path) -> None:
    model = str(folder / "packed")
    _run(tiny_config(folder, folder / "packed-one", **OPTIONS, model=model))
    shutil.copytree(folder / "packed-one", folder / "packed-two")
    for path in (folder / "packed-two").iterdir():  # as if it had been stopped after step 4
        if path.name != "checkpoint-00000004":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    replicas = {"fsdp": 1, "gradient_checkpointing": True}
    with pytest.raises(AssertionError, match="gradient_checkpointing"):
        two.run(_run, tiny_config(folder, folder / "packed-two", **OPTIONS, model=model, **replicas))
    two.run(_run, tiny_config(folder, folder / "packed-two", **OPTIONS, model=model, fsdp=1))
    assert_same_run(folder / "packed-two", folder / "packed-one")
    results = two.run(_auto, tiny_config(folder, folder / "fresh", **OPTIONS, model=model, fsdp=2, compile="auto"))
    assert results[0] == results[1] and results[0][1] < results[0][0]


def test_a_start_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refused(text: str, **changes: Any) -> None:
        with pytest.raises(FinetuneError, match=text):
            loop.finetune(tiny_config(folder, folder / "refused", **changes))

    refused("start it as torchrun --nproc-per-node 2 -m torch_nvfp4 finetune", fsdp=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused("torchrun started 4 processes: give --fsdp 4")
    refused("--fsdp 3 does not divide the 4 processes", fsdp=3)
    refused("--grad-accum 2 is no multiple of the 4 processes", fsdp=4, grad_accum=2)
    assert not (folder / "refused").exists()


def test_a_rank_that_dies_ends_the_others(folder: Path) -> None:
    """Whichever exchange they wait in: tokens travel to split experts, and FSDP2 gathers the rest."""
    output = folder / "dies"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(free_port()), "-m", "torch_nvfp4", "finetune", "--ep", "2", "--fsdp", "1"]
    command += ["--model", str(folder / "base"), "--output", str(output)]
    command += ["--text", str(folder / "a.txt"), "--steps", "100000", "--grad-accum", "2", "--batch", "1", "--seq-len"]
    command += ["16", "--compile", "off", "--device", "cpu", "--dtype", "float32", "--save-every", "3", "--no-plot"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as launched:
        deadline = time.monotonic() + 120
        while not list(output.glob("checkpoint-*")):
            assert launched.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        ranks = _children(launched.pid)
        assert len(ranks) == 2
        start = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        printed, _ = launched.communicate(timeout=60)
        assert time.monotonic() - start < 60
    assert launched.returncode != 0
    assert "another process of this run ended" in printed and "goes on from the last checkpoint" in printed, printed
    assert re.search(r"exitcode\s*: -9", printed), printed
    assert printed.count("split over 2 of 2 processes, sharded over 1, the rest over all 2") == 1, printed


def _children(pid: int) -> list[int]:
    """The processes that a process started, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
