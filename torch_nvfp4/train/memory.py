"""Bytes: what a run keeps, what it is expected to peak at, and what it did peak at."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_nvfp4._memory import Activations, Estimate, Run, Sizes, estimate
from torch_nvfp4.nn import PROJECTIONS, NVFP4Experts
from torch_nvfp4.train.config import FinetuneConfig
from torch_nvfp4.train.state import trainable

# What a process grew by when it compiled a 2-layer Qwen3-MoE for the CPU: 132 MiB, and 139 MiB with gradient
# checkpointing (torch 2.13, x86-64).
COMPILER_BYTES = 150 << 20

_PROC = Path("/proc/self")


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted once; of sharded ones this process's part."""
    local = (getattr(t, "_local_tensor", t) for t in {id(t): t for t in tensors}.values())
    return sum(t.numel() * t.element_size() for t in local)


@dataclass(frozen=True)
class MemoryPlan:
    """What the run keeps, in bytes; made when the model is quantised and has its adapters, before it trains.

    Attributes:
        dense_experts, packed_experts: the frozen expert weights before and after quantising.
        other: all weights that are not experts.
        adapter, gradients, moments: LoRA parameters, their gradients, and what the optimiser keeps.
        activations: what a micro-batch needs; an estimate.
        compiler: what torch.compile adds to the process.
        held, highest: what process (CPU) or allocator (CUDA) hold now, and the most they held while loading.
    """

    dense_experts: int
    packed_experts: int
    other: int
    adapter: int
    gradients: int
    moments: int
    activations: Activations
    compiler: int
    held: int
    highest: int

    @property
    def peak(self) -> int:
        """What training adds to what is held now, or the peak of loading where that was higher."""
        beside_held = Estimate(0, 0, self.gradients, self.moments, self.activations)
        return max(self.highest, self.held + beside_held.peak + self.compiler)


def expert_bytes(model: nn.Module) -> int:
    """Bytes of the frozen, packed weights of all NVFP4Experts."""
    experts = [m for m in model.modules() if isinstance(m, NVFP4Experts)]
    return nbytes(p for m in experts for p in m.parameters() if not p.requires_grad)


def dense_bytes(model: nn.Module) -> int:
    """Bytes of all weights, with packed experts counted as if they were bf16."""
    packed = [m for m in model.modules() if isinstance(m, NVFP4Experts)]
    values = sum(2 * m.packed(projection)[0].numel() for m in packed for projection in PROJECTIONS)
    return nbytes(model.parameters()) - expert_bytes(model) + torch.bfloat16.itemsize * values


def expansion(model: nn.Module, dense_bytes: int) -> float:
    """How many bytes a packed byte of experts was before packing, in a model whose `dense_bytes` are known."""
    packed = expert_bytes(model)
    return (dense_bytes - nbytes(model.parameters()) + packed) / packed if packed else 1.0


def unpacked_bytes(model: nn.Module, expansion: float) -> int:
    """Bytes of all weights but adapters if experts were not packed; of a shared model this process's part."""
    packed = expert_bytes(model)
    return nbytes(model.parameters()) - nbytes(trainable(model).values()) + round((expansion - 1) * packed)


def plan(model: Any, config: FinetuneConfig, dense_bytes: int, device: str, compile: bool) -> MemoryPlan:
    """The plan for a quantised model with adapters; `dense_bytes`: what this process has of it, before packing."""
    packed = expert_bytes(model)
    adapter = nbytes(trainable(model).values())
    other = nbytes(model.parameters()) - packed - adapter
    run = Run(
        config.batch * config.seq_len,
        getattr(torch, config.dtype).itemsize,
        config.gradient_checkpointing,
        compiled="step" if compile else "off",
        optimizer={"adamw": 2, "sgd": 1}[config.optim],
    )
    gated = any(m.gated for m in model.modules() if isinstance(m, NVFP4Experts))
    expected = estimate(packed + other, adapter, Sizes.of(model.config, gated), run)
    return MemoryPlan(
        dense_experts=dense_bytes - other,
        packed_experts=packed,
        other=other,
        adapter=adapter,
        gradients=expected.gradients,
        moments=expected.moments,
        activations=expected.activations,
        compiler=COMPILER_BYTES if compile and device == "cpu" else 0,
        held=held_bytes(device),
        highest=peak_bytes(device),
    )


def held_bytes(device: str) -> int:
    """What the process (CPU; at most so far, where the system says no more) or torch's allocator (CUDA) holds now."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return _proc_status("VmRSS") or peak_bytes("cpu")


def reset_peak(device: str) -> None:
    """Have `peak_bytes` count from here, where the system can (CUDA, and Linux for the process)."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif _PROC.exists():
        with contextlib.suppress(OSError):  # some sandboxes forbid it
            (_PROC / "clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """The most the process (CPU) or torch's allocator (CUDA) has held so far; 0 where that is unknown."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return 0
    import resource  # not on every platform

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _proc_status("VmHWM") or (peak if sys.platform == "darwin" else 1024 * peak)


def _proc_status(field: str) -> int:
    status = _PROC / "status"
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)
