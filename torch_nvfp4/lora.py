"""LoRA adapters on packed experts and linear layers, saved and loaded in PEFT's own format.

    add_lora(model, r=16, alpha=32)  # freezes everything else
    ...  # train
    save_adapter(model, "out")  # stock PEFT loads it on the dense model with PeftModel.from_pretrained
    load_adapter(other_model, "out")

Nothing here needs transformers or PEFT.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ._lora import files, peft, per_expert
from ._lora.read import read_for
from ._lora.sharded import copy_whole, is_sharded, refuse_new, to_shards, writes
from ._lora.sites import (
    LoRALinear,
    LoRASpec,
    Site,
    StockLayout,
    adapted_sites,
    attach,
    iter_sites,
    refuse_peft,
    replace_module,
)
from ._lora.stamp import KEY, heed, mark, stamp_of
from ._lora.strict import is_finite_number, is_rank

__all__ = [
    "LoRALinear",
    "LoRASummary",
    "StockLayout",
    "adapter_state_dict",
    "add_lora",
    "disable_adapters",
    "export_adapter",
    "load_adapter",
    "remove_adapters",
    "save_adapter",
]


@dataclass(frozen=True)
class LoRASummary:
    """What `add_lora` made trainable, in parameters; a packed weight counts by its values, not its bytes."""

    trainable: int
    total: int
    targets: dict[str, int]

    def __str__(self) -> str:
        parts = ", ".join(f"{target} {count:,}" for target, count in self.targets.items())
        share = 100 * self.trainable / self.total
        return f"LoRA trains {self.trainable:,} of {self.total:,} parameters ({share:.2f} %): {parts}"


def add_lora(
    model: nn.Module,
    r: int = 16,
    alpha: float = 32.0,
    *,
    expert_r: int | None = None,
    rslora: bool = False,
    targets: str | Sequence[str] = ("experts", "q_proj", "k_proj", "v_proj", "o_proj"),
    dtype: torch.dtype = torch.float32,
) -> LoRASummary:
    """Put LoRA adapters on the model, in place, and freeze everything else.

    r: rank on linear layers; expert_r: rank on experts, r where None.
    alpha: an adapter of rank R is scaled by alpha / R, or by alpha / sqrt(R) with `rslora`. Experts have
        R = expert_r and the same alpha: alpha / expert_r, as in PEFT with a rank_pattern.
    targets: "experts" (both projections of every packed experts module), "experts.gate_up_proj" or
        "experts.down_proj"; anything else is the last components of a linear layer's name ("q_proj",
        "self_attn.q_proj"). A string is one target.
    dtype: of the factors; the forward pass casts them to the activations' dtype.

    Raises ValueError, before anything is changed, for a rank below 1, an alpha that is not finite, a target that
    matches nothing, and a model that has adapters already, PEFT's too, or is sharded by FSDP2.
    """
    ranks = {"r": r, "expert_r": r if expert_r is None else expert_r}
    for name, rank in ranks.items():
        if not is_rank(rank):
            raise ValueError(f"{name} must be an integer of at least 1, got {rank!r}")
    if not is_finite_number(alpha):
        raise ValueError(f"alpha must be a finite number, got {alpha!r}")
    refuse_peft(model)
    sites = list(iter_sites(model))
    adapted = [site.name for site in sites if site.factors is not None]
    if adapted:
        raise ValueError(f"the model has adapters already, {adapted[0]} for one: call remove_adapters first")
    refuse_new(model)
    chosen = _choose(sites, targets)
    model.requires_grad_(False)
    counts: dict[str, int] = {}
    for site, target in chosen.items():
        spec = LoRASpec(ranks["expert_r"] if site.is_experts else r, alpha, rslora)
        factors = attach(model, site, spec, dtype).factors or ()
        counts[target] = counts.get(target, 0) + sum(factor.numel() for factor in factors)
    return LoRASummary(sum(counts.values()), _count_values(model), counts)


def chosen_sites(model: nn.Module, targets: str | Sequence[str]) -> list[Site]:
    """What `add_lora` adapts for these targets, in the order in which it draws the factors."""
    return list(_choose(list(iter_sites(model)), targets))


def _choose(sites: Sequence[Site], targets: str | Sequence[str]) -> dict[Site, str]:
    """Site -> the first target that names it; ValueError for a target that names none."""
    chosen: dict[Site, str] = {}
    for target in (targets,) if isinstance(targets, str) else targets:
        found = [site for site in sites if _matches(site, target)]
        if not found:
            raise ValueError(_nothing_matched(target, sites))
        chosen |= {site: target for site in found if site not in chosen}
    return chosen


def _matches(site: Site, target: str) -> bool:
    if not site.is_experts:
        return peft.has_suffix(site.name, target)
    leaf = site.name.rpartition(".")[2]
    return target in ("experts", f"experts.{leaf}") or ("." in target and peft.has_suffix(site.name, target))


def _nothing_matched(target: str, sites: Sequence[Site]) -> str:
    leaves = sorted({site.name.rpartition(".")[2] for site in sites if not site.is_experts})
    experts = sum(site.is_experts for site in sites) // 2
    dense = not experts and target.startswith("experts")
    hint = " (dense experts must be packed first, by quantize_experts)" if dense else ""
    return (
        f"target {target!r} matches nothing{hint}; the model has {experts} packed experts modules "
        f"and the linear layers {', '.join(leaves) or 'none'}"
    )


def _count_values(model: nn.Module) -> int:
    floating = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    return floating + sum(2 * p.numel() for name, p in model.named_parameters() if name.endswith("_codes"))


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All adapters under PEFT's key names and in its layout; empty without adapters.

    Of a sharded model (FSDP2, DTensor) every rank must ask, and gets the whole.
    For experts A is `[E*R, in]` with the expert slowest, B `[out, R*E]` with the rank slowest and its rows
    in the order of the stock model.
    """
    return peft.state_dict_of(model)


def save_adapter(
    model: nn.Module, directory: str | os.PathLike[str], *, base_model_name_or_path: str | None = None
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, which stock PEFT loads on the dense model.

    Files are replaced by rename: a kill at any moment leaves the old adapter, the new one, or (only where the
    configuration changed) a directory that `load_adapter` refuses; never a mixture. Adapters of a merge-aware
    model are stamped in adapter_config.json. ValueError without adapters.

    Of a sharded model every rank must call it; rank 0 writes.
    """
    config = peft.config_of(model)
    class_name = type(getattr(model, "_orig_mod", model)).__name__
    task_type = "CAUSAL_LM" if class_name.endswith("ForCausalLM") else None
    data = peft.config_to_json(config, base_model=base_model_name_or_path, task_type=task_type)
    state, stamp = adapter_state_dict(model), _stamped(model)
    if writes(model):
        files.write_adapter(Path(directory), state, data | stamp)


def _stamped(model: nn.Module) -> dict[str, dict[str, object]]:
    stamp = stamp_of(site.module for site in adapted_sites(model))
    return {} if stamp is None else {KEY: stamp.to_json()}


def export_adapter(
    model: nn.Module, directory: str | os.PathLike[str], *, layout: Literal["3d", "2d"] = "2d",
    base_model_name_or_path: str | None = None, force: bool = False,
) -> None:  # fmt: skip
    """Write the adapters for others to read.

    layout: "3d" is `save_adapter`. "2d" has keys for each expert and projection, which vLLM reads for most models, and
    PEFT too; it needs one rank and alpha for all adapters, and experts whose dense rows are `[gate; up]`: ValueError
    otherwise.
    """
    if layout not in ("3d", "2d"):
        raise ValueError(f"layout must be '3d' or '2d', got {layout!r}")
    stamp = _stamped(model)
    if stamp and not force:
        raise ValueError(
            "these adapters were trained merge-aware: they are right once merged into 4 bits (save_adapter, then "
            "torch-nvfp4 merge), and another model, maybe worse, beside the base; force=True exports them all the same"
        )
    if layout == "3d":
        save_adapter(model, directory, base_model_name_or_path=base_model_name_or_path)
        return
    config = per_expert.per_expert_config(model)
    data = peft.config_to_json(config, base_model=base_model_name_or_path, task_type="CAUSAL_LM")
    state = per_expert.per_expert_state(model)
    if writes(model):
        files.write_adapter(Path(directory), state, data | stamp)


def load_adapter(
    model: nn.Module, directory: str | os.PathLike[str], *, lora_b_layout: peft.BLayout | None = None
) -> None:
    """Load an adapter that `save_adapter`, `export_adapter`, PEFT, Unsloth or axolotl wrote, strictly.

    Rank, alpha, rank_pattern, alpha_pattern and use_rslora come from adapter_config.json. A model without
    adapters gets them made (in the file's dtype, everything else frozen); one with adapters must have
    exactly those of the file. Read are stacked factors in the orientation of PEFT 0.19.1 and later or the transposed
    one of before, and keys for each expert (`experts.{e}.gate_proj`, or w1, w2, w3). Of the latter, gate and up become
    one adapter: of rank R where they share A in the whole file, of rank 2R otherwise.

    lora_b_layout: how B of stacked experts is laid out where the file does not say (`lora_B_layout`): "rank_major",
        as PEFT does (default), or "grouped_by_expert", as Unsloth did before it wrote that field. No shape tells.

    Raises ValueError, before the model is changed and naming the key, for missing
    or unexpected keys, for a shape that does not fit E, R or the layer, and for a config that asks for what
    this library does not do. Warns where the adapter was trained merge-aware and the model is not
    (`torch_nvfp4.nn.set_numerics`).
    """
    refuse_peft(model)
    to_shards(model)
    found = read_for(Path(directory), list(iter_sites(model)), lora_b_layout)
    _check_same_adapters(model, found.specs)
    values, adapted = found.values(), [site.module for site in found.specs]
    heed(found.stamp, adapted, stacklevel=2)
    if not adapted_sites(model):
        refuse_new(model)
        model.requires_grad_(False)
    mark(adapted, found.stamp is not None)
    for site, (a, b) in values.items():
        placed = site if site.factors is not None else attach(model, site, found.specs[site], a.dtype)
        placed.set_spec(found.specs[site])
        with torch.no_grad():
            for factor, value in zip(placed.factors or (), (a, b), strict=True):
                copy_whole(factor, value)


def _check_same_adapters(model: nn.Module, specs: dict[Site, LoRASpec]) -> None:
    present = {site.name: site.spec for site in adapted_sites(model)}
    if not present:
        return
    wanted = {site.name: spec for site, spec in specs.items()}
    for names, where in ((wanted.keys() - present, "file"), (present.keys() - wanted, "model")):
        if names:
            raise ValueError(f"adapter and model do not fit: only the {where} adapts {', '.join(sorted(names)[:3])}")
    for name, spec in wanted.items():
        if spec.r != present[name].r:
            raise ValueError(f"{name}: the adapter has rank R = {spec.r}, the model's has R = {present[name].r}")


def remove_adapters(model: nn.Module) -> None:
    """Take every adapter off the model, in place; base weights are as they were, and stay frozen."""
    refuse_peft(model)
    mark((site.module for site in adapted_sites(model)), False)
    for site in adapted_sites(model):
        if isinstance(site.module, LoRALinear):
            replace_module(model, site.module, site.module.base_layer)
        else:
            for name in site.factor_names:
                setattr(site.module, name, None)


@contextmanager
def disable_adapters(model: nn.Module, kind: Literal["all", "experts"] = "all") -> Iterator[None]:
    """Inside the block the model computes without its adapters, or without those of its experts alone.

    The factors are taken off the modules and the same Parameter objects put back, also after an exception;
    they get no gradient from what runs inside. A compiled model recompiles once. FSDP2 would put factors back that are
    off: in a sharded model they stay, scaled by 0.
    """
    if kind not in ("all", "experts"):
        raise ValueError(f"kind must be 'all' or 'experts', got {kind!r}")
    refuse_peft(model)
    sites = [site for site in adapted_sites(model) if kind == "all" or site.is_experts]
    if is_sharded(model):
        off: dict[tuple[nn.Module, str], float | None] = {(site.module, site.scaling_name): 0.0 for site in sites}
        off |= {(site.module, "merge_aware"): False for site in sites if getattr(site.module, "merge_aware", False)}
    else:
        off = {(site.module, name): None for site in sites for name in site.factor_names}
    taken = [(module, name, getattr(module, name)) for module, name in off]
    for (module, name), value in off.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in taken:
            setattr(module, name, value)
