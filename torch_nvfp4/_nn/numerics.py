"""With what operands packed modules compute: 4-bit activations or not, merged weights or not."""

import torch
from torch import Tensor, nn

from ..ops.validation import COMPUTE_MODES


def _input_scale(value: Tensor | float) -> Tensor:
    """One positive number as the int32 of its fp32 bits, 0-d."""
    scale = torch.as_tensor(value).detach().to("cpu", torch.float32)
    if scale.numel() != 1 or not bool(scale.isfinite() & (scale > 0)):
        raise ValueError(f"an input scale must be one finite, positive number, got {value}")
    return scale.reshape(()).clone().view(torch.int32)


class Numerics:
    """With what operands a packed module computes; see `set_numerics`."""

    compute: str = "w4a16"
    merge_aware: bool = False
    _products: tuple[str, ...]
    """What the names of each product's tensors begin with."""

    def _init_input_scales(self) -> None:
        for product in self._products:
            self.register_buffer(f"{product}input_scale", None, persistent=False)  # type: ignore[attr-defined]

    def set_input_scales(self, *scales: Tensor | float | None) -> None:
        """The scale of each product's 4-bit activations (gate_up, down); None: each row's own. Used by "w4a4" alone.

        A multiplier, amax / 2688 of the activations that calibration saw; one value. ValueError where it is not finite
        and positive in fp32. Buffers of the module, which a state_dict does not hold.
        """
        if len(scales) != len(self._products):
            raise ValueError(f"{len(self._products)} input scales are needed, got {len(scales)}")
        made = [None if scale is None else _input_scale(scale) for scale in scales]
        for product, scale in zip(self._products, made, strict=True):
            codes: Tensor = getattr(self, f"{product}codes" if product else "weight_codes")
            if scale is not None and not codes.is_meta:  # a model without memory keeps the value until it has some
                scale = scale.to(codes.device)
            setattr(self, f"{product}input_scale", scale)

    def _input_scales(self) -> list[Tensor | None]:
        """As the ops take them: none unless activations are 4-bit."""
        scales: list[Tensor | None] = [getattr(self, f"{product}input_scale") for product in self._products]
        return [None if scale is None or self.compute != "w4a4" else scale.view(torch.float32) for scale in scales]

    def _unusual_numerics(self) -> list[str]:
        """In words, what is set that a new module has not."""
        calibrated = any(scale is not None for scale in self._input_scales())
        words = {self.compute: self.compute != "w4a16", "calibrated": calibrated, "merge-aware": self.merge_aware}
        return [word for word, on in words.items() if on]


def set_numerics(model: nn.Module, *, compute: str | None = None, merge_aware: bool | None = None) -> int:
    """Set how all packed modules of a model compute; returns how many there are.

    Args:
        compute: "w4a16", or "w4a4": the products' activations are quantised to NVFP4 too (backward straight-through).
        merge_aware: whether forward uses Q(W + scaling · b a), the 4-bit weight that merging the adapter writes, so
            that training sees its rounding (backward straight-through).

    None leaves a setting as it is. ValueError for an unknown compute, and for a model without packed modules.
    """
    if compute is not None and compute not in COMPUTE_MODES:
        raise ValueError(f"compute must be one of {', '.join(COMPUTE_MODES)}, got '{compute}'")
    modules = [module for module in model.modules() if isinstance(module, Numerics)]
    if not modules:
        raise ValueError("the model has no packed module (NVFP4Experts, NVFP4Linear) to set numerics of")
    for module in modules:
        if compute is not None:
            module.compute = compute
        if merge_aware is not None:
            module.merge_aware = merge_aware
    return len(modules)
