"""The source that Inductor generates, and what it launches. Importing this imports Inductor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from torch._inductor.graph import GraphLowering

_KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(.*?r?'''(.*?)'''", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"^\s*(?:\w+ = )?(\w+|extern_kernels\.\w+|torch\.ops\.[\w.]+)(?:\.run)?\(")
_OPS = re.compile(r"# Topologically Sorted Source Nodes: .*Original ATen: \[(.*)\]")
_TILE = re.compile(r"\b([A-Z][A-Z0-9_]*)\s*:\s*tl\.constexpr = (\w+)|\b(num_stages|num_warps)=(\d+)")


@contextmanager
def generated_sources() -> Iterator[list[str]]:
    """The source of every module that Inductor makes, or takes from its cache, while this is active."""
    sources: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", sources.append):
        yield sources


@dataclass(frozen=True)
class GeneratedLaunch:
    """One call that generated code makes: of a kernel of its own, or of one from elsewhere (`is_extern`).

    ops: the operators it computes, such as "nvfp4.dequantize" and "aten.mul".
    constants: what a Triton template is compiled for; empty for others.
    """

    kernel: str
    constants: dict[str, str]
    ops: tuple[str, ...]
    is_extern: bool

    @property
    def is_template(self) -> bool:
        return self.kernel.startswith("triton_tem_")


def launches(source: str) -> list[GeneratedLaunch]:
    """What one run of a generated module launches, in order; calls of `torch.ops.nvfp4.*` are left to their kernels."""
    kernels = dict(_KERNEL.findall(source))
    found: list[GeneratedLaunch] = []
    ops: tuple[str, ...] = ()
    for line in source[source.rindex("def call(") :].splitlines():
        if line.startswith("def ") and not line.startswith("def call("):
            break
        if comment := _OPS.search(line):
            ops = tuple(comment[1].split(", "))
        call = _CALL.match(line)
        if call is None or not (call[1] in kernels or "." in call[1]):
            continue
        if call[1] in kernels:
            found.append(GeneratedLaunch(call[1], _constants(call[1], kernels[call[1]]), ops, False))
        elif not call[1].startswith(("torch.ops.nvfp4.", "torch.ops.aten.view")):
            found.append(GeneratedLaunch(call[1], {}, ops, True))
        ops = ()  # a comment is about the next call only; kernels for the CPU have none
    return found


def _constants(name: str, kernel: str) -> dict[str, str]:
    if not name.startswith("triton_tem_"):
        return {}
    return {match[1] or match[3]: match[2] or match[4] for match in _TILE.finditer(kernel)}
