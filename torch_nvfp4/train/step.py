"""The loss of one batch, eager or compiled, and the mean loss of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_nvfp4.train.config import FinetuneError, one_line
from torch_nvfp4.train.data import IGNORE, Batch
from torch_nvfp4.train.packing import separated
from torch_nvfp4.train.ranks import ALONE, Ranks


def token_loss(model: nn.Module, inputs_BS: Tensor, targets_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
    """Summed cross-entropy in nat over the targets that are not IGNORE; fp32 scalar.

    Args:
        positions_BS: position ids of packed samples. Without them attention is plainly causal and takes no mask.
    """
    packed = {} if positions_BS is None else separated(model, positions_BS)
    logits_BSV = model(input_ids=inputs_BS, use_cache=False, **packed).logits
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORE, reduction="sum")


def mean_loss(
    model: nn.Module,
    batches: Sequence[Batch],
    device: str,
    compiled: Callable[..., Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> float:
    """Mean cross-entropy per token in nat; leaves the model in training mode. Batches are dealt to the ranks.

    With `compiled`, the training step's own graph runs, with gradients on though nobody asks for them: to
    switch them off, or the model to evaluation mode, compiles it all once more. Only dropout needs that.
    """
    reuse = compiled is not None and not _has_dropout(model)
    total, count = 0.0, 0.0
    model.train(reuse)
    with torch.set_grad_enabled(reuse):
        for first in range(0, len(batches), ranks.count):
            place = first + ranks.rank
            batch = batches[place % len(batches)]  # a rank without one runs another: all run as many layers
            tensors = [tensor.to(device) for tensor in batch]
            loss = compiled(*tensors) if compiled else token_loss(model, *tensors)
            if place < len(batches):
                total += loss.item()
                count += targets_in(batch)
    model.train()
    total, count = ranks.total(total, count)
    return total / count


def targets_in(batch: Batch) -> int:
    """How many targets of a batch count."""
    return int((batch[1] != IGNORE).sum())


class LossStep:
    """The training step's loss; compiled once, with `fullgraph=True`, if asked for.

    Attributes:
        compiled: the compiled function, or None when the step runs eager.
    """

    def __init__(self, model: nn.Module, compile: bool) -> None:
        self._model = model
        self.compiled: Callable[..., Tensor] | None = None
        if compile:
            self.compiled = torch.compile(self._loss, fullgraph=True, dynamic=False)

    def __call__(self, *batch: Tensor) -> Tensor:
        return self.compiled(*batch) if self.compiled else self._loss(*batch)

    def _loss(self, *batch: Tensor) -> Tensor:
        return token_loss(self._model, *batch)

    def warm_up(self, batch: Batch, device: str, mode: str) -> str:
        """Run forward and backward once, so that compiling is over before training; gradients are dropped.

        Returns "", or why the step runs eager after all; with `mode` "on" that is a FinetuneError.
        """
        if self.compiled is None:
            return ""
        from torch._dynamo.exc import TorchDynamoException
        from torch._dynamo.utils import counters

        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        cpu_rng = torch.get_rng_state()
        self._model.train()
        try:
            self(*(tensor.to(device) for tensor in batch)).backward()
        except TorchDynamoException as e:
            reason = one_line(e, limit=400)
            if mode == "on":
                raise FinetuneError(f"--compile on: torch.compile failed ({reason}): use --compile off") from e
            self.compiled = None
            return f"torch.compile failed ({reason}), so this runs eager"
        finally:
            self._model.zero_grad(set_to_none=True)
            torch.set_rng_state(cpu_rng)
        if counters["stats"]["unique_graphs"] != graphs + 1 or sum(counters["graph_break"].values()) != breaks:
            raise RuntimeError(
                f"the step was to be one graph without a break, torch._dynamo counted "
                f"{counters['stats']['unique_graphs'] - graphs} graphs: {dict(counters['graph_break'])}"
            )
        return ""


def _has_dropout(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return getattr(config, "attention_dropout", 0.0) > 0 or any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
    )
