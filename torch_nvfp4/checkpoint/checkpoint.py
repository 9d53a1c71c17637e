"""An opened checkpoint: what it holds, and how to load it piece by piece."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .entries import ExpertsEntry, Fp8Entry, LinearEntry, PackedExperts, PackedWeight
from .errors import CheckpointError
from .files import Reader, TensorInfo
from .folder import read_json, read_tensors
from .forms import Form, form_of_experts, form_of_linear
from .layouts import Packed, find_weights
from .quantiser import check_convention, check_quantiser, group_sizes, takes_8_bits
from .read import (
    check_global_scale,
    read_experts,
    read_fp8,
    read_global_scale,
    read_input_scale,
    read_input_scales,
    read_linear,
)
from .stacks import find_stacks


class Checkpoint:
    """What a folder holds, by module path.

    Attributes:
        folder, config: the folder, and its config.json.
        experts: packed experts, for `load_experts`.
        linears: packed dense layers, for `load_linear`.
        fp8: FP8 weights by tensor name; `load_plain` decodes them to bf16.
        plain: every other tensor, for `load_plain`.
        tensors: the names of all, for `load_stored`.
        layout: whose layout the packed weights have ("modelopt", "compressed-tensors" or "mxfp4"); None without any.

    Nothing is cached: each load reads the files again, and holds no more than what it returns and one tensor beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tensors = self._tensors = read_tensors(folder)
        self.config: dict[str, Any] = read_json(folder, "config.json")
        hf_quant = read_json(folder, "hf_quant_config.json")
        method = check_quantiser(folder, self.config, hf_quant, tensors)
        found = find_weights(tensors, group_sizes(self.config, hf_quant))
        check_convention(folder, method, found.packed)
        self._takes_8_bits = takes_8_bits(self.config, hf_quant)
        self._stacks = {stack.entry.path: stack for stack in find_stacks(found.packed, found.rest, self.config)}
        self.experts: dict[str, ExpertsEntry] = {path: stack.entry for path, stack in self._stacks.items()}
        taken = {name for entry in self.experts.values() for name in entry.tensors}
        self._packed = {stem: weight for stem, weight in found.packed.items() if weight.codes.name not in taken}
        self.linears = {stem: _linear_entry(weight) for stem, weight in self._packed.items()}
        self._fp8 = found.fp8
        self.fp8 = {
            name: Fp8Entry(fp8.path, name, fp8.weight.shape, tuple(info.name for info in fp8.parts))
            for name, fp8 in found.fp8.items()
        }
        self._plain: dict[str, TensorInfo] = {name: info for name, info in found.rest.items() if name not in taken}
        self.plain = tuple(self._plain)
        self.tensors = tuple(tensors)
        self.layout = method
        with Reader() as reader:  # a few bytes each: a wrong one is known before anything is loaded
            for weight in found.packed.values():
                check_global_scale(reader, weight)

    def load_experts(self, path: str, which: range | None = None) -> PackedExperts:
        """The experts at a module path of `experts`, in the canonical layout; `which`: those alone, E of them."""
        stack = _get(self._stacks, path, "experts", self.folder)
        with Reader() as reader:
            return read_experts(reader, stack, which)

    def iterate_experts(self, path: str) -> Iterator[PackedExperts]:
        """The experts at a module path of `experts` one by one, each as a stack of one (E = 1)."""
        stack = _get(self._stacks, path, "experts", self.folder)
        with Reader() as reader:
            for e in range(stack.entry.num_experts):
                yield read_experts(reader, stack, range(e, e + 1))

    def walk(self, progress: Callable[[str], None] | None = None) -> Iterator[tuple[str, bool]]:
        """(name, packed?) of all there is in the files' order: packed modules by path, other tensors by name.

        A module comes once, where its first tensor lies; progress is called with its path.
        """
        owners = {name: path for path, entry in self.experts.items() for name in entry.tensors}
        owners |= {name: path for path, entry in self.linears.items() for name in entry.tensors}
        seen = set()
        for name in self.tensors:
            path = owners.get(name)
            if path is None:
                yield name, False
            elif path not in seen:
                seen.add(path)
                if progress is not None:
                    progress(path)
                yield path, True

    def form(self, path: str) -> Form:
        """How the files keep the weights at a path of `experts` or `linears`, and their global scales as stored."""
        with Reader() as reader:
            if path in self._stacks:
                form = form_of_experts(reader, self._stacks[path])
            else:
                form = form_of_linear(reader, _get(self._packed, path, "linears", self.folder))
        return replace(form, takes_8_bits=self._takes_8_bits)

    def load_linear(self, path: str, rows: range | None = None) -> PackedWeight:
        """The packed dense layer at a module path of `linears`; `rows`: those alone, N of them."""
        packed = _get(self._packed, path, "linears", self.folder)
        with Reader() as reader:
            return read_linear(reader, packed, rows)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in its file, whatever it belongs to."""
        return self._tensors[name].end - self._tensors[name].begin

    def numel(self, name: str) -> int:
        return math.prod(self._tensors[name].shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """As safetensors calls it, such as BF16."""
        return self._tensors[name].dtype

    def gate_up_ratio(self, path: str) -> float | None:
        """The larger of gate's and up's global scale over the smaller, at most over the experts; None if not gated."""
        stack = _get(self._stacks, path, "experts", self.folder)
        if not stack.entry.gated:
            return None
        ratio = 1.0
        with Reader() as reader:
            for weights in stack.gate_up.weights:
                scales = [read_global_scale(reader, weight).item() for weight in weights]
                ratio = max(ratio, max(scales) / min(scales))
        return ratio

    def input_scale(self, path: str) -> Tensor | None:
        """The static scale of the activations (fp32 multipliers), if the checkpoint has one.

        0-d for a path of `linears`; for one of `experts` `[E, P]`, P being gate, up and down (up and down if not
        gated).
        """
        with Reader() as reader:
            if path in self._stacks:
                return read_input_scales(reader, self._stacks[path])
            return read_input_scale(reader, _get(self._packed, path, "linears", self.folder))

    def load_plain(self, name: str) -> Tensor:
        """A tensor of `plain` as it is, or one of `fp8` decoded to bf16."""
        if name not in self._fp8:
            return self.load_stored(_get(self._plain, name, "plain", self.folder).name)
        with Reader() as reader:
            return read_fp8(reader, self._fp8[name])

    def load_stored(self, name: str, rows: range | None = None) -> Tensor:
        """Any tensor of the files as it is, whatever it belongs to; `rows`: those of its first dim alone."""
        with Reader() as reader:
            return reader.read(_get(self._tensors, name, "tensors", self.folder), rows)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint and check all that can be checked without loading a weight.

    CheckpointError, naming file and tensor, for whatever could not be read without guessing.
    """
    return Checkpoint(Path(folder))


def _linear_entry(weight: Packed) -> LinearEntry:
    names = tuple(info.name for info in weight.parts)
    return LinearEntry(weight.stem, weight.format.name, weight.rows, weight.columns, names)


def _get(known: dict[str, Any], key: str, where: str, folder: Path) -> Any:
    if key not in known:
        some = f"{len(known):,}, the first is {next(iter(known))!r}" if known else "there are none"
        raise CheckpointError(f"{folder}: {key!r} is not among `{where}` ({some})")
    return known[key]
