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

from torch_nvfp4.nn import PROJECTIONS, NVFP4Experts
from torch_nvfp4.train.config import FinetuneConfig
from torch_nvfp4.train.state import trainable

# What a process grew by when it compiled a 2-layer Qwen3-MoE for the CPU: 132 MiB, and 139 MiB with gradient
# checkpointing (torch 2.13, x86-64).
COMPILER_BYTES = 150 << 20

_PROC = Path("/proc/self")


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


@dataclass(frozen=True)
class MemoryPlan:
    """What the run keeps, in bytes; made when the model is quantised and has its adapters, before it trains.

    Attributes:
        dense_experts, packed_experts: the frozen expert weights before and after quantising.
        other: all weights that are not experts.
        adapter, gradients, moments: LoRA parameters, their gradients, and what the optimiser keeps.
        activations: what a micro-batch keeps for backward, logits included; an estimate.
        compiler: what torch.compile adds to the process.
        held, highest: what process (CPU) or allocator (CUDA) hold now, and the most they held while loading.
    """

    dense_experts: int
    packed_experts: int
    other: int
    adapter: int
    gradients: int
    moments: int
    activations: int
    compiler: int
    held: int
    highest: int

    @property
    def peak(self) -> int:
        """What training adds to what is held now, or the peak of loading where that was higher."""
        added = self.gradients + self.moments + self.activations + self.compiler
        return max(self.highest, self.held + added)


def expert_bytes(model: nn.Module) -> int:
    """Bytes of the frozen, packed weights of all NVFP4Experts."""
    experts = [m for m in model.modules() if isinstance(m, NVFP4Experts)]
    return nbytes(p for m in experts for p in m.parameters() if not p.requires_grad)


def dense_bytes(model: nn.Module) -> int:
    """Bytes of all weights, with packed experts counted as if they were bf16."""
    packed = [m for m in model.modules() if isinstance(m, NVFP4Experts)]
    values = sum(2 * m.packed(projection)[0].numel() for m in packed for projection in PROJECTIONS)
    return nbytes(model.parameters()) - expert_bytes(model) + torch.bfloat16.itemsize * values


def plan(model: nn.Module, config: FinetuneConfig, dense_bytes: int, device: str, compile: bool) -> MemoryPlan:
    """The plan for a quantised model with adapters; `dense_bytes`: the whole model before quantising."""
    packed = expert_bytes(model)
    adapter = nbytes(trainable(model).values())
    other = nbytes(model.parameters()) - packed - adapter
    return MemoryPlan(
        dense_experts=dense_bytes - other,
        packed_experts=packed,
        other=other,
        adapter=adapter,
        gradients=adapter,
        moments={"adamw": 2, "sgd": 1}[config.optim] * adapter,
        activations=activation_bytes(model, config),
        compiler=COMPILER_BYTES if compile and device == "cpu" else 0,
        held=held_bytes(device),
        highest=peak_bytes(device),
    )


def activation_bytes(model: Any, config: FinetuneConfig) -> int:
    """Estimate for one micro-batch: every layer's residual stream, attention and expert rows, and logits.

    Per token, in units of the activation dtype: 6 H for norms and residuals, 4 Q for q, k, v and the
    attention's output (Q = heads · head size), K · 2I for the experts' rows. With gradient checkpointing a
    layer keeps H, and one layer at a time the rest. Logits: once in that dtype, three times in fp32.
    """
    text = model.config.get_text_config()
    size = getattr(torch, config.dtype).itemsize
    tokens = config.batch * config.seq_len
    hidden, layers = text.hidden_size, text.num_hidden_layers
    head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    intermediate = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    layer = size * (6 * hidden + 4 * head_dim * text.num_attention_heads)
    layer += size * 2 * intermediate * (getattr(text, "num_experts_per_tok", None) or 1)
    kept = layers * size * hidden + layer if config.gradient_checkpointing else layers * layer
    return tokens * (kept + text.vocab_size * (size + 3 * 4))


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
