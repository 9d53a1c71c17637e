"""A packed checkpoint as it is with an adapter merged into it: each weight computed when it is read."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._lora.fingerprint import fingerprint_of_folder
from .._lora.read import AdapterFile
from .._lora.sites import Site
from ..checkpoint import Checkpoint, PackedExperts, PackedWeight
from ..checkpoint.emit import DenseExperts, expert_entries, linear_entries
from ..checkpoint.files import TensorInfo
from ..checkpoint.layouts import is_quantised
from ..format import dequantize
from ..nn import PROJECTIONS, NVFP4Experts, NVFP4Linear
from .names import Skeleton
from .report import TensorReport


class MergeError(ValueError):
    """The adapter cannot be merged into this checkpoint, or not so; nothing was written."""


@dataclass(frozen=True)
class _Factors:
    """a `[E, R, C]` and b `[E, N, R]` of a weight, E = 1 for one matrix, and the weight's name in reports."""

    name: str
    a: Tensor
    b: Tensor
    scaling: float

    def delta(self, device: torch.device, experts: slice = slice(None)) -> Tensor:
        """scaling · b a `[E, N, C]` in fp32."""
        a, b = (factor[experts].to(device, torch.float32) for factor in (self.a, self.b))
        return (b @ a).mul_(self.scaling)


def _stacked(weight: PackedWeight) -> PackedWeight:
    """One matrix as experts, E = 1."""
    return PackedWeight(weight.codes[None], weight.scales[None], weight.global_scale.reshape(1, 1))


class MergedCheckpoint(Checkpoint):
    """A checkpoint that reads as if its adapter had been merged into it, and reports what that did.

    Each weight is read once, by whoever writes it: reading adds to the report.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        super().__init__(folder)
        self._device = device
        self.reports: dict[str, TensorReport] = {}
        self._of_experts: dict[str, dict[str, _Factors]] = {}
        self._of_linears: dict[str, _Factors] = {}
        self._of_plain: dict[str, _Factors] = {}

    def adapt(self, skeleton: Skeleton, found: AdapterFile) -> None:
        """Take the factors of a file; MergeError for a site without a weight of its own, and for NaN or infinity."""
        for site, (a, b) in found.values().items():
            path = skeleton.sources.get(site.path)
            if path is None:
                raise MergeError(f"the adapter's target {site.name} has no weight of its own in {self.folder}")
            for factor, letter in ((a, "A"), (b, "B")):
                if not bool(factor.isfinite().all()):
                    raise MergeError(f"{site.name}: lora_{letter} holds NaN or infinity")
            if not site.is_experts:
                a, b = a.unsqueeze(0), b.unsqueeze(0)
            factors = _Factors(site.name, a, b, found.specs[site].scaling)
            self._place(site, path, factors)
            self.reports[site.name] = TensorReport(site.name, self._format(site, path))

    def _place(self, site: Site, path: str, factors: _Factors) -> None:
        if site.projection:
            self._of_experts.setdefault(path, {})[site.projection] = factors
        elif isinstance(site.module, NVFP4Linear):
            self._of_linears[path] = factors
        else:
            self._of_plain[f"{path}.weight"] = factors

    def _format(self, site: Site, path: str) -> str:
        if isinstance(site.module, NVFP4Experts | NVFP4Linear):
            return site.module.format
        return "fp8" if f"{path}.weight" in self.fp8 else self.dtype(f"{path}.weight").lower()

    @property
    def adapted(self) -> tuple[str, ...]:
        """Paths of the packed modules that the adapter changes."""
        return (*self._of_experts, *self._of_linears)

    def fingerprint(self) -> str:
        """Of the packed weights that the adapter changes, as they are without it."""
        return fingerprint_of_folder(Checkpoint(self.folder), self._of_experts, self._of_linears)

    @property
    def adapted_fp8(self) -> list[str]:
        return [name for name in self._of_plain if name in self.fp8]

    @property
    def touched(self) -> set[str]:
        """The tensors of adapted weights."""
        of_packed = {name for path in self._of_experts for name in self.experts[path].tensors}
        of_packed |= {name for path in self._of_linears for name in self.linears[path].tensors}
        return of_packed | set(self._of_plain)

    @property
    def infos(self) -> list[TensorInfo]:
        """Where each tensor lies in the files."""
        return list(self._tensors.values())

    def patches(self, progress: Callable[[str], None] | None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `touched` with the adapter merged, in the form that the files have."""
        for path in self.adapted:
            if progress is not None:
                progress(path)
            if path in self._of_experts:
                yield from expert_entries(path, self.form(path), self.iterate_experts(path))
            else:
                yield from linear_entries(path, self.form(path), self.load_linear(path))
        for name in self._of_plain:
            yield name, self.load_stored(name)

    def iterate_experts(self, path: str) -> Iterator[PackedExperts]:
        factors = self._of_experts.get(path, {})
        for e, piece in enumerate(super().iterate_experts(path)):
            gate_up, down = (
                self._merge(weight, factors[projection], slice(e, e + 1)) if projection in factors else weight
                for projection, weight in zip(PROJECTIONS, piece[:2], strict=True)
            )
            yield piece._replace(gate_up=gate_up, down=down)

    def load_linear(self, path: str, rows: range | None = None) -> PackedWeight:
        weight = super().load_linear(path)
        if path in self._of_linears:
            codes, scales, _ = self._merge(_stacked(weight), self._of_linears[path], slice(0, 1))
            weight = PackedWeight(codes[0], scales[0], weight.global_scale)
        if rows is None:
            return weight
        return weight._replace(codes=weight.codes[rows.start : rows.stop], scales=weight.scales[rows.start : rows.stop])

    def load_stored(self, name: str, rows: range | None = None) -> Tensor:
        tensor = super().load_stored(name)
        if name in self._of_plain:
            if name in self.fp8:
                raise MergeError(f"tensor {name!r} is FP8, into which nothing is merged")
            tensor = self._add(tensor, self._of_plain[name])
        return tensor if rows is None else tensor[rows.start : rows.stop]

    def load_plain(self, name: str) -> Tensor:
        if name not in self.fp8:
            return self.load_stored(name)
        tensor = super().load_plain(name)
        return self._add(tensor, self._of_plain[name]) if name in self._of_plain else tensor

    def _merge(self, weight: PackedWeight, factors: _Factors, experts: slice) -> PackedWeight:
        before = PackedWeight(*(part.to(self._device) for part in weight))
        a, b = (factor[experts].to(self._device) for factor in (factors.a, factors.b))
        codes, scales = torch.ops.nvfp4.merge_lora(*before, a, b, factors.scaling)
        after = PackedWeight(codes, scales, before.global_scale)
        self.reports[factors.name].add_packed(before, after, factors.delta(self._device, experts))
        return PackedWeight(codes.cpu(), scales.cpu(), weight.global_scale)

    def _add(self, weight: Tensor, factors: _Factors) -> Tensor:
        """W + scaling · b a, rounded once; where the delta is 0 the bits stay (also of -0)."""
        old, delta = weight.to(self._device, torch.float32), factors.delta(self._device)[0]
        new = torch.where(delta == 0, old, old + delta).to(weight.dtype)
        self.reports[factors.name].add(delta, old, new.to(torch.float32))
        return new.cpu()

    def dense_experts(self, path: str) -> Iterator[DenseExperts]:
        """The experts one by one in bf16, each rounded once."""
        factors = self._of_experts.get(path, {})
        for e, piece in enumerate(super().iterate_experts(path)):
            gate_up, down = (
                self._dense(weight, factors.get(projection), slice(e, e + 1))
                for projection, weight in zip(PROJECTIONS, piece[:2], strict=True)
            )
            yield DenseExperts(gate_up, down, piece.gate_up_bias, piece.down_bias)

    def dense_linear(self, path: str) -> Tensor:
        """A packed layer `[N, C]` in bf16, rounded once."""
        return self._dense(_stacked(super().load_linear(path)), self._of_linears.get(path), slice(0, 1))[0]

    def _dense(self, weight: PackedWeight, factors: _Factors | None, experts: slice) -> Tensor:
        codes, scales, global_scale = (part.to(self._device) for part in weight)
        old = dequantize(codes, scales, global_scale, torch.float32)
        if factors is None:
            return old.to(torch.bfloat16).cpu()
        delta = factors.delta(self._device, experts)
        new = (old + delta).to(torch.bfloat16)
        self.reports[factors.name].add(delta, old.to(torch.bfloat16).to(torch.float32), new.to(torch.float32))
        return new.cpu()

    def is_scale(self, name: str) -> bool:
        """Whether a plain tensor is a scale of activations or of the cache, which a dense model does not have."""
        info = self._tensors[name]
        return math.prod(info.shape) == 1 and (is_quantised(info) or name.endswith((".k_scale", ".v_scale")))
