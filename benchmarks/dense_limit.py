"""What a layer could take on this card if nothing had to be decoded: its products in dense bf16, for seconds on end.

A card at its power limit lowers its clock, so a product's first call says little: the rate here is that of the second
half of two seconds of queued calls of `torch._grouped_mm`, beside the first call's, the clock and the power. The rest
of a step is counted as its bytes at the copy bandwidth: what the other launches read and write, each once.

Run: `python benchmarks/dense_limit.py [--cases NAME …]`.
"""

import argparse
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from moe_cases import BF16, CASES, Case

from torch_nvfp4._explain.card import measure
from torch_nvfp4.lowering.configs import GLU_BACKWARD_RANKS

SECONDS = 2.0
QUERY = ("clocks.sm", "power.draw", "power.limit", "clocks_throttle_reasons.active")


def rates(flops: float, call: Callable[[], Any]) -> tuple[float, float, str]:
    """(FLOP/s of a first call, FLOP/s under load, what the card says of itself in the middle of it)."""
    call()
    torch.cuda.synchronize()
    time.sleep(0.5)
    first = _seconds(call, 1)
    half = max(2, round(SECONDS / 2 / first))
    said: list[str] = []
    watch = threading.Thread(target=lambda: (time.sleep(0.6 * SECONDS), said.append(_card_says())))
    watch.start()
    for _ in range(half):
        call()
    under_load = _seconds(call, half)
    watch.join()
    return flops / first, flops / under_load, said[0]


def _seconds(call: Callable[[], Any], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls / 1e3


def _card_says() -> str:
    uuid = torch.cuda.get_device_properties().uuid
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", f"--id=GPU-{uuid}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def products(case: Case) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """(name, FLOPs, call) of y = x Wᵀ and gx = gy W of both projections, rows spread evenly over the experts."""
    m = case.t * case.k
    ends = torch.arange(1, case.e + 1, device="cuda", dtype=torch.int32) * m // case.e
    for name, n, c in (("gate_up", 2 * case.i, case.h), ("down", case.h, case.i)):
        weight = torch.randn(case.e, n, c, device="cuda", dtype=BF16) * c**-0.5
        x, gy = (torch.randn(m, width, device="cuda", dtype=BF16) for width in (c, n))
        flops = 2.0 * m * n * c
        yield f"{name} y", flops, partial(torch._grouped_mm, x, weight.transpose(1, 2), ends)
        yield f"{name} gx", flops, partial(torch._grouped_mm, gy, weight, ends)


def other_bytes(case: Case) -> float:
    """Of a gated layer's other launches, forward + backward, in bf16: rows [M, H] and columns of I, each access once.

    Gathers of x and gy, and combine twice: (T + M) H each. GLU: 3 M I, shrink of h: M I, GLU backward with v: 6 M I.
    Factor gradients: 2 M H + 3 M I. Of a large rank v is shrunk apart: 2 M I.
    """
    m = case.t * case.k
    columns = 15 if case.r > GLU_BACKWARD_RANKS else 13
    return 2.0 * (4 * (case.t + m) * case.h + 2 * m * case.h + columns * m * case.i)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES if case.t >= 8192 and not case.bias and not case.skew]  # of each size one
    parser.add_argument("--cases", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a CUDA device, and there is none")
    if not shutil.which("nvidia-smi"):
        parser.error("this asks nvidia-smi for clock and power, and it is not on PATH")
    card = measure()
    print(f"{card.name}: {card.flops / 1e12:.0f} TFLOP/s in bf16, {card.bandwidth / 1e9:.0f} GB/s; {', '.join(QUERY)}")
    for case in CASES:
        if case.name not in options.cases:
            continue
        total = 0.0
        for name, flops, call in products(case):
            first, under_load, said = rates(flops, call)
            total += flops / under_load
            told = f"{first / 1e12:.0f}, under load {under_load / 1e12:.0f} TFLOP/s; {said}"
            print(f"{case.name} {name}: {told}", flush=True)
        rest = other_bytes(case) / card.bandwidth
        print(f"{case.name}: products {1e3 * total:.2f} + the rest {1e3 * rest:.2f} = {1e3 * (total + rest):.2f} ms")


if __name__ == "__main__":
    main()
