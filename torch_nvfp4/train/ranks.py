"""The processes of a run: one on its own, or those that torchrun started, which share the model (FSDP2, experts)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, one_line

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for one that is alive and does not answer. One that died is noticed at once, by torchrun."""


@dataclass(frozen=True)
class Ranks:
    """This process among `count`.

    mesh: (replicas, shards) or (shards) of FSDP2; (dp, ep) where experts are split over ep, and FSDP2, if asked for,
        shards over dp what a rank has of them. None for a run of one process, which asks nobody.
    """

    rank: int = 0
    count: int = 1
    mesh: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def splits_experts(self) -> bool:
        return self.mesh is not None and "ep" in self.mesh.mesh_dim_names

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """Every count-th item, from this rank's own on."""
        return items[self.rank :: self.count]

    def total(self, *values: float) -> tuple[float, ...]:
        """Sums over all ranks."""
        if self.mesh is None:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(sums)
        return tuple(sums.tolist())

    def signal(self, signum: int | None) -> int | None:
        """The signal that any rank received: all stop after the same step."""
        if self.mesh is None:
            return signum
        highest = torch.tensor(signum or 0, device=self.mesh.device_type)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return int(highest) or None

    def of_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, or the FinetuneError that it raises there, on every rank."""
        if self.mesh is None:
            return make()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = make()
            except FinetuneError as e:
                answer[1] = str(e)
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise FinetuneError(answer[1])
        made: T = answer[0]
        return made

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.mesh is not None:
            dist.barrier()


ALONE = Ranks()


@contextmanager
def joined(config: FinetuneConfig, device: str) -> Iterator[Ranks]:
    """The ranks of this run; their process group lives as long as the block.

    FinetuneError for a start that --fsdp and --ep do not fit, and where another rank ended or does not answer.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if not (config.fsdp or config.ep):
        if count > 1:
            raise FinetuneError(
                f"torchrun started {count} processes: give --fsdp {count}, which shards the model, or --ep {count}, "
                "which splits its experts"
            )
        yield ALONE
        return
    _check(config, count)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), count, _mesh(config, device, count))
    except RuntimeError as e:
        if isinstance(e, dist.DistError) or "gloo" in str(e):
            raise FinetuneError(
                f"rank {dist.get_rank()}: another process of this run ended, or does not answer ({one_line(e, 80)}): "
                "the same command goes on from the last checkpoint, on any number of processes"
            ) from e
        raise
    finally:
        dist.destroy_process_group()


def _mesh(config: FinetuneConfig, device: str, count: int) -> Any:
    make = dist.device_mesh.init_device_mesh
    if config.ep:  # innermost: tokens travel between neighbours
        return make(device, (count // config.ep, config.ep), mesh_dim_names=("dp", "ep"))
    mesh = make(device, (count // config.fsdp, config.fsdp), mesh_dim_names=("replicas", "shards"))
    return mesh if config.fsdp < count else mesh["shards"]


def _check(config: FinetuneConfig, count: int) -> None:
    flags = " ".join(f"{name} {n}" for name, n in (("--ep", config.ep), ("--fsdp", config.fsdp)) if n)
    wanted = (config.ep or 1) * (config.fsdp or 1)
    if "WORLD_SIZE" not in os.environ:
        needs = "needs its processes" if wanted == max(config.ep, config.fsdp) else f"needs {wanted} processes"
        raise FinetuneError(
            f"{flags} {needs}: start it as torchrun --nproc-per-node {wanted} -m torch_nvfp4 finetune ..."
        )
    if config.ep and config.fsdp and count != wanted:
        raise FinetuneError(
            f"{flags} needs {config.ep} x {config.fsdp} = {wanted} processes, and torchrun started {count}"
        )
    if count % wanted:
        raise FinetuneError(f"{flags} does not divide the {count} processes that torchrun started")
    if config.grad_accum % count:
        raise FinetuneError(
            f"--grad-accum {config.grad_accum} is no multiple of the {count} processes: a step's forward passes are "
            "dealt to them, so that a run gives the same numbers on any number"
        )
