"""What a card can do at best: its bf16 matrix rate and its copy bandwidth, measured once per process."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Card:
    """Rates that no kernel can beat.

    flops: FLOP/s of a large bf16 matrix product.
    bandwidth: bytes/s read plus bytes/s written by a large copy.
    """

    name: str
    flops: float
    bandwidth: float

    def floor_ms(self, flops: float, nbytes: float) -> float:
        """The least time for this much work: products and traffic overlap at best."""
        return 1e3 * max(flops / self.flops, nbytes / self.bandwidth)


@cache
def measure(device: int = 0) -> Card:
    """Measure a CUDA device; allocates about 2.4 GiB for a moment."""
    with torch.cuda.device(device):
        return Card(torch.cuda.get_device_name(), matmul_rate(), copy_bandwidth())


def matmul_rate(size: int = 8192) -> float:
    """FLOP/s of a square bf16 product on random data: zeros would run faster."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (1e-3 * median_ms(lambda: a @ b, 10))


def copy_bandwidth(nbytes: int = 2**30) -> float:
    """Bytes/s read plus written by a copy that no cache holds."""
    source = torch.ones(nbytes, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * nbytes / (1e-3 * median_ms(lambda: target.copy_(source), 10))


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """Median over runs queued one after another and timed by events: launches of the host hide behind the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)
