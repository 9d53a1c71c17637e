"""The calibrated scales of activations that a checkpoint has (`input_scale`), put to use by 4-bit activations."""

import torch
from torch import Tensor, nn

from ..nn import NVFP4Experts, NVFP4Linear, set_numerics
from .save import FORM


def use_input_scales(model: nn.Module, on: bool = True) -> int:
    """Quantise 4-bit activations under the scales that the model's checkpoint was calibrated with.

    Sets compute "w4a4" and, at every packed module, one scale for each product in place of one for each row: the
    largest of all its experts, and of gate and up, as engines do that quantise a token before they know its experts.
    Values beyond what calibration saw saturate. Returns how many modules there are.

    on: False goes back to a scale for each row; compute stays.

    ValueError, before anything is changed, for a model without packed modules and for a module that was not loaded from
    a checkpoint with such scales, or with those of 8-bit activations.
    """
    found = {path: m for path, m in model.named_modules() if isinstance(m, NVFP4Experts | NVFP4Linear)}
    scales = {path: _of(path, module) if on else (None,) * len(module._products) for path, module in found.items()}
    count = set_numerics(model, compute="w4a4" if on else None)
    for path, module in found.items():
        module.set_input_scales(*scales[path])
    return count


def _of(path: str, module: NVFP4Experts | NVFP4Linear) -> tuple[Tensor, ...]:
    form = module.__dict__.get(FORM)
    if form is None or form.input_scales is None:
        raise ValueError(f"{path}: it was not loaded from a checkpoint with calibrated scales of activations")
    if form.takes_8_bits:
        raise ValueError(f"{path}: its checkpoint's scales are those of 8-bit activations, not of NVFP4's")
    scales = torch.where(form.input_scales.meant.isnan(), 0, form.input_scales.meant)
    known = scales.amax(0)  # of gate, up, down
    products = (known,) if isinstance(module, NVFP4Linear) else (known[:-1], known[-1:])
    largest = tuple(product.amax() for product in products)
    positive = all(bool(scale > 0) and bool(scale.isfinite()) for scale in largest)
    if not positive or bool((scales < 0).any()):
        raise ValueError(f"{path}: its checkpoint has no positive, finite scale of activations for each product")
    return largest
