"""Seconds until the first forward + backward of a compiled layer has run: with empty caches, and with filled ones.

Each figure is of a new process, from the call of `torch.compile` on; imports, the making of tensors and the first
product of the card come before. The caches are Inductor's and Triton's, in a folder of their own.

Run: `python benchmarks/compile_time.py [--case NAME] [--mode default|max-autotune-no-cudagraphs …]`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch
from moe_cases import CASES, Inputs
from moe_layer import ours

MODES = ("default", "max-autotune-no-cudagraphs")


def seconds(name: str, mode: str) -> float:
    """In this process; the card has done its first work before the clock starts."""
    inputs = Inputs(next(case for case in CASES if case.name == name))
    torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda"))
    torch.cuda.synchronize()
    started = time.perf_counter()
    layer = torch.compile(ours, fullgraph=True, mode=mode)
    out = layer(inputs.x, inputs.ids, inputs.weights, inputs.factors, inputs.gate_up, inputs.down)
    torch.autograd.grad(out, inputs.leaves, inputs.grad)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def in_a_new_process(name: str, mode: str, caches: str) -> float:
    places = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    command = [sys.executable, __file__, "--case", name, "--mode", mode, "--here"]
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="qwen3-30b-a3b-8192", choices=[case.name for case in CASES])
    parser.add_argument("--mode", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--here", action="store_true", help="one figure, of this process and its caches")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("compile_time.py compiles for a GPU, and torch finds none here that it can use")
    if arguments.here:
        print(seconds(arguments.case, arguments.mode[0]))
        return
    for mode in arguments.mode:
        with tempfile.TemporaryDirectory() as caches:
            cold, warm = (in_a_new_process(arguments.case, mode, caches) for _ in range(2))
        print(f"{arguments.case}, {mode}: {cold:.1f} s with empty caches, {warm:.1f} s with filled ones", flush=True)


if __name__ == "__main__":
    main()
