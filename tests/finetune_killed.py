"""Run fine-tunes that die, each in a process of its own: `python finetune_killed.py CASES.json`.

A case is {"model": folder, "text": folder, "output": folder, "kill": where, "at": count, "changes": {}}.
At the `at`-th call of the place `where` the process gets its signal: SIGKILL at "step" (an optimiser step is
about to begin) and "sync" (a checkpoint is half written); "sigterm", "sigint" and "sigint twice" say theirs,
and come before a step. Prints a JSON list with each process's exit code, negative for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from finetune_tiny import tiny_config

from torch_nvfp4 import commands
from torch_nvfp4.train import loop, state

PLACES: dict[str, tuple[Any, str, list[signal.Signals]]] = {
    "step": (loop, "_optimizer_step", [signal.SIGKILL]),
    "sync": (state, "_sync", [signal.SIGKILL]),
    "sigterm": (loop, "_optimizer_step", [signal.SIGTERM]),
    "sigint": (loop, "_optimizer_step", [signal.SIGINT]),
    "sigint twice": (loop, "_optimizer_step", [signal.SIGINT, signal.SIGINT]),
}


def signal_at(place: str, count: int) -> None:
    owner, name, signals = PLACES[place]
    original, calls = getattr(owner, name), 0

    def wrapper(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            for signum in signals:
                os.kill(os.getpid(), signum)
        return original(*args)

    setattr(owner, name, wrapper)


def run(case: dict[str, Any]) -> int:
    """Fork, fine-tune, and return the exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if case["kill"]:
        signal_at(case["kill"], case["at"])
    config = replace(tiny_config(Path(case["text"]), Path(case["output"])), model=case["model"], **case["changes"])
    code = commands.run_finetune(lambda: config)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    # before the first parallel region, so that forking is safe and no two runs fight for the cores
    torch.set_num_threads(1)
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps([run(case) for case in json.loads(Path(sys.argv[1]).read_text())]), file=output, flush=True)
