"""The commands of `torch-nvfp4`. What a command needs, such as transformers, is imported when it runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, Interrupted

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


def _finetune(**flags: Any) -> int:
    """Train LoRA adapters on a model whose experts are quantised to NVFP4, and save them in PEFT's format."""
    targets = tuple(name.strip() for name in flags.pop("targets").split(",") if name.strip())
    lists: dict[str, Any] = {name: tuple(flags.pop(name) or ()) for name in ("text", "eval_text")}
    return _exit_code(
        lambda: _train(FinetuneConfig(targets=targets, **lists, **flags)),
        "stopped outside the training steps: the same command starts over from the last checkpoint",
    )


def _exit_code(run: Callable[[], int], stopped: str) -> int:
    """What `run` returns; what can end it early becomes one line and an exit code (`stopped`: Ctrl-C elsewhere)."""
    try:
        return run()
    except FinetuneError as e:
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
    """The command's parameters: one per field of FinetuneConfig, with its type, default and help."""
    types = get_type_hints(FinetuneConfig)
    parameters = []
    for f in fields(FinetuneConfig):
        kind, default = types[f.name], f.default
        if f.name == "targets":
            kind, default = str, ",".join(FinetuneConfig.targets)
        elif kind == tuple[Path, ...]:
            kind, default = list[Path], MISSING if default is MISSING else None
        parameters.append(
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=Annotated[kind, typer.Option(help=f.metadata["help"])],
            )
        )
    return inspect.Signature(parameters, return_annotation=int)


_finetune.__signature__ = _flags_of_config()  # type: ignore[attr-defined]
app.command("finetune")(_finetune)


@app.command("demo")
def _demo(
    output: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("nvfp4-demo"),
    seed: Annotated[int, typer.Option(help="Seed of base model, adapters and data order.")] = 0,
) -> int:
    """Make a small base model, quantise it, fine-tune it on other text, check the result: minutes."""
    try:
        from torch_nvfp4.train.demo import run_demo
    except ModuleNotFoundError as e:
        return fail(f"{e.name} is not installed: pip install 'torch-nvfp4[demo]'")
    return _exit_code(lambda: run_demo(output, seed=seed), "stopped")
