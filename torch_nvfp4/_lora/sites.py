"""Where adapters can sit: one `Site` for each projection of a model that can carry LoRA factors."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import NVFP4Experts, NVFP4Linear

# Path components that wrappers (torch.compile, DDP, FSDP, activation checkpointing) put into module names.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class LoRASpec:
    """An adapter's rank and strength: `scaling` is alpha / r, or alpha / sqrt(r) if rank-stabilised."""

    r: int
    alpha: float
    rslora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


@dataclass(frozen=True)
class StockLayout:
    """How the dense experts module that an `NVFP4Experts` stands for keeps the same weights.

    Whoever packs a foreign module sets it as the attribute `stock_layout`; without one the stock layout is
    the canonical layout. `interleaved`: rows of gate_up are gate 0, up 0, gate 1, up 1, ... instead of
    `[gate; up]`. `transposed`: weights are `[E, in, out]`. `untold`: the stock module has no flag that says so,
    and PEFT adapts the transposed weight: its A is this library's B transposed, and the other way round.
    """

    gate_up_name: str = "gate_up_proj"
    down_name: str = "down_proj"
    transposed: bool = False
    interleaved: bool = False
    untold: bool = False


class LoRALinear(nn.Module):
    """A frozen `nn.Linear` plus a LoRA adapter: y = base(x) + scaling * (x A^T) B^T.

    `lora_a` is `[R, in]` (Kaiming uniform, as PEFT), `lora_b` is `[out, R]` (zeros), both of `dtype`;
    forward casts them to the dtype of x, gradients come back in theirs. Setting both to None switches the
    adapter off.
    """

    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None

    def __init__(self, base_layer: nn.Linear, r: int, *, scaling: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        device = base_layer.weight.device
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.scaling = scaling
        self.lora_a = nn.Parameter(torch.empty(r, self.in_features, dtype=dtype, device=device))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, r, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """The frozen base weight, for code that looks at `layer.weight.dtype` or `.device`."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if self.lora_a is None or self.lora_b is None:
            return y
        u = F.linear(x, self.lora_a.to(x.dtype)) * self.scaling
        return y + F.linear(u, self.lora_b.to(x.dtype))

    def extra_repr(self) -> str:
        r = "off" if self.lora_a is None else self.lora_a.shape[0]
        return f"{self.in_features}, {self.out_features}, r={r}, scaling={self.scaling:g}"


@dataclass(frozen=True)
class Site:
    """One projection of an `NVFP4Experts`, or a linear layer (`projection` "")."""

    path: str
    module: nn.Module
    projection: Literal["", "gate_up", "down"] = ""

    @property
    def is_experts(self) -> bool:
        return bool(self.projection)

    @property
    def name(self) -> str:
        """Name of the adapted module or, for experts, of the stock parameter: what PEFT's targets match."""
        if not self.is_experts:
            return self.path
        layout = stock_layout_of(self.module)
        leaf = layout.gate_up_name if self.projection == "gate_up" else layout.down_name
        return f"{self.path}.{leaf}" if self.path else leaf

    @property
    def num_experts(self) -> int:
        return self.module.num_experts if isinstance(self.module, NVFP4Experts) else 1

    @property
    def out_in(self) -> tuple[int, int]:
        """(N, C) of one weight matrix."""
        if isinstance(self.module, NVFP4Experts):
            _, rows, packed_columns = getattr(self.module, f"{self.projection}_codes").shape
            return rows, 2 * packed_columns
        assert isinstance(self.module, nn.Linear | LoRALinear | NVFP4Linear)
        return self.module.out_features, self.module.in_features

    @property
    def factor_names(self) -> tuple[str, str]:
        prefix = f"{self.projection}_" if self.is_experts else ""
        return f"{prefix}lora_a", f"{prefix}lora_b"

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """(A, B): `[E, R, C]`, `[E, N, R]` of experts, `[R, C]`, `[N, R]` of a linear layer; None without."""
        a, b = (getattr(self.module, name, None) for name in self.factor_names)
        return None if a is None or b is None else (a, b)

    @property
    def spec(self) -> LoRASpec:
        """Rank and alpha; alpha is scaling * r where the module's own `add_lora` made the adapter."""
        specs: dict[str, LoRASpec] = self.module.__dict__.get("lora_specs", {})
        if self.projection in specs:
            return specs[self.projection]
        assert self.factors is not None
        r = self.factors[0].shape[-2]
        return LoRASpec(r, getattr(self.module, self.scaling_name) * r)

    @property
    def scaling_name(self) -> str:
        """The module's attribute that holds the adapter's strength."""
        return f"{self.projection}_scaling" if self.is_experts else "scaling"

    def set_spec(self, spec: LoRASpec) -> None:
        """Make the adapter's scaling what the spec says, and remember the spec for saving."""
        setattr(self.module, self.scaling_name, spec.scaling)
        self.module.__dict__.setdefault("lora_specs", {})[self.projection] = spec


def stock_layout_of(experts: nn.Module) -> StockLayout:
    """The module's `stock_layout`, or the canonical one."""
    layout = experts.__dict__.get("stock_layout")
    if isinstance(layout, StockLayout):
        return layout
    gated = isinstance(experts, NVFP4Experts) and experts.gated
    return StockLayout() if gated else StockLayout(gate_up_name="up_proj")


def clean_path(name: str) -> str:
    """A module's name without the components that wrappers add."""
    parts = name.split(".")
    if parts[0] == "module":
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def iter_sites(model: nn.Module) -> Iterator[Site]:
    """Every site of the model, adapted or not, in module order."""
    bases = {id(module.base_layer) for module in model.modules() if isinstance(module, LoRALinear)}
    for name, module in model.named_modules():
        path = clean_path(name)
        if isinstance(module, NVFP4Experts):
            yield Site(path, module, "gate_up")
            yield Site(path, module, "down")
        elif isinstance(module, nn.Linear | LoRALinear | NVFP4Linear) and id(module) not in bases:
            yield Site(path, module)


def adapted_sites(model: nn.Module) -> list[Site]:
    return [site for site in iter_sites(model) if site.factors is not None]


def saved_sites(model: nn.Module) -> list[Site]:
    """The adapted sites; ValueError where there are none to save."""
    refuse_peft(model)
    sites = adapted_sites(model)
    if not sites:
        raise ValueError("the model has no adapters: call add_lora or load_adapter first")
    return sites


def refuse_peft(model: nn.Module) -> None:
    """ValueError where PEFT has put adapters on the model, whose layers are no sites. Nothing here imports PEFT."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is not None and any(isinstance(module, peft.BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "the model has PEFT's adapters: use PEFT's own methods (add_adapter, load_adapter, "
            "save_pretrained, disable_adapter), or take them off with its unload() first"
        )


def attach(model: nn.Module, site: Site, spec: LoRASpec, dtype: torch.dtype) -> Site:
    """Give the site an adapter (B zero) and return the site that now holds it."""
    if isinstance(site.module, NVFP4Experts) and site.projection:
        site.module.add_lora(spec.r, scaling=spec.scaling, projections=(site.projection,), dtype=dtype)
    elif isinstance(site.module, NVFP4Linear):
        site.module.add_lora(spec.r, scaling=spec.scaling, dtype=dtype)
    else:
        assert isinstance(site.module, nn.Linear)
        wrapper = LoRALinear(site.module, spec.r, scaling=spec.scaling, dtype=dtype).train(site.module.training)
        replace_module(model, site.module, wrapper)
        site = Site(site.path, wrapper)
    site.set_spec(spec)
    return site


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever the model holds `old`."""
    for parent in list(model.modules()):
        if parent is new:
            continue
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
