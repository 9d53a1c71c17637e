"""The commands of `torch-nvfp4` that look at and make checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from torch_nvfp4._table import aligned
from torch_nvfp4.checkpoint import Checkpoint, CheckpointError, convert_folder, open_checkpoint, quantize_folder
from torch_nvfp4.checkpoint.inspect import Contents, describe, lines, training_memory
from torch_nvfp4.commands import app, exit_code


@app.command("inspect")
def _inspect(
    folder: Annotated[Path, typer.Argument(help="A checkpoint's folder.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, for the memory of training.")] = 4096,
    rank: Annotated[int, typer.Option(min=0, help="LoRA rank of the experts.")] = 16,
    gradient_checkpointing: Annotated[bool, typer.Option(help="As in training.")] = True,
) -> int:
    """Say what a checkpoint holds, in which formats, and about what training it needs on one GPU."""

    def run() -> int:
        checkpoint = open_checkpoint(folder)
        contents = describe(checkpoint)
        print("\n".join(aligned(lines(contents), left=4)))
        print(f"\n{contents.nbytes / 2**20:,.1f} MiB in all")
        if contents.gate_up_ratio is not None:
            print(f"global scales of gate and up differ by a factor of at most {contents.gate_up_ratio:.3g}")
        print(_memory_line(checkpoint, contents, seq_len, rank, gradient_checkpointing))
        return 0

    return exit_code(run, "stopped; nothing was written", (CheckpointError, OSError))


def _memory_line(
    checkpoint: Checkpoint, contents: Contents, seq_len: int, rank: int, gradient_checkpointing: bool
) -> str:
    """The estimate for training, or why there is none: transformers must know the architecture."""
    try:
        from transformers import AutoConfig

        from torch_nvfp4.train.memory import activation_bytes
    except ModuleNotFoundError as e:
        return f"no estimate of training memory: {e.name} is not installed (pip install 'torch-nvfp4[hf]')"
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
        return (
            f"no estimate of training memory: transformers does not know this architecture ({str(e).splitlines()[0]})"
        )
    run: Any = SimpleNamespace(
        dtype="bfloat16", batch=1, seq_len=seq_len, gradient_checkpointing=gradient_checkpointing
    )  # fmt: skip
    activations = activation_bytes(SimpleNamespace(config=config), run)
    memory = training_memory(checkpoint, contents, rank, activations)
    parts = {"weights": memory.weights, f"adapters of rank {rank}": memory.adapters, "activations": memory.activations}
    told = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    return f"training on one GPU, {seq_len} tokens: about {memory.total / 2**30:.2f} GiB ({told})"


@app.command("quantize")
def _quantize(
    source: Annotated[Path, typer.Argument(help="Folder of a dense model (bf16, fp16 or fp32 safetensors).")],
    out: Annotated[Path, typer.Argument(help="New folder for the packed model.")],
    format: Annotated[Literal["nvfp4", "mxfp4"], typer.Option(help="Format of the packed experts.")] = "nvfp4",
    layout: Annotated[Literal["modelopt", "compressed-tensors"], typer.Option(help="Whose names.")] = "modelopt",
    share_gate_up: Annotated[
        bool, typer.Option(help="One global scale for an expert's gate and up, as serving engines want it.")
    ] = True,
) -> int:
    """Write a dense model with its experts packed; all other tensors and files stay as they are."""

    def run() -> int:
        done = quantize_folder(source, out, format=format, layout=layout, share_gate_up=share_gate_up)
        dense, packed = done.dense_bytes / 2**20, done.packed_bytes / 2**20
        print(f"{out}: {done.weights} expert weights, {dense:,.1f} -> {packed:,.1f} MiB")
        return 0

    return exit_code(run, "stopped; nothing was written", (CheckpointError, OSError))


@app.command("convert")
def _convert(
    source: Annotated[Path, typer.Argument(help="Folder of a packed checkpoint.")],
    out: Annotated[Path, typer.Argument(help="New folder for the same weights.")],
    layout: Annotated[
        Literal["modelopt", "compressed-tensors", "mxfp4"], typer.Option(help="Whose layout; mxfp4 is gpt-oss's own.")
    ],
    exact: Annotated[bool, typer.Option("--exact", help="Refuse if a scale would be read as another.")] = False,
) -> int:
    """Write a packed checkpoint in another layout: codes and block scales move, all other tensors stay as they are."""

    def run() -> int:
        done = convert_folder(source, out, layout=layout, exact=exact)
        told = f", {done.inexact} of their scales off by the last bit" if done.inexact else ", all scales exact"
        print(f"{out}: {done.weights} packed weights in the layout of {layout}{told}")
        return 0

    return exit_code(run, "stopped; nothing was written", (CheckpointError, OSError))
