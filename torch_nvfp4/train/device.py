"""Which device trains, and a line when it is not the one a user would expect: no silent replacement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from torch_nvfp4.ops import cuda
from torch_nvfp4.train.config import FinetuneError


@dataclass(frozen=True)
class Machine:
    """What is known about the GPU.

    Attributes:
        torch_cuda: CUDA version torch was built for, or None.
        cuda_usable: torch.cuda.is_available().
        gpu_present: the NVIDIA driver shows a GPU.
        driver: the driver's version, or "".
        no_kernels: why this library has no kernels for the GPU, or "".
    """

    torch_cuda: str | None
    cuda_usable: bool
    gpu_present: bool
    driver: str
    no_kernels: str


def inspect_machine(dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> Machine:
    """Look at torch's build, the driver's device nodes and whether the library has kernels for the GPU."""
    version = proc / "driver" / "nvidia" / "version"
    words = version.read_text().split() if version.exists() else []
    driver = next((word for word in words if word[0].isdigit() and "." in word), "")
    return Machine(
        torch_cuda=torch.version.cuda,
        cuda_usable=torch.cuda.is_available(),
        gpu_present=any(dev.glob("nvidia[0-9]*")),
        driver=driver,
        no_kernels=(cuda.unsupported(None) or "") if torch.cuda.is_available() else "",
    )


def choose_device(requested: str, machine: Machine) -> tuple[str, str]:
    """("cpu" or "cuda", line to print or ""). Raises FinetuneError where the request cannot be met."""
    if requested == "cpu":
        return "cpu", ""
    if machine.cuda_usable and not machine.no_kernels:
        return "cuda", ""
    reason, remedy = _why_not(machine)
    driver_too_old = machine.gpu_present and machine.torch_cuda is not None and not machine.cuda_usable
    if requested == "cuda" or driver_too_old:
        raise FinetuneError(f"--device {requested}: {reason}: {remedy}")
    return "cpu", f"trains on the CPU: {reason}" if machine.gpu_present or machine.cuda_usable else ""


def _why_not(machine: Machine) -> tuple[str, str]:
    if machine.cuda_usable:
        return f"the GPU is not used, because {machine.no_kernels}", "pass --device cpu"
    if not machine.gpu_present:
        return "there is no NVIDIA GPU on this machine", "pass --device cpu"
    if machine.torch_cuda is None:
        return (
            "there is an NVIDIA GPU, but this torch was built without CUDA",
            "install a CUDA build of torch",
        )
    driver = f"driver {machine.driver}" if machine.driver else "the driver"
    return (
        f"there is an NVIDIA GPU, but torch (CUDA {machine.torch_cuda}) cannot use it with {driver}",
        "update the driver, install a torch built for an older CUDA, or pass --device cpu",
    )
