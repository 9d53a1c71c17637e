"""The command `torch-nvfp4 plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from torch_nvfp4.commands import app, exit_code, fail


@app.command("plan")
def _plan(
    model_config: Annotated[Path, typer.Option(help="A model's config.json, or the folder that holds it.")],
    gpus: Annotated[int, typer.Option(min=1, help="How many cards, eight to a node.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of each card in a step.")] = 1,
    rank: Annotated[int, typer.Option(min=1, help="LoRA rank of experts and attention.")] = 16,
    card: Annotated[Literal["h200", "h100", "b200"], typer.Option(help="Which card.")] = "h200",
) -> int:
    """Memory, traffic and time of a training step for each layout of a model over several cards; needs no GPU."""

    def run() -> int:
        from torch_nvfp4._plan.card import CARDS, GPUS_PER_NODE
        from torch_nvfp4._plan.layout import Job
        from torch_nvfp4._plan.model import read_model
        from torch_nvfp4._plan.report import report

        if gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE:
            return fail(f"--gpus is {gpus}: above {GPUS_PER_NODE}, whole nodes of {GPUS_PER_NODE}")
        print(report(read_model(model_config, rank), CARDS[card], gpus, Job(seq_len, batch)))
        return 0

    return exit_code(run, "stopped")
