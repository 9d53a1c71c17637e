"""Modules that hold packed weights: `NVFP4Experts`, a Mixture-of-Experts layer's experts, and `NVFP4Linear`."""

from ._nn.experts import NVFP4Experts
from ._nn.factors import PROJECTIONS, LoRAFactors, MixedLoRA, ProjectionName
from ._nn.linear import NVFP4Linear
from ._nn.numerics import set_numerics

__all__ = [
    "PROJECTIONS",
    "LoRAFactors",
    "MixedLoRA",
    "NVFP4Experts",
    "NVFP4Linear",
    "ProjectionName",
    "set_numerics",
]
