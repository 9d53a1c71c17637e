"""The commands of `torch-nvfp4`. What a command needs, such as transformers, is imported when it runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
import typer

from torch_nvfp4._explain.model_config import ConfigError, read_sizes
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, Interrupted
from torch_nvfp4.train.config_file import resolve
from torch_nvfp4.train.device import inspect_machine

app = typer.Typer(
    name="torch-nvfp4",
    help="Mixture-of-experts models whose experts stay packed in NVFP4 while LoRA adapters train.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def fail(message: str, code: int = 2) -> int:
    """Say what is wrong in one line on standard error; returns the exit code."""
    print("torch-nvfp4: " + " ".join(message.split()), file=sys.stderr)
    return code


def _finetune(config: Path | None = None, **flags: Any) -> int:
    """Train LoRA adapters on a model whose experts are quantised to 4 bits, and save them in PEFT's format."""
    targets = flags.pop("targets")
    settings = {name: tuple(value) or None if isinstance(value, list) else value for name, value in flags.items()}
    if targets is not None:
        settings["targets"] = tuple(name.strip() for name in targets.split(",") if name.strip())
    return run_finetune(lambda: resolve(config, settings))


def run_finetune(settings: Callable[[], FinetuneConfig]) -> int:
    """What `torch-nvfp4 finetune` does once it has read its flags; returns the exit code."""
    return exit_code(
        lambda: _train(settings()),
        "stopped outside the training steps: the same command starts over from the last checkpoint",
    )


def exit_code(
    run: Callable[[], int], stopped: str, errors: tuple[type[Exception], ...] = (FinetuneError, ConfigError)
) -> int:
    """What `run` returns; what can end it early becomes one line and an exit code (`stopped`: Ctrl-C elsewhere).

    errors: what the user can mend, from its text.
    """
    try:
        return run()
    except errors as e:
        return fail(str(e))
    except Interrupted as e:
        return fail(str(e), 128 + e.signum)
    except KeyboardInterrupt:
        return fail(stopped, 130)


def _train(config: FinetuneConfig) -> int:
    config.validate()
    try:
        import transformers

        from torch_nvfp4.train.loop import finetune
    except ModuleNotFoundError as e:
        return fail(f"{e.name} is not installed: pip install 'torch-nvfp4[demo]'")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    finetune(config)
    return 0


def _flags_of_config() -> inspect.Signature:
    """The command's parameters: --config, and one per field of FinetuneConfig, with its type, default and help.

    Every parameter's own default is None, "not said on the command line": a file's value comes between.
    """
    types = get_type_hints(FinetuneConfig)
    help = "YAML file of settings by the flags' names; flags that are given win."
    parameters = [_parameter("config", Path, typer.Option(help=help))]
    for f in fields(FinetuneConfig):
        kind = types[f.name]
        if f.name == "targets":
            kind = str
        elif get_origin(kind) is tuple:
            kind = list[get_args(kind)[0]]  # type: ignore[misc]
        parameters.append(_parameter(f.name, kind, typer.Option(help=_help(f))))
    return inspect.Signature(parameters, return_annotation=int)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    optional = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=optional)


def _help(f: Field[Any]) -> str:
    """A setting's help with its default, which typer cannot know."""
    if isinstance(f.default, bool):
        default = "on" if f.default else "off"
    else:
        default = ",".join(f.default) if isinstance(f.default, tuple) else str(f.default)
    said = "Required." if f.default is MISSING else f"Default: {default}." if default not in ("", "None") else ""
    return f"{f.metadata['help']} {said}".strip()


_finetune.__signature__ = _flags_of_config()  # type: ignore[attr-defined]
app.command("finetune")(_finetune)


@app.command("demo")
def _demo(
    output: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("nvfp4-demo"),
    seed: Annotated[int, typer.Option(help="Seed of base model, adapters and data order.")] = 0,
    format: Annotated[Literal["nvfp4", "mxfp4"], typer.Option(help="Format of the packed experts.")] = "nvfp4",
) -> int:
    """Make a small base model, quantise it, fine-tune it on other text, check the result: minutes."""
    try:
        from torch_nvfp4.train.demo import run_demo
    except ModuleNotFoundError as e:
        return fail(f"{e.name} is not installed: pip install 'torch-nvfp4[demo]'")
    return exit_code(lambda: run_demo(output, seed=seed, format=format), "stopped")


_ModelConfig = Annotated[Path, typer.Option(help="A model's config.json, or the folder that holds it.")]
_Rank = Annotated[int, typer.Option(min=0, help="LoRA rank of the experts; 0: no adapters.")]
_Format = Annotated[Literal["nvfp4", "mxfp4"], typer.Option(help="Format of the packed experts.")]
_Dtype = Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Dtype of the activations.")]


@app.command("tune")
def _tune(
    model_config: _ModelConfig,
    tokens: Annotated[
        str,
        typer.Option(help="Token counts, such as 1,512; left out: what meets every kernel that T up to 32768 needs."),
    ] = "",
    rank: _Rank = 16,
    format: _Format = "nvfp4",
    dtype: _Dtype = "bfloat16",
    compile: Annotated[bool, typer.Option(help="Compile the layer's graph too.")] = True,
) -> int:
    """Compile every kernel that a model's MoE layers need, before its first step does; needs a GPU."""

    def run() -> int:
        from torch_nvfp4._explain.keys import representative_tokens
        from torch_nvfp4._explain.warm import warm

        sizes = read_sizes(model_config, rank=rank, format=format, dtype=getattr(torch, dtype))
        counts = _token_counts(tokens) if tokens else representative_tokens(sizes)
        reason = _no_gpu()
        if reason:
            return fail(f"tune compiles kernels for a GPU, and {reason}")
        warm(sizes, counts, print, compile=compile)
        return 0

    return exit_code(run, "stopped: what is compiled stays in the caches")


@app.command("explain")
def _explain(
    model_config: _ModelConfig,
    tokens: Annotated[int, typer.Option(min=1, help="T, the tokens of one call.")] = 512,
    rank: _Rank = 16,
    format: _Format = "nvfp4",
    dtype: _Dtype = "bfloat16",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the layer runs.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Run it under torch.compile.")] = False,
) -> int:
    """Run one MoE layer of a model's sizes and say which path each op took, and what it cost."""

    def run() -> int:
        from torch_nvfp4 import explain

        sizes = read_sizes(model_config, rank=rank, format=format, dtype=getattr(torch, dtype))
        reason = _no_gpu()
        if device == "cuda" and reason:
            return fail(f"--device cuda: {reason}")
        where = "cpu" if device == "cpu" or reason else "cuda"
        experts = sizes.experts(where)
        layer = torch.compile(experts, fullgraph=True) if compile else experts
        print(explain(layer, *sizes.inputs(tokens, where)))
        return 0

    return exit_code(run, "stopped")


def _token_counts(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--tokens is {text!r}: give whole numbers above 0, such as 1,512")
    return sorted({int(word) for word in words})


def _no_gpu() -> str:
    """Why no kernel can run on a GPU here, or ""."""
    machine = inspect_machine()
    if not machine.cuda_usable:
        return "torch finds none here that it can use"
    return machine.no_kernels
