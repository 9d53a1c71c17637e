"""A run that is killed and resumed gives the same bits as one that is not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finetune_tiny import COMPILED, make_folder

DRIVER = Path(__file__).with_name("finetune_killed.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("killed"))


class Cases:
    """Collects runs, then does them in one driver process: importing torch costs more than they do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cases: list[dict[str, Any]] = []

    def add(self, output: str, kill: str | None = None, at: int = 0, model: str = "base", **changes: Any) -> None:
        paths = {
            "model": str(self._folder / model),
            "text": str(self._folder),
            "output": str(self._folder / output),
        }
        self._cases.append({**paths, "kill": kill, "at": at, "changes": changes})

    def run(self) -> tuple[list[int], str]:
        """(exit codes, everything printed)."""
        plan = self._folder / "cases.json"
        plan.write_text(json.dumps(self._cases))
        command = [sys.executable, str(DRIVER), str(plan)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        return json.loads(done.stdout), done.stderr


def adapter(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_killed_thrice_and_resumed_equals_uninterrupted(folder: Path) -> None:
    # Saved every 3 of 12 steps. The calls that a kill counts start anew in each process. A checkpoint syncs
    # its four files and its folder, then has its name, then syncs the output folder.
    dice = random.Random(0)
    first, second, third = dice.randint(4, 6), dice.randint(2, 5), dice.randint(2, 3)
    cases = Cases(folder)
    cases.add("whole")
    cases.add("killed", "step", first)
    cases.add("killed", "sync", second)
    cases.add("killed", "step", third)
    cases.add("killed")
    codes, printed = cases.run()
    assert codes == [0, -9, -9, -9, 0], printed
    assert printed.count("checkpoint-00000003: 3 of 12 steps are done") == 3, printed
    assert adapter(folder / "killed") == adapter(folder / "whole")
    names = {p.name for p in (folder / "killed").iterdir()}
    assert not any(name.startswith(".") for name in names), "the half checkpoint is gone"


def test_signals_save_and_say_how_to_go_on(folder: Path) -> None:
    cases = Cases(folder)
    cases.add("whole_again")
    cases.add("stopped", "sigint", 2)
    cases.add("stopped", "sigterm", 3)
    cases.add("stopped")
    cases.add("hurried", "sigint twice", 2)
    codes, printed = cases.run()
    assert codes == [0, 130, 143, 0, -2], printed
    for step in (2, 5):
        line = f"torch-nvfp4: stopped after step {step} of 12, saved: the same command goes on from there"
        assert line in printed.splitlines()
    assert "finishing this step, then saving (once more ends at once, unsaved)" in printed.splitlines()
    assert adapter(folder / "stopped") == adapter(folder / "whole_again")
    assert not any((folder / "hurried").iterdir()), "the second Ctrl-C saved nothing"


def test_compiled_runs_are_equal_too(folder: Path) -> None:
    cases = Cases(folder)
    cases.add("compiled", model="one_layer", **COMPILED)
    cases.add("compiled_killed", "step", 4, model="one_layer", **COMPILED)
    cases.add("compiled_killed", model="one_layer", **COMPILED)
    codes, printed = cases.run()
    assert codes == [0, -9, 0], printed
    assert printed.count("compiled (inductor, C++)") == 2
    assert adapter(folder / "compiled") == adapter(folder / "compiled_killed")
