"""Entry point of `torch-nvfp4`: one line on standard error and exit code 2 for whatever the user can mend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main() -> None:
    """Run the command in sys.argv and end the process with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run `torch-nvfp4 <arguments>` in this process; returns the exit code."""
    if find_spec("typer") is None or find_spec("rich") is None:
        print("torch-nvfp4 needs typer and rich: pip install 'torch-nvfp4[demo]'", file=sys.stderr)
        return 2
    import typer

    from torch_nvfp4 import commands_checkpoint, commands_merge, commands_plan  # noqa: F401  (they add their commands)
    from torch_nvfp4.commands import app, fail

    try:
        code = app(list(arguments) or ["--help"], prog_name="torch-nvfp4", standalone_mode=False)
    except typer.TyperException as e:
        return fail(f"{e.format_message()} (see torch-nvfp4 --help)")
    return int(code or 0)
