"""Adapters with keys for each expert, `experts.{e}.gate_proj.lora_A.weight` …: what vLLM reads for most models.

PEFT reads it too. gate and up share A, as they do in the packed layout, and each has its rows of B.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .peft import PeftConfig, is_interleaved, keys_of
from .sites import Site, adapted_sites


def per_expert_state(model: nn.Module) -> dict[str, Tensor]:
    """All adapters of the model; ValueError for experts whose dense rows interleave gate and up (gpt-oss)."""
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
    a, b = site.factors
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
    sites = adapted_sites(model)
    if not sites:
        raise ValueError("the model has no adapters: call add_lora or load_adapter first")
    specs = {site.spec for site in sites}
    if len(specs) > 1:
        raise ValueError(f"this layout needs adapters of one rank and one alpha, the model has {len(specs)} kinds")
    (spec,) = specs
    assert spec is not None
    names = {role for site in sites for role in (_roles(site) if site.is_experts else (site.name.rpartition(".")[2],))}
    return PeftConfig(
        r=spec.r, lora_alpha=spec.alpha, use_rslora=spec.rslora, rank_pattern={}, alpha_pattern={},
        target_modules=sorted(names), target_parameters=[],
    )  # fmt: skip
