"""Processes of one gloo group that run functions: `with Ranks(4) as ranks: ranks.run(function, argument)`.

They are forked from a server that has imported torch and transformers once, so that a group starts in a second.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

TIMEOUT_S = 120
_PRELOAD = [
    "torch", "torch.distributed.fsdp", "torch_nvfp4", "torch_nvfp4.hf", "transformers", "transformers.trainer", "peft",
    "torch._functorch.aot_autograd", "torch._inductor.compile_fx",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """`world_size` processes with one thread each and torchrun's environment.

    grouped: they are the ranks of the default group; else that is for the functions to join, once: the next run has
        new processes.
    """

    def __init__(self, world_size: int, *, grouped: bool = True) -> None:
        self._world_size, self._grouped = world_size, grouped
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank; its results by rank. AssertionError with the tracebacks of those that fail.

        The next run then has new processes: others may still wait for one that failed.
        """
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((function, args))
        results, deadline = [], time.monotonic() + TIMEOUT_S
        for end in self._ends:
            if any(not good for good, _ in results):
                deadline = min(deadline, time.monotonic() + 2)
            if not end.poll(max(0.0, deadline - time.monotonic())):
                results.append((False, f"no result of {function.__name__}"))
                continue
            try:
                results.append(end.recv())
            except EOFError:
                results.append((False, "the process ended"))
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(results) if not good]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        if not self._grouped:
            self.close()
        return [result for _, result in results]

    def _start(self) -> None:
        os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"] = "1", "PASSIVE"  # read by the server
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        port = free_port()
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world_size, port, theirs, self._grouped), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _serve(rank: int, world_size: int, port: int, end: Connection, grouped: bool) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    if grouped:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    while True:
        function, args = end.recv()
        try:
            torch.manual_seed(0)
            end.send((True, function(*args)))
        except BaseException:
            end.send((False, traceback.format_exc()))
