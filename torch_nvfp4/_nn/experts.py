"""`NVFP4Experts`, a Mixture-of-Experts layer's experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._held import KEY, Held, not_these, note
from ..format import dequantize, get_format, quantize
from ..ops.validation import ACTIVATIONS, is_gated
from .factors import PROJECTIONS, LoRAFactors, MixedLoRA, ProjectionName, check_projections, new_factors
from .numerics import Numerics
from .packed import Packed, frozen

_NO_LORA: tuple[None, None, float] = (None, None, 1.0)


def _quantize_experts(weight_ENC: Tensor, halves: int, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise each expert, and each half of its rows, with a global scale of its own.

    One half of one expert at a time, so that only a small part is ever held in fp32.
    """
    e, n, c = weight_ENC.shape
    codes = torch.empty(e, n, c // 2, dtype=torch.uint8, device=weight_ENC.device)
    scales = torch.empty(
        e,
        n,
        c // get_format(format).block_size,
        dtype=get_format(format).scale_dtype,
        device=weight_ENC.device,
    )
    global_scale = torch.empty(e, halves, dtype=torch.float32, device=weight_ENC.device)
    rows = n // halves
    for expert in range(e):
        for half in range(halves):
            part = slice(half * rows, (half + 1) * rows)
            part_codes, part_scales, part_global = quantize(weight_ENC[expert, part], format=format)
            codes[expert, part] = part_codes
            scales[expert, part].view(torch.uint8).copy_(part_scales.view(torch.uint8))
            global_scale[expert, half] = part_global[0]
    return codes, scales, global_scale


class NVFP4Experts(Numerics, Packed):
    """The experts of a Mixture-of-Experts layer, packed to 4 bits and frozen, with optional LoRA adapters that train.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of the format's block size.
        intermediate_size: I, likewise.
        activation: `silu`, `gelu_tanh`, `gelu`, `swiglu_oai` (gated), or `relu2` (not gated).
        limit: clamp of the pre-activation, for `silu` and `swiglu_oai`.
        bias: whether both projections have a bias (frozen; `gate_up_bias [E, N]`, `down_bias [E, H]`).
        format: `nvfp4` or `mxfp4`.

    Parameters of a projection P (`gate_up`: N = 2I (I if not gated), C = H; `down`: N = H, C = I):
        `P_codes` uint8 `[E, N, C/2]`, `P_scales` uint8 `[E, N, C/B]`, `P_global_scale` int32 `[E, S]`; and after
        `add_lora`: `P_lora_a [E, R, C]`, `P_lora_b [E, N, R]`, with the float `P_scaling`.

    A new module holds zeros; `from_dense` or `load_state_dict` fills it.
    """

    _products = ("gate_up_", "down_")

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        limit: float | None = None,
        bias: bool = False,
        format: str = "nvfp4",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got '{activation}'")
        block = get_format(format).block_size
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size < 1 or size % block:
                raise ValueError(f"{name} must be a positive multiple of B = {block} ({format}), got {size}")
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        self.num_experts, self.hidden_size, self.intermediate_size = (
            num_experts,
            hidden_size,
            intermediate_size,
        )
        self.activation, self.limit, self.format = activation, limit, format
        self.gated = is_gated(activation)
        for projection in PROJECTIONS:
            n, c = self._sizes(projection)
            halves = 2 if projection == "gate_up" and self.gated else 1
            shape = (num_experts, n)
            codes = torch.zeros(*shape, c // 2, dtype=torch.uint8, device=device)
            scales = torch.zeros(*shape, c // block, dtype=torch.uint8, device=device)
            ones = torch.ones(num_experts, halves, dtype=torch.float32, device=device)
            self._set_packed(projection, codes, scales.view(get_format(format).scale_dtype), ones)
            self.register_parameter(f"{projection}_bias", frozen(torch.zeros(shape, device=device)) if bias else None)
            self.register_parameter(f"{projection}_lora_a", None)
            self.register_parameter(f"{projection}_lora_b", None)
        self.gate_up_scaling = self.down_scaling = 1.0
        self._init_input_scales()

    @classmethod
    def from_dense(
        cls,
        gate_up: Tensor,
        down: Tensor,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str = "silu",
        limit: float | None = None,
        format: str = "nvfp4",
    ) -> "NVFP4Experts":
        """Quantise dense experts.

        Args:
            gate_up: `[E, 2I, H]` with rows `[gate; up]` (`[E, I, H]` if the activation is not gated), any float dtype.
            down: `[E, H, I]`.
            gate_up_bias, down_bias: `[E, N]` each; both or neither.

        Gate and up keep a global scale each. Raises ValueError for shapes that do not fit, a non-finite weight, or a
        width that is no multiple of the block size.
        """
        gated = activation in ACTIVATIONS and is_gated(activation)
        if gate_up.dim() != 3 or down.dim() != 3 or (gate_up.shape[0], gate_up.shape[2]) != down.shape[:2]:
            raise ValueError(
                f"gate_up must be [E, N, H] and down [E, H, I], got {list(gate_up.shape)} and {list(down.shape)}"
            )
        e, h, i = down.shape
        if gate_up.shape[1] != (2 * i if gated else i):
            raise ValueError(
                f"gate_up must have N = {'2I' if gated else 'I'} = {2 * i if gated else i} rows for '{activation}', "
                f"got {gate_up.shape[1]}"
            )
        if (gate_up_bias is None) != (down_bias is None):
            raise ValueError("gate_up_bias and down_bias must be given together")
        experts = cls(
            e,
            h,
            i,
            activation=activation,
            limit=limit,
            bias=gate_up_bias is not None,
            format=format,
            device="meta",
        )
        experts._set_packed("gate_up", *_quantize_experts(gate_up, 2 if gated else 1, format))
        experts._set_packed("down", *_quantize_experts(down, 1, format))
        if gate_up_bias is not None and down_bias is not None:
            experts.gate_up_bias = frozen(gate_up_bias.detach().clone())
            experts.down_bias = frozen(down_bias.detach().clone())
        return experts

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        lora: Mapping[ProjectionName, LoRAFactors] | MixedLoRA | None = None,
    ) -> Tensor:
        """`moe_lora` of x `[T, H]`, topk_ids `[T, K]` and topk_weights `[T, K]` -> `[T, H]` in x's dtype.

        lora: an adapter to use in place of the module's own; a projection that it does not name has none. Or several,
            of which each token uses one. ValueError where one names another projection, or their ids are not `[T]`.
        """
        for adapter in lora.adapters if isinstance(lora, MixedLoRA) else [lora or {}]:
            check_projections(adapter)
        if not isinstance(lora, MixedLoRA):
            return self._run(x, topk_ids, topk_weights, lora)
        if lora.ids.shape != x.shape[:1] or lora.ids.is_floating_point() or lora.ids.dtype == torch.bool:
            raise ValueError(
                f"lora.ids must be [T] = {[x.shape[0]]} integers, got {list(lora.ids.shape)} {lora.ids.dtype}"
            )
        # One call for each adapter, in which the other tokens are not routed: each row's products are computed once, in
        # one call, and the others give it exact zeros.
        ids = topk_ids.long()
        without = (lora.ids < 0) | (lora.ids >= len(lora.adapters))
        y = self._run(x, ids.where(without[:, None], -1), topk_weights, {})
        for i, adapter in enumerate(lora.adapters):
            y = y + self._run(x, ids.where((lora.ids == i)[:, None], -1), topk_weights, adapter)
        return y

    def _run(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, lora: Mapping[ProjectionName, LoRAFactors] | None
    ) -> Tensor:
        gate_up, down = (self._factors(p) if lora is None else lora.get(p, _NO_LORA) for p in PROJECTIONS)
        gate_up_input_scale, down_input_scale = self._input_scales()
        return torch.ops.nvfp4.moe_lora(
            x, topk_ids, topk_weights, *self.packed("gate_up"), *self.packed("down"),
            gate_up[0], gate_up[1], down[0], down[1], self.gate_up_bias, self.down_bias,
            gate_up_scaling=gate_up[2], down_scaling=down[2], activation=self.activation, limit=self.limit,
            compute=self.compute, merge_aware=self.merge_aware,
            gate_up_input_scale=gate_up_input_scale, down_input_scale=down_input_scale,
        )  # fmt: skip

    def _factors(self, projection: ProjectionName) -> tuple[Tensor | None, Tensor | None, float]:
        """(a, b, scaling) of the module's own adapter."""
        a, b, scaling = (getattr(self, f"{projection}_{name}") for name in ("lora_a", "lora_b", "scaling"))
        return a, b, scaling

    def add_lora(
        self,
        r: int,
        *,
        scaling: float,
        projections: ProjectionName | tuple[ProjectionName, ...] = PROJECTIONS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Give every expert LoRA factors of rank r: A kaiming-uniform, B zero; the delta is scaling · b @ a."""
        if r < 1:
            raise ValueError(f"r must be at least 1, got {r}")
        projections = (projections,) if isinstance(projections, str) else projections
        check_projections(projections)
        for projection in projections:
            if getattr(self, f"{projection}_lora_a") is not None:
                raise ValueError(f"{projection} already has LoRA factors")
            n, c = self._sizes(projection)
            device = getattr(self, f"{projection}_codes").device
            a, b = new_factors(self.num_experts, r, n, c, dtype, device)
            self.register_parameter(f"{projection}_lora_a", nn.Parameter(a))
            self.register_parameter(f"{projection}_lora_b", nn.Parameter(b))
            setattr(self, f"{projection}_scaling", float(scaling))

    def packed(self, projection: ProjectionName) -> tuple[Tensor, Tensor, Tensor]:
        """(codes uint8, scales float8, global_scale float32) of a projection: views, as the ops take them."""
        codes, scales, global_scale = (getattr(self, f"{projection}_{p}") for p in ("codes", "scales", "global_scale"))
        return codes, scales.view(get_format(self.format).scale_dtype), global_scale.view(torch.float32)

    def dequantize(self, projection: ProjectionName, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The frozen weight of all experts as a dense `[E, N, C]`; for export and inspection, never used to train."""
        return dequantize(*self.packed(projection), dtype)

    @property
    def experts_held(self) -> Held:
        """(first, count, E): which of the layer's experts these packed weights are; all, unless they are split."""
        return 0, self.num_experts, self.num_experts

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note(destination, prefix, self.experts_held)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
        strict: bool, missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        if text := not_these(self, self.experts_held, state_dict, prefix, local_metadata.get(KEY)):
            error_msgs.append(text)
        else:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )

    @property
    def packed_bytes(self) -> int:
        """Bytes of all codes, scales and global scales."""
        parts = (getattr(self, f"{p}_{t}") for p in PROJECTIONS for t in ("codes", "scales", "global_scale"))
        return sum(t.nbytes for t in parts)

    def _sizes(self, projection: ProjectionName) -> tuple[int, int]:
        """(N, C) of a projection."""
        if projection == "down":
            return self.hidden_size, self.intermediate_size
        return (2 if self.gated else 1) * self.intermediate_size, self.hidden_size

    def _set_packed(self, projection: ProjectionName, codes: Tensor, scales: Tensor, global_scale: Tensor) -> None:
        setattr(self, f"{projection}_codes", frozen(codes))
        setattr(self, f"{projection}_scales", frozen(scales.view(torch.uint8)))
        setattr(self, f"{projection}_global_scale", frozen(global_scale.view(torch.int32)))

    def extra_repr(self) -> str:
        parts = [f"E={self.num_experts}, H={self.hidden_size}, I={self.intermediate_size}"]
        parts.append(self.activation if self.limit is None else f"{self.activation}, limit={self.limit}")
        parts.append(self.format)
        if self.gate_up_bias is not None:
            parts.append("bias")
        for projection in PROJECTIONS:
            a = getattr(self, f"{projection}_lora_a")
            if a is not None:
                parts.append(f"{projection}_lora r={a.shape[1]}")
        return ", ".join([*parts, *self._unusual_numerics()])
