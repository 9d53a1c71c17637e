"""What a fine-tune finds on the machine: compilers, GPU, driver, memory."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from torch_nvfp4.train import compilers, memory
from torch_nvfp4.train.config import FinetuneError
from torch_nvfp4.train.device import Machine, choose_device, inspect_machine
from torch_nvfp4.train.report import size

NOTHING = Machine(torch_cuda=None, cuda_usable=False, gpu_present=False, driver="", no_kernels="")


def machine(**changes: object) -> Machine:
    return Machine(**{**NOTHING.__dict__, **changes})


def test_cpu_is_taken_in_silence_only_where_there_is_no_gpu() -> None:
    gpu = machine(torch_cuda="13.0", cuda_usable=True, gpu_present=True, driver="580.1")
    assert choose_device("auto", NOTHING) == ("cpu", "")
    assert choose_device("auto", gpu) == ("cuda", "")
    assert choose_device("cuda", gpu) == ("cuda", "")
    assert choose_device("cpu", gpu) == ("cpu", "")


def test_a_gpu_that_is_not_used_is_said() -> None:
    turing = machine(torch_cuda="13.0", cuda_usable=True, gpu_present=True, driver="580.1", no_kernels="T4 is sm_75")
    assert choose_device("auto", turing) == ("cpu", "trains on the CPU: the GPU is not used, because T4 is sm_75")
    no_cuda_build = machine(gpu_present=True, driver="580.1")
    line = "trains on the CPU: there is an NVIDIA GPU, but this torch was built without CUDA"
    assert choose_device("auto", no_cuda_build) == ("cpu", line)


def test_an_old_driver_is_an_error_and_never_the_cpu() -> None:
    old = machine(torch_cuda="13.0", gpu_present=True, driver="470.57.02")
    for requested in ("auto", "cuda"):
        with pytest.raises(FinetuneError) as error:
            choose_device(requested, old)
        assert str(error.value) == (
            f"--device {requested}: there is an NVIDIA GPU, but torch (CUDA 13.0) cannot use it with driver "
            "470.57.02: update the driver, install a torch built for an older CUDA, or pass --device cpu"
        )
    assert choose_device("cpu", old) == ("cpu", "")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "--device cuda: there is no NVIDIA GPU on this machine: pass --device cpu"),
        (
            {"gpu_present": True},
            "--device cuda: there is an NVIDIA GPU, but this torch was built without CUDA: "
            "install a CUDA build of torch",
        ),
        (
            {"torch_cuda": "13.0", "cuda_usable": True, "gpu_present": True, "no_kernels": "T4 is sm_75"},
            "--device cuda: the GPU is not used, because T4 is sm_75: pass --device cpu",
        ),
    ],
)
def test_asking_for_cuda_in_vain(changes: dict[str, object], text: str) -> None:
    with pytest.raises(FinetuneError) as error:
        choose_device("cuda", machine(**changes))
    assert str(error.value) == text


def test_the_machine_is_read_from_the_driver(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\n"
    (tmp_path / "driver/nvidia/version").write_text(text)
    found = inspect_machine(dev=tmp_path, proc=tmp_path)
    assert found.gpu_present and found.driver == "470.57.02"
    bare = inspect_machine(dev=tmp_path / "driver", proc=tmp_path / "nowhere")
    assert not bare.gpu_present and bare.driver == ""
    assert found.torch_cuda == torch.version.cuda


def test_a_compiler_is_believed_when_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compilers.probe("cpu") == compilers.CompilerProbe()
    assert compilers.choose("auto", "cpu") == (True, "")
    assert compilers.choose("off", "cpu") == (False, "")
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compilers.probe("cpu").missing == "no working C++ compiler"


def test_without_python_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for device in ("cpu", "cuda"):
        probe = compilers.probe(device)
        assert probe.missing == f"no Python headers in {tmp_path}" and probe.remedy


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers, "install_hint", lambda kind: f"<how to get {kind}>")
    assert compilers.choose("auto", "cpu") == (
        False,
        "torch.compile has no working C++ compiler here, so this runs eager; to compile: <how to get C++>",
    )
    with pytest.raises(FinetuneError) as error:
        compilers.choose("on", "cuda")
    assert str(error.value) == (
        "--compile on: torch.compile has no working C compiler here: <how to get C>, or use --compile off"
    )


@pytest.mark.parametrize(
    ("manager", "platform", "hint"),
    [
        ("apt-get", "linux", "run `apt-get install g++`"),
        ("dnf", "linux", "run `dnf install gcc-c++`"),
        ("pacman", "linux", "run `pacman -S gcc`"),
        ("apk", "linux", "run `apk add g++`"),
        ("", "linux", "install a C++ compiler (package g++ or similar)"),
        ("", "darwin", "run `xcode-select --install`"),
    ],
)
def test_how_to_get_a_compiler(monkeypatch: pytest.MonkeyPatch, manager: str, platform: str, hint: str) -> None:
    monkeypatch.setattr(compilers.shutil, "which", lambda name, path=None: name if name == manager else None)
    monkeypatch.setattr(sys, "platform", platform)
    assert compilers.install_hint("C++") == hint


def test_bytes_are_counted_once_and_read_in_words() -> None:
    tensor = torch.zeros(3, dtype=torch.float32)
    assert memory.nbytes([tensor, tensor, torch.zeros(1, dtype=torch.bfloat16)]) == 14
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]


def test_peak_memory_sees_an_allocation_and_forgets_it() -> None:
    script = """
import torch
from torch_nvfp4.train import memory
before = memory.peak_bytes("cpu")
torch.ones(64 << 20, dtype=torch.uint8)
after = memory.peak_bytes("cpu")
memory.reset_peak("cpu")
print(after - before, memory.peak_bytes("cpu") - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown, left = map(int, done.stdout.split())
    assert 60 << 20 < grown < 80 << 20
    if sys.platform == "linux":
        assert left < 20 << 20
