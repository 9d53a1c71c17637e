"""What a checkpoint holds, as a table: layers of one kind in a row, bits a weight, and how far gate and up differ."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .checkpoint import Checkpoint


@dataclass(frozen=True)
class Row:
    """Tensors of one kind: `path` has `*` for the number of a layer; `bits` are a weight's, scales included."""

    kind: str
    path: str
    count: int
    format: str
    sizes: str
    weights: int
    nbytes: int

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else math.nan


@dataclass(frozen=True)
class Contents:
    """The rows, and the largest ratio of gate's and up's global scale in any expert (None without gated experts)."""

    rows: tuple[Row, ...]
    gate_up_ratio: float | None

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


def describe(checkpoint: Checkpoint) -> Contents:
    """Read from headers, except for the global scales."""
    found: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)

    def add(kind: str, path: str, format: str, sizes: str, weights: int, tensors: Iterable[str]) -> None:
        nbytes = sum(checkpoint.nbytes(name) for name in tensors)
        found[kind, re.sub(r"\.\d+\.", ".*.", path), format, sizes].append((weights, nbytes))

    for experts in checkpoint.experts.values():
        e, h, i = experts.num_experts, experts.hidden, experts.intermediate
        weights = e * h * i * (3 if experts.gated else 2)
        add("experts", experts.path, experts.format, f"E = {e}, H = {h}, I = {i}", weights, experts.tensors)
    for linear in checkpoint.linears.values():
        n, c = linear.out_features, linear.in_features
        add("linear", linear.path, linear.format, f"{n} x {c}", n * c, linear.tensors)
    for name, fp8 in checkpoint.fp8.items():
        add(
            "linear",
            name.removesuffix(".weight"),
            "fp8",
            " x ".join(map(str, fp8.shape)),
            math.prod(fp8.shape),
            fp8.tensors,
        )
    plain: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.plain:
        plain[checkpoint.dtype(name)].append(name)
    rows = [
        Row(kind, path, len(parts), format, sizes, sum(w for w, _ in parts), sum(b for _, b in parts))
        for (kind, path, format, sizes), parts in found.items()
    ]
    for dtype, names in plain.items():
        nbytes = sum(map(checkpoint.nbytes, names))
        rows.append(Row("other", "", len(names), dtype.lower(), "", sum(map(checkpoint.numel, names)), nbytes))
    ratios = [ratio for path in checkpoint.experts if (ratio := checkpoint.gate_up_ratio(path)) is not None]
    return Contents(tuple(rows), max(ratios, default=None))


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Dense layers that an estimate puts adapters on, beside both projections of all experts."""


def loaded_bytes(contents: Contents) -> int:
    """Of all weights on the device: as in the files, but FP8 ones decoded to bf16."""
    return contents.nbytes + sum(2 * row.weights - row.nbytes for row in contents.rows if row.format == "fp8")


def adapter_parameters(checkpoint: Checkpoint, rank: int) -> int:
    """LoRA parameters of rank R on all packed experts and on the layers of `ADAPTED`."""
    widths = 0
    for experts in checkpoint.experts.values():
        gate_up = experts.hidden + experts.intermediate * (2 if experts.gated else 1)
        widths += experts.num_experts * (gate_up + experts.hidden + experts.intermediate)
    dense = {name.removesuffix(".weight"): fp8.shape for name, fp8 in checkpoint.fp8.items()}
    dense |= {path: (linear.out_features, linear.in_features) for path, linear in checkpoint.linears.items()}
    dense |= {
        name.removesuffix(".weight"): checkpoint.shape(name) for name in checkpoint.plain if name.endswith(".weight")
    }
    for path, shape in dense.items():
        if path.rpartition(".")[2] in ADAPTED and not re.search(r"vision|visual|audio|(^|\.)mtp\.", path):
            widths += sum(shape)
    return rank * widths


def lines(contents: Contents) -> list[tuple[str, ...]]:
    """The rows as cells under a heading."""
    table: list[tuple[str, ...]] = [("kind", "layers", "format", "sizes", "weights", "bits", "MiB")]
    for row in contents.rows:
        where = f"{row.count} x {row.path}" if row.path else f"{row.count} tensors"
        table.append((row.kind, where, row.format, row.sizes, f"{row.weights:,}", f"{row.bits:.2f}", _mib(row.nbytes)))
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
