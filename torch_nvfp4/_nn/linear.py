"""`NVFP4Linear`, a linear layer."""

import torch
from torch import Tensor, nn

from ..format import dequantize, get_format, quantize
from .factors import LoRAFactors, new_factors
from .numerics import Numerics
from .packed import Packed, frozen


class NVFP4Linear(Numerics, Packed):
    """A linear layer packed to 4 bits and frozen, with an optional LoRA adapter: the experts' ops with E = 1.

    `weight_codes` uint8 `[N, C/2]`, `weight_scales` uint8 `[N, C/B]`, `weight_global_scale` int32 `[1]` (bits of fp32),
    `bias [N]` (frozen) or None; after `add_lora`: `lora_a [R, C]`, `lora_b [N, R]`, float `scaling`.
    """

    _products = ("",)
    bias: nn.Parameter | None
    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        format: str = "nvfp4",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        fmt = get_format(format)
        if in_features < 1 or in_features % fmt.block_size:
            raise ValueError(f"in_features must be a positive multiple of B = {fmt.block_size}, got {in_features}")
        self.in_features, self.out_features, self.format, self.scaling = (
            in_features,
            out_features,
            format,
            1.0,
        )
        scales = torch.zeros(out_features, in_features // fmt.block_size, dtype=torch.uint8, device=device)
        codes = torch.zeros(out_features, in_features // 2, dtype=torch.uint8, device=device)
        self._set_packed(codes, scales, torch.ones(1, dtype=torch.float32, device=device))
        self.register_parameter("bias", frozen(torch.zeros(out_features, device=device)) if bias else None)
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self._init_input_scales()

    @classmethod
    def from_dense(cls, linear: nn.Linear, format: str = "nvfp4") -> "NVFP4Linear":
        """Quantise an `nn.Linear`; ValueError where its width is no multiple of the block size or it is not finite."""
        packed = cls(linear.in_features, linear.out_features, format=format, device="meta")
        packed._set_packed(*quantize(linear.weight.detach(), format=format))
        if linear.bias is not None:
            packed.bias = frozen(linear.bias.detach().clone())
        return packed

    def forward(self, x: Tensor, *, lora: LoRAFactors | None = None) -> Tensor:
        """x `[..., C]` -> `[..., N]` in x's dtype; lora: an adapter to use in place of the module's own.

        ValueError where x has another width.
        """
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"x must be [..., C] with C = {self.in_features}, got {list(x.shape)}")
        a, b, scaling = (self.lora_a, self.lora_b, self.scaling) if lora is None else lora
        rows = x.reshape(-1, self.in_features)
        offsets = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
        one_expert = (None if t is None else t.unsqueeze(0) for t in (*self.packed(), a, b, self.bias))
        (input_scale,) = self._input_scales()
        y, _ = torch.ops.nvfp4.grouped_lora_linear(
            rows, None, offsets, *one_expert, scaling=scaling, compute=self.compute, merge_aware=self.merge_aware,
            input_scale=input_scale,
        )  # fmt: skip
        return y.view(*x.shape[:-1], self.out_features)

    def add_lora(self, r: int, *, scaling: float, dtype: torch.dtype = torch.float32) -> None:
        """Give the layer LoRA factors of rank r: A kaiming-uniform, B zero; the delta is scaling · b @ a."""
        if r < 1:
            raise ValueError(f"r must be at least 1, got {r}")
        if self.lora_a is not None:
            raise ValueError("the layer already has LoRA factors")
        a, b = new_factors(1, r, self.out_features, self.in_features, dtype, self.weight_codes.device)
        self.lora_a, self.lora_b = nn.Parameter(a[0]), nn.Parameter(b[0])
        self.scaling = float(scaling)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """(codes uint8 `[N, C/2]`, scales float8 `[N, C/B]`, global_scale float32 `[1]`); views, no copies."""
        scales = self.weight_scales.view(get_format(self.format).scale_dtype)
        return self.weight_codes, scales, self.weight_global_scale.view(torch.float32)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The frozen weight as a dense `[N, C]`."""
        return dequantize(*self.packed(), dtype)

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes, scales and global scale."""
        return sum(t.nbytes for t in self.packed())

    def _set_packed(self, codes: Tensor, scales: Tensor, global_scale: Tensor) -> None:
        self.weight_codes = frozen(codes)
        self.weight_scales = frozen(scales.view(torch.uint8))
        self.weight_global_scale = frozen(global_scale.view(torch.int32))

    def extra_repr(self) -> str:
        lora = "" if self.lora_a is None else f", lora r={self.lora_a.shape[0]}"
        sizes = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format}{lora}"
        return ", ".join([sizes, *self._unusual_numerics()])
