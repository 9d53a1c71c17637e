"""The CUDA kernels without a GPU: values, in Triton's interpreter, against the CPU kernels of the same ops."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("program", ["interpreted_kernels.py", "interpreted_formats.py"])
def test_every_kernel_agrees_with_the_cpu_in_the_interpreter(program: str) -> None:
    """In a process of its own: the interpreter must be chosen before Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, program]
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "all agree"
