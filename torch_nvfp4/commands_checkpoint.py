"""The commands of `torch-nvfp4` that look at and make checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from torch_nvfp4._memory import Estimate, Run, Sizes, estimate
from torch_nvfp4._table import aligned
from torch_nvfp4.checkpoint import Checkpoint, CheckpointError, convert_folder, open_checkpoint, quantize_folder
from torch_nvfp4.checkpoint.inspect import ADAPTED, Contents, adapter_parameters, describe, lines, loaded_bytes
from torch_nvfp4.commands import app, exit_code


@app.command("inspect")
def _inspect(
    folder: Annotated[Path, typer.Argument(help="A checkpoint's folder.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, for the memory of training.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="LoRA rank, of experts and attention.")] = 16,
    gradient_checkpointing: Annotated[bool, typer.Option(help="As in training.")] = True,
    compile: Annotated[
        Literal["model", "layers", "off"],
        typer.Option(
            help="What torch.compile takes: the model with its loss (Trainer's torch_compile), each layer, nothing."
        ),
    ] = "model",
) -> int:
    """Say what a checkpoint holds, in which formats, and about what training it needs on one GPU."""

    def command() -> int:
        checkpoint = open_checkpoint(folder)
        contents = describe(checkpoint)
        print("\n".join(aligned(lines(contents), left=4)))
        print(f"\n{contents.nbytes / 2**20:,.1f} MiB in all")
        if contents.gate_up_ratio is not None:
            print(f"global scales of gate and up differ by a factor of at most {contents.gate_up_ratio:.3g}")
        run = Run(
            batch * seq_len,
            gradient_checkpointing=gradient_checkpointing,
            compiled=compile,
        )
        print("\n".join(_training_memory(checkpoint, contents, rank, run, f"{batch} x {seq_len} tokens")))
        return 0

    return exit_code(command, "stopped; nothing was written", (CheckpointError, OSError))


_COMPILED = {"off": "eager", "layers": "compiled layers", "model": "compiled"}


def _training_memory(checkpoint: Checkpoint, contents: Contents, rank: int, run: Run, micro_batch: str) -> list[str]:
    """The estimate for training, or why there is none: transformers must know the architecture."""
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as e:
        return [f"no estimate of training memory: {e.name} is not installed (pip install 'torch-nvfp4[hf]')"]
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as e:
        reason = str(e).splitlines()[0]
        return [f"no estimate of training memory: transformers does not know this architecture ({reason})"]
    sizes = Sizes.of(config, gated=any(experts.gated for experts in checkpoint.experts.values()))
    adapters = 4 * adapter_parameters(checkpoint, rank)  # fp32
    found = estimate(loaded_bytes(contents), adapters, sizes, run)
    options = "with" if run.gradient_checkpointing else "without"
    how = f"{_COMPILED[run.compiled]}, {options} gradient checkpointing"
    return [
        f"training on one GPU: {micro_batch}, bf16, {how}, LoRA rank {rank}: experts, {', '.join(ADAPTED)}",
        *aligned(_parts(found), left=1),
        f"The peak is in the {found.highest_stage}, where not all of the last three are there.",
        "Not counted: the CUDA context, memory that the allocator keeps unused, autotuning, loading.",
    ]


def _parts(found: Estimate) -> list[tuple[str, ...]]:
    """The parts in GiB, under a heading."""
    told = {
        "weights": found.weights,
        "adapters, fp32": found.adapters,
        "their gradients": found.gradients,
        "AdamW moments": found.moments,
        "kept by all layers": found.activations.kept,
        "backward of a layer": found.activations.layer,
        "logits and loss": found.activations.logits,
        "expected peak": found.peak,
    }
    return [("part", "GiB"), *((name, f"{size / 2**30:,.2f}") for name, size in told.items())]


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
