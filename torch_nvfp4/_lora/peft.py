"""PEFT's view of the adapters: key names, tensor layouts and adapter_config.json, both ways.

Layouts are those of PEFT 0.21 (`peft.tuners.lora.layer.ParamWrapper`): for a parameter `[E, out, in]` A is
`[E*R, in]` with the expert slowest, B is `[out, R*E]` with the *rank* slowest. The wrappers of one experts
module nest: the outermost is down, gate_up lies below `.base_layer`; a projection alone is not nested.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .sharded import to_shards, whole
from .sites import LoRASpec, Site, adapted_sites, clean_path, iter_sites, saved_sites, stock_layout_of
from .stamp import KEY
from .strict import check_fields

KEY_PREFIX = "base_model.model."

# In MoE models PEFT takes a target module of one of these names for an expert's projection (as it was called
# before transformers 5) and drops it. As a target parameter, "down_proj.weight", the layer is adapted, and
# under the same keys.
TAKEN_FOR_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def keys_of(sites: Sequence[Site]) -> dict[Site, tuple[str, str]]:
    """The key of A and of B of each site, for an adapter made of exactly these sites."""
    down_paths = {site.path for site in sites if site.projection == "down"}
    keys = {}
    for site in sites:
        if not site.path:
            raise ValueError("PEFT has no name for an adapter on the root module; put it into a parent module")
        nested = site.projection == "gate_up" and site.path in down_paths
        prefix = KEY_PREFIX + site.path + (".base_layer" if nested else "")
        keys[site] = (f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight")
    return keys


def to_peft(site: Site, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors as the module holds them -> PEFT's A and B (detached, contiguous)."""
    a, b = a.detach(), b.detach()
    if not site.is_experts:
        return a.contiguous(), b.contiguous()
    if is_interleaved(site):
        b = b.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if stock_layout_of(site.module).untold:
        a, b = b.mT, a.mT
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1, 2).contiguous()


def split_experts(
    a: Tensor, b: Tensor, num_experts: int, interleaved: bool, *, grouped: bool = False, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """PEFT's A `[E*R, C]` and B `[N, R*E]` -> `[E, R, C]` and `[E, N, R]`, rows `[gate; up]`; differentiable.

    grouped: the columns of B have the expert slowest, `[N, E*R]`.
    transposed: the delta is of the transposed weight, so that A is `[E*R, N]` and B `[C, R*E]`.
    """
    a_ERC = a.unflatten(0, (num_experts, -1))
    b_ENR = (
        b.unflatten(1, (num_experts, -1)).permute(1, 0, 2)
        if grouped
        else b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    )
    if transposed:
        a_ERC, b_ENR = b_ENR.mT, a_ERC.mT
    if interleaved:
        b_ENR = b_ENR.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return a_ERC.contiguous(), b_ENR.contiguous()


def peft_shapes(site: Site, r: int) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, columns = site.out_in
    return (site.num_experts * r, columns), (rows, r * site.num_experts)


def is_interleaved(site: Site) -> bool:
    """True where the stock parameter's rows are gate 0, up 0, gate 1, ... instead of `[gate; up]`."""
    return site.projection == "gate_up" and stock_layout_of(site.module).interleaved


@dataclass(frozen=True)
class PeftConfig:
    """The part of adapter_config.json that decides which adapters there are and how strong."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: Collection[str] | str = ()
    target_parameters: Collection[str] = ()
    grouped_by_expert: bool = False  # B of experts has the expert slowest, not the rank
    peft_version: str | None = None

    def spec_for(self, name: str) -> LoRASpec:
        """Rank and alpha of the adapter on the module or parameter `name`, patterns matched as PEFT does."""
        r = self.rank_pattern.get(_pattern_for(self.rank_pattern, name), self.r)
        alpha = self.alpha_pattern.get(_pattern_for(self.alpha_pattern, name), self.lora_alpha)
        return LoRASpec(r, alpha, self.use_rslora)

    def targeted(self, sites: Iterable[Site], others: Collection[str] = ()) -> dict[Site, LoRASpec]:
        """The sites this config adapts, and how; ValueError names a target that matches none.

        others: modules of the stock model that are no site here, which targets may name too.
        """
        modules = {site: site.name for site in sites if not site.is_experts}
        parameters = {site: site.name if site.is_experts else f"{site.name}.weight" for site in sites}
        chosen: dict[Site, str] = {}
        if isinstance(self.target_modules, str):
            chosen = {site: name for site, name in modules.items() if re.fullmatch(self.target_modules, name)}
            if not chosen and not any(re.fullmatch(self.target_modules, name) for name in others):
                raise ValueError(f"the adapter's target {self.target_modules!r} matches no linear layer")
        named_modules = () if isinstance(self.target_modules, str) else self.target_modules
        for targets, names, unpacked, kind in (
            (named_modules, modules, others, "linear layer"),
            (self.target_parameters, parameters, (), "packed expert parameter"),
        ):
            for target in targets:
                found = {site: name for site, name in names.items() if has_suffix(name, target)}
                if not found and not any(has_suffix(name, target) for name in unpacked):
                    raise ValueError(f"the adapter's target {target!r} matches no {kind}")
                chosen |= found
        return {site: self.spec_for(name) for site, name in chosen.items()}


def _pattern_for(patterns: Iterable[str], name: str) -> str:
    """The pattern PEFT would apply to `name` (`peft.utils.other.get_pattern_key`), else `name` itself."""
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", name)), name)


def has_suffix(name: str, suffix: str) -> bool:
    """True when `suffix` is the whole name or its last dotted components."""
    return name == suffix or name.endswith(f".{suffix}")


def config_of(model: nn.Module) -> PeftConfig:
    """The config with which stock PEFT puts exactly this model's adapters on the stock dense model."""
    sites, adapted = list(iter_sites(model)), saved_sites(model)
    specs = {site: site.spec for site in adapted}
    rslora = all(spec.rslora for spec in specs.values())
    if not rslora:  # where adapters of both kinds meet, state those of the other kind as alpha / r too
        specs = {s: LoRASpec(x.r, x.scaling * x.r) if x.rslora else x for s, x in specs.items()}
    # The experts' rank is the default and the linear layers' rank the pattern: PEFT 0.21 applies a pattern
    # that names a parameter, and then warns that it did not.
    leading = [spec for site, spec in specs.items() if site.is_experts] or list(specs.values())
    r = Counter(spec.r for spec in leading).most_common(1)[0][0]
    alpha = Counter(spec.alpha for spec in leading).most_common(1)[0][0]
    names = _target_names(sites)
    everything = all_names(model)
    modules = [names[site] for site in adapted if names[site] == site.name and not site.is_experts]
    parameters = [names[site] for site in adapted if names[site] not in modules]
    return PeftConfig(
        r=r,
        lora_alpha=alpha,
        use_rslora=rslora,
        rank_pattern=_patterns({names[site]: spec.r for site, spec in specs.items()}, r),
        alpha_pattern=_patterns({names[site]: spec.alpha for site, spec in specs.items()}, alpha),
        target_modules=suffixes(modules, everything),
        target_parameters=suffixes(parameters, everything, after_layer_index=True),
    )


def all_names(model: nn.Module) -> list[str]:
    """What a target could match: modules and parameters, here and in the stock model."""
    names = [clean_path(name) for name, _ in (*model.named_modules(), *model.named_parameters())]
    return names + [name for site in iter_sites(model) for name in (site.name, f"{site.name}.weight")]


def _target_names(sites: Sequence[Site]) -> dict[Site, str]:
    """What PEFT must target: a module or, for experts and for layers whose name it mistakes, a parameter."""
    has_experts = any(site.is_experts for site in sites)
    mistaken = {
        site
        for site in sites
        if has_experts and not site.is_experts and site.name.rpartition(".")[2] in TAKEN_FOR_EXPERTS
    }
    return {site: f"{site.name}.weight" if site in mistaken else site.name for site in sites}


def _patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    patterns: dict[str, Any] = {}
    for value in sorted(set(values.values()) - {default}):
        names = [name for name, v in values.items() if v == value]
        others = [name for name, v in values.items() if v != value]
        patterns |= {suffix: value for suffix in suffixes(names, others, after_layer_index=True)}
    return patterns


def suffixes(names: Sequence[str], everything: Iterable[str], *, after_layer_index: bool = False) -> list[str]:
    """Dotted suffixes that match all of `names` and nothing else of `everything`, as short as can be.

    `after_layer_index`: never shorter than what follows the last number, as in "mlp.experts.down_proj".
    """
    taken = {suffix for other in set(everything) - set(names) for suffix in _all_suffixes(other)}
    chosen: dict[str, None] = {}
    for name in names:
        candidates = _all_suffixes(name)
        if after_layer_index:
            last_index = max((i for i, part in enumerate(name.split(".")) if part.isdigit()), default=-1)
            candidates = candidates[len(name.split(".")) - last_index - 2 :]
        chosen[next((c for c in candidates if c not in taken), name)] = None
    return list(chosen)


def _all_suffixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in reversed(range(len(parts)))]


def config_to_json(config: PeftConfig, *, base_model: str | None, task_type: str | None) -> dict[str, Any]:
    """adapter_config.json with the fields PEFT needs; what it does not name has PEFT's default."""
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": int(config.lora_alpha) if float(config.lora_alpha).is_integer() else config.lora_alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": list(config.target_modules),
        "target_parameters": list(config.target_parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }


# Fields that change what an adapter computes, and the values that mean "not used".
_COMPUTES: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_dropout": (0, None),
    # the others change the base weight
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
} | dict.fromkeys(
    "alora_invocation_tokens arrow_config fan_in_fan_out kasa_config lora_bias monteclora_config use_bdlora use_dora "
    "use_qalora velora_config".split(),
    (None, False, [], {}),
)
# Fields that choose layers in ways that this library leaves to PEFT.
_CHOOSES: dict[str, tuple[Any, ...]] = dict.fromkeys(
    "exclude_modules layer_replication layers_pattern layers_to_transform modules_to_save target_modules_to_tie "
    "trainable_token_indices".split(),
    (None, False, [], {}),
)
_DROPOUT_HINT = "; set it to 0, a trained adapter's output does not depend on it"


def unsupported_option(data: Mapping[str, Any]) -> str | None:
    """The first option of a LoRA config that packed weights cannot honour, as "name=value", or None."""
    found = (name for name, unused in _COMPUTES.items() if data.get(name, unused[0]) not in unused)
    return next((f"{name}={data[name]!r}" for name in found), None)


BLayout = Literal["rank_major", "grouped_by_expert"]


def _is_grouped(data: Mapping[str, Any], told: BLayout | None) -> bool:
    """Whether B of experts has the expert slowest: what the file says, else what the caller told, else PEFT's way."""
    stamped = data.get("lora_B_layout")
    for name, value in (("adapter_config.json: lora_B_layout", stamped), ("lora_b_layout", told)):
        if value not in (*get_args(BLayout), None):
            raise ValueError(f"{name} must be one of {', '.join(get_args(BLayout))}, got {value!r}")
    if stamped and told and stamped != told:
        raise ValueError(f"lora_b_layout={told!r} contradicts adapter_config.json, which says {stamped!r}")
    if told == "grouped_by_expert" and not stamped and data.get(KEY) is not None:
        raise ValueError(
            f"lora_b_layout={told!r} contradicts adapter_config.json: its {KEY!r} says that this library wrote the "
            "adapter, and that is rank_major; leave lora_b_layout out"
        )
    return (stamped or told) == "grouped_by_expert"


def config_from_json(data: Mapping[str, Any], lora_b_layout: BLayout | None = None) -> PeftConfig:
    """Read adapter_config.json's content; ValueError names a field that is wrong, or that cannot be honoured here."""
    if data.get("peft_type") != "LORA":
        raise ValueError(f"adapter_config.json: peft_type is {data.get('peft_type')!r}, only 'LORA' is supported")
    chosen = (f"{name}={data[name]!r}" for name, unused in _CHOOSES.items() if data.get(name) not in unused)
    option = unsupported_option(data) or next(chosen, None)
    if option:
        hint = _DROPOUT_HINT if option.startswith("lora_dropout") else ""
        raise ValueError(f"adapter_config.json: {option} is not supported{hint}")
    check_fields(data)
    modules = data.get("target_modules") or ()
    if modules == "all-linear":
        raise ValueError("adapter_config.json: target_modules='all-linear' is not supported, name the layers")
    return PeftConfig(
        r=data["r"],
        lora_alpha=data["lora_alpha"],
        use_rslora=bool(data.get("use_rslora")),
        rank_pattern=data.get("rank_pattern") or {},
        alpha_pattern=data.get("alpha_pattern") or {},
        target_modules=modules,
        target_parameters=data.get("target_parameters") or (),
        grouped_by_expert=_is_grouped(data, lora_b_layout),
        peft_version=data.get("peft_version"),
    )


def state_dict_of(model: nn.Module) -> dict[str, Tensor]:
    """All adapters of the model under PEFT's keys, in PEFT's layout."""
    to_shards(model)
    sites = adapted_sites(model)
    state: dict[str, Tensor] = {}
    for site, (key_a, key_b) in keys_of(sites).items():
        factors = site.factors
        if factors is not None:
            with torch.no_grad():
                state[key_a], state[key_b] = to_peft(site, *map(whole, factors))
    return state
