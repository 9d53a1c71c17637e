"""The command `torch-nvfp4 merge`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from torch_nvfp4.checkpoint import CheckpointError
from torch_nvfp4.commands import app, exit_code, fail
from torch_nvfp4.merge import MergeError, merge_folder


@app.command("merge")
def _merge(
    model: Annotated[Path, typer.Option(help="Folder of a packed checkpoint.")],
    adapter: Annotated[Path, typer.Option(help="Folder of a LoRA adapter (adapter_model.safetensors).")],
    output: Annotated[Path, typer.Option(help="New folder for the merged model.")],
    dense: Annotated[bool, typer.Option("--dense", help="Write a dense bf16 model.")] = False,
    layout: Annotated[
        Literal["modelopt", "compressed-tensors", "mxfp4"] | None,
        typer.Option(help="Whose layout; the source's own if left out."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="JSON file for what became of each weight.")] = None,
    lora_b_layout: Annotated[
        Literal["rank_major", "grouped_by_expert"] | None,
        typer.Option(help="How B of stacked experts lies, where the adapter does not say; see load_adapter."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute; the result is the same.")
    ] = ("auto"),
    force: Annotated[
        bool, typer.Option("--force", help="Merge although the adapter was trained with other numbers.")
    ] = False,
) -> int:
    """Merge a LoRA adapter into a packed model, and say how much of it survives the rounding to 4 bits."""

    def run() -> int:
        where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        skeletons = None
        if find_spec("transformers"):
            from torch_nvfp4 import hf

            skeletons = hf.skeletons
        done = merge_folder(
            model, adapter, output, dense=dense, layout=layout, force=force, skeletons=skeletons,
            lora_b_layout=lora_b_layout, device=where,
        )  # fmt: skip
        print("\n".join(done.lines()))
        kind = "a dense model" if done.dense else "4-bit weights, as trained" if done.merge_aware else "4-bit weights"
        print(f"{output}: {len(done.tensors)} weights merged into {kind}")
        if report is not None:
            report.write_text(json.dumps(done.to_json(), indent=1) + "\n")
        for warning in done.warnings():
            fail(f"warning: {warning}")
        return 0

    return exit_code(run, "stopped; nothing was written", (MergeError, CheckpointError, OSError))
