"""Is there what torch.compile needs on this machine? Asked by compiling something, not by its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch_nvfp4.train.config import FinetuneConfig, FinetuneError

_CPP_PROGRAM = "#include <cmath>\nint main() { return std::isnan(1.0f); }\n"
_C_PROGRAM = "#include <stdint.h>\nint main(void) { return 0; }\n"
_HEADER_PROGRAM = "#include <Python.h>\nint main(void) { return 0; }\n"


@dataclass(frozen=True)
class CompilerProbe:
    """What torch.compile lacks ("" when nothing), and how to get it."""

    missing: str = ""
    remedy: str = ""


def probe(device: str) -> CompilerProbe:
    """Compile a two-line program as torch.compile would for `device` ("cpu" or "cuda")."""
    options: tuple[str, ...] = ()
    candidates: tuple[str, ...]
    if device == "cuda":
        kind, candidates, program, suffix = "C", ("gcc", "clang"), _C_PROGRAM, ".c"  # as Triton looks for one
    else:
        kind, candidates, program, suffix = "C++", _inductor_choice(), _CPP_PROGRAM, ".cpp"
        options = ("-fopenmp",) if sys.platform == "linux" else ()
    compiler = next((c for c in candidates if compiles(c, program, suffix, options)), None)
    if compiler is None:
        return CompilerProbe(f"no working {kind} compiler", install_hint(kind))
    include = sysconfig.get_path("include")
    if not compiles(compiler, _HEADER_PROGRAM, suffix, ("-c", f"-I{include}")):
        return CompilerProbe(f"no Python headers in {include}", install_hint("headers"))
    return CompilerProbe()


def compiled_path(device: str) -> str:
    """The name of what runs a compiled step."""
    return "compiled (inductor, Triton)" if device == "cuda" else "compiled (inductor, C++)"


def choose(mode: str, device: str) -> tuple[bool, str]:
    """Compile or not, under `--compile mode`: (compile, line to print or "").

    Raises FinetuneError if the mode is "on" and something is missing.
    """
    if mode == "off":
        return False, ""
    result = probe(device)
    if not result.missing:
        return True, ""
    if mode == "on":
        raise FinetuneError(
            f"--compile on: torch.compile has {result.missing} here: {result.remedy}, or use --compile off"
        )
    return False, f"torch.compile has {result.missing} here, so this runs eager; to compile: {result.remedy}"


def symbolic_sizes(config: FinetuneConfig) -> AbstractContextManager[None]:
    """Where experts are split, how many tokens travel differs from step to step: one graph for all such sizes."""
    if not config.ep or config.compile != "on":
        return nullcontext()
    import torch._dynamo.config as dynamo

    patched: AbstractContextManager[None] = dynamo.patch(capture_scalar_outputs=True)
    return patched


def _inductor_choice() -> tuple[str, ...]:
    """The C++ compiler Inductor would call, or nothing when it finds none."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return (get_cpp_compiler(),)
    except exc.InvalidCxxCompiler:
        return ()


def compiles(compiler: str, program: str, suffix: str, options: Sequence[str]) -> bool:
    """Whether `compiler` is found and turns `program` into an object without an error."""
    executable = shutil.which(compiler)
    if executable is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"probe{suffix}")
        source.write_text(program)
        command = [executable, str(source), *options, "-o", str(Path(folder, "probe.out"))]
        try:
            return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def install_hint(kind: str) -> str:
    """How to get a "C" or "C++" compiler or the Python "headers" with this system's own package manager."""
    if sys.platform == "darwin":
        return "run `xcode-select --install`"
    if sys.platform == "win32":
        return "install the Visual Studio Build Tools (Desktop development with C++)"
    packages = {
        "apt-get": {"C": "gcc", "C++": "g++", "headers": "python3-dev"},
        "dnf": {"C": "gcc", "C++": "gcc-c++", "headers": "python3-devel"},
        "zypper": {"C": "gcc", "C++": "gcc-c++", "headers": "python3-devel"},
        "pacman": {"C": "gcc", "C++": "gcc", "headers": "python"},
        "apk": {"C": "gcc musl-dev", "C++": "g++", "headers": "python3-dev"},
    }
    verb = {"pacman": "-S", "apk": "add"}
    for manager, names in packages.items():
        if shutil.which(manager) or shutil.which(manager, path="/usr/bin:/sbin"):
            return f"run `{manager} {verb.get(manager, 'install')} {names[kind]}`"
    what = "the Python headers" if kind == "headers" else f"a {kind} compiler"
    return f"install {what} (package {packages['apt-get'][kind]} or similar)"
