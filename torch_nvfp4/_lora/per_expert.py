"""Adapters with keys for each expert, `experts.{e}.gate_proj.lora_A.weight` …: what vLLM reads for most models.

PEFT reads it too. Written, gate and up share A, as they do in the packed layout, and each has its rows of B. Read, an A
for each makes one adapter of twice the rank, whose B is block-diagonal.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import stacked
from .peft import KEY_PREFIX, TAKEN_FOR_EXPERTS, PeftConfig, all_names, is_interleaved, keys_of, suffixes
from .sharded import to_shards, whole
from .sites import LoRASpec, Site, adapted_sites, saved_sites
from .strict import check_keys, check_tensor

_KEY = re.compile(rf"{re.escape(KEY_PREFIX)}(.*\bexperts)\.\d+\.(\w+)\.lora_[AB]\.weight")
# What a projection's matrices are called: the first of each by most models, the second by Mixtral and its kin.
_NAMES = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}


def per_expert_state(model: nn.Module) -> dict[str, Tensor]:
    """All adapters of the model; ValueError for experts whose dense rows interleave gate and up (gpt-oss)."""
    to_shards(model)
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for site in adapted_sites(model):
            for prefix, a, b in _parts(site):
                state[f"{prefix}.lora_A.weight"] = a.detach().clone()
                state[f"{prefix}.lora_B.weight"] = b.detach().clone()
    return state


def _parts(site: Site) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(key prefix, A `[R, C]`, B `[N, R]`) of each matrix of a site."""
    assert site.factors is not None
    a, b = map(whole, site.factors)
    if not site.is_experts:
        yield keys_of([site])[site][0].removesuffix(".lora_A.weight"), a, b
        return
    if is_interleaved(site):
        raise ValueError(f"{site.name}: its gate and up rows alternate; such an adapter is read in PEFT's own layout")
    prefix = keys_of([site])[site][0].removesuffix(".lora_A.weight")
    for e in range(site.num_experts):
        for role, rows in zip(_roles(site), b[e].chunk(len(_roles(site))), strict=True):
            yield f"{prefix}.{e}.{role}", a[e], rows


def _roles(site: Site) -> tuple[str, ...]:
    if site.projection == "down":
        return ("down_proj",)
    return ("up_proj",) if site.name.endswith(".up_proj") else ("gate_proj", "up_proj")


def per_expert_config(model: nn.Module) -> PeftConfig:
    """ValueError where ranks or strengths differ: what reads this layout knows one of each."""
    sites = saved_sites(model)
    specs = {site.spec for site in sites}
    if len(specs) > 1:
        raise ValueError(f"this layout needs adapters of one rank and one alpha, the model has {len(specs)} kinds")
    (spec,) = specs
    assert spec is not None
    names = {role for site in sites if site.is_experts for role in _roles(site)}
    linears = [site.name for site in sites if not site.is_experts]
    names |= set(suffixes(linears, all_names(model)))  # of some layers alone, where the others have none
    return PeftConfig(
        r=spec.r, lora_alpha=spec.alpha, use_rslora=spec.rslora, rank_pattern={}, alpha_pattern={},
        target_modules=sorted(names), target_parameters=[],
    )  # fmt: skip


@dataclass(frozen=True)
class _Source:
    """Where a file keeps a site: the experts' path as it writes it, and the names of the one or two matrices."""

    prefix: str
    names: tuple[str, ...]

    def modules(self, site: Site) -> list[list[str]]:
        """Paths of the matrices, a list for each expert."""
        return [[f"{self.prefix}.{e}.{name}" for name in self.names] for e in range(site.num_experts)]

    def keys(self, site: Site, factor: str) -> list[list[str]]:
        return [[f"{KEY_PREFIX}{path}.lora_{factor}.weight" for path in paths] for paths in self.modules(site)]


def is_per_expert(state: Mapping[str, Tensor]) -> bool:
    """Whether a file has keys for each expert."""
    return any(_KEY.fullmatch(key) for key in state)


def specs_of(state: Mapping[str, Tensor], config: PeftConfig, sites: Sequence[Site]) -> dict[Site, LoRASpec]:
    """The sites that the file adapts, and how.

    Layers called as an expert's matrices are (of shared experts) count where the file has keys for them: such targets
    name both. ValueError for gate without up or the reverse, for a missing or unexpected key, and for ranks or alphas
    that differ among what becomes one adapter.
    """
    sources = _sources(state, sites)
    modules = [path for site, source in sources.items() for paths in source.modules(site) for path in paths]
    plain = config.targeted(sites, modules)
    if mixed := [site.name for site in plain if site.is_experts]:
        raise ValueError(f"{mixed[0]}: the file has keys for each expert, its config targets all of them as one")
    plain = {site: spec for site, spec in plain.items() if _is_certain(site) or keys_of([site])[site][0] in state}
    wanted = [key for pair in keys_of(list(plain)).values() for key in pair]
    wanted += [k for site, source in sources.items() for f in "AB" for keys in source.keys(site, f) for k in keys]
    check_keys(state, wanted)
    is_shared = _is_shared(state, sources)
    specs = {}
    for site, source in sources.items():
        kinds = {config.spec_for(path) for paths in source.modules(site) for path in paths}
        if len(kinds) > 1:
            raise ValueError(f"{site.name}: its matrices have {len(kinds)} kinds of rank and alpha, an adapter has one")
        (spec,) = kinds
        if len(source.names) == 2 and not is_shared:
            same_scaling = spec.alpha * (math.sqrt(2) if spec.rslora else 2)
            spec = LoRASpec(2 * spec.r, same_scaling, spec.rslora)
        specs[site] = spec
    return specs | plain


def _is_certain(site: Site) -> bool:
    return site.name.rpartition(".")[2] not in TAKEN_FOR_EXPERTS


def _sources(state: Mapping[str, Tensor], sites: Sequence[Site]) -> dict[Site, _Source]:
    """The experts' sites that the file adapts."""
    names: dict[str, set[str]] = {}
    for key in state:
        if match := _KEY.fullmatch(key):
            names.setdefault(match[1], set()).add(match[2])
    sources = {}
    for site in (site for site in sites if site.is_experts):
        # as transformers 5 calls the module, or as Mixtral's was called before
        for prefix in (site.path, re.sub(r"\bmlp\.experts$", "block_sparse_moe.experts", site.path)):
            for spelling in zip(*(_NAMES[role] for role in _roles(site)), strict=True):
                present = names.get(prefix, set()) & set(spelling)
                if present and (absent := set(spelling) - present):
                    raise ValueError(
                        f"{prefix}: the file adapts {present.pop()} without {absent.pop()}; packed, the two are one "
                        "matrix and have one adapter"
                    )
                if present:
                    sources[site] = _Source(prefix, spelling)
    return sources


def _is_shared(state: Mapping[str, Tensor], sources: Mapping[Site, _Source]) -> bool:
    """Whether gate and up have the same A everywhere, as they do in a file that `export_adapter` wrote."""
    pairs = [keys for site, source in sources.items() for keys in source.keys(site, "A") if len(keys) == 2]
    return all(torch.equal(state[gate], state[up]) for gate, up in pairs)


def factors_of(
    state: Mapping[str, Tensor], config: PeftConfig, specs: Mapping[Site, LoRASpec]
) -> dict[Site, tuple[Tensor, Tensor]]:
    """(A, B) of each site as its module holds them; ValueError for shapes or dtypes that do not fit."""
    sources = _sources(state, list(specs))
    is_shared = _is_shared(state, sources)
    plain = {site: spec for site, spec in specs.items() if not site.is_experts}
    rest = {key: state[key] for pair in keys_of(list(plain)).values() for key in pair}
    values = stacked.factors_of(rest, config, plain)
    for site, source in sources.items():
        parts = len(source.names)
        is_joined = parts == 2 and not is_shared
        rows, columns = site.out_in
        r = specs[site].r // 2 if is_joined else specs[site].r
        factors = []
        for factor, shape in (("A", (r, columns)), ("B", (rows // parts, r))):
            for key in (key for keys in source.keys(site, factor) for key in keys):
                check_tensor(key, state[key], shape, f"R = {r}")
            factors.append([[state[key] for key in keys] for keys in source.keys(site, factor)])
        a = torch.stack([torch.cat(found) if is_joined else found[0] for found in factors[0]])
        b = torch.stack([torch.block_diag(*found) if is_joined else torch.cat(found) for found in factors[1]])
        values[site] = a, b
    return values
