"""The layers that `moe_layer.py` measures, as data, and random tensors of their sizes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_nvfp4.format import get_format

BF16 = torch.bfloat16
RESULTS = ("out", "x", "topk_weights", "gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")
"""The output and the gradients, in the order in which every row returns them."""


@dataclass(frozen=True)
class Case:
    """A layer's sizes and kind; `skew` > 0 draws the router's scores with a bias that falls off over the experts."""

    name: str
    t: int
    h: int
    i: int
    e: int
    k: int
    r: int
    skew: float = 0.0
    activation: str = "silu"
    limit: float | None = None
    bias: bool = False
    format: str = "nvfp4"

    @property
    def forward_flops(self) -> float:
        """Of the frozen weights' products; the backward needs as many again, as they have no gradient."""
        return 2.0 * self.t * self.k * self.h * self.i * 3

    @property
    def weight_bytes(self) -> float:
        """Of the packed weights that a pass must read: those of the experts that are chosen, on average."""
        chosen = self.e * (1 - (1 - self.k / self.e) ** self.t)
        return chosen * 3 * self.h * self.i * (0.5 + 1 / self.block)

    @property
    def block(self) -> int:
        return get_format(self.format).block_size


CASES = (
    Case("qwen3-30b-a3b-512", 512, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-8192", 8192, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-32768", 32768, 2048, 768, 128, 8, 16),
    Case("gpt-oss-20b-8192", 8192, 2880, 2880, 32, 4, 16),
    Case("mixtral-8x7b-8192", 8192, 4096, 14336, 8, 2, 32),
    Case("deepseek-v3-like-8192", 8192, 7168, 2048, 64, 8, 16),
    Case("gpt-oss-20b-8192-biases", 8192, 2880, 2880, 32, 4, 16, activation="swiglu_oai", limit=7.0, bias=True),
    Case(
        "gpt-oss-20b-8192-mxfp4", 8192, 2880, 2880, 32, 4, 16, activation="swiglu_oai", limit=7.0, bias=True,
        format="mxfp4",
    ),
    Case("qwen3-30b-a3b-8192-skewed", 8192, 2048, 768, 128, 8, 16, skew=2.0),
    Case("qwen3-30b-a3b-1", 1, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-16", 16, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-64", 64, 2048, 768, 128, 8, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a layer does beside its products; the biases are frozen."""

    activation: str
    limit: float | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class Inputs:
    """Random tensors of a case on the device; weights scaled so that activations stay of order one."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = dict(device=device, generator=generator)

        def normal(*shape: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return (torch.randn(*shape, **options) * scale).to(dtype).requires_grad_()

        def packed(n: int, c: int, halves: int) -> tuple[Tensor, Tensor, Tensor]:
            codes = torch.randint(0, 256, (case.e, n, c // 2), dtype=torch.uint8, **options)
            shape, dtype = (case.e, n, c // case.block), get_format(case.format).scale_dtype
            if case.format == "mxfp4":
                low = 124 - (c.bit_length() + 1) // 2  # an exponent: these scales do for the global one too
                scales = torch.randint(low, low + 3, shape, dtype=torch.uint8, **options)
                return codes, scales.view(dtype), torch.ones(case.e, 1, device=device)
            scales = torch.randint(48, 72, shape, dtype=torch.uint8, **options)
            global_scale = (1 + torch.rand(case.e, halves, **options)) * 0.2 * c**-0.5
            return codes, scales.view(dtype), global_scale

        self.case = case
        self.x = normal(case.t, case.h, scale=1.0, dtype=BF16)
        scores = torch.rand(case.t, case.e, **options)
        scores -= case.skew * torch.arange(case.e, device=device) / case.e
        weights, self.ids = scores.topk(case.k, 1)
        self.weights = torch.softmax(weights, 1).requires_grad_()
        self.gate_up = packed(2 * case.i, case.h, 2)
        self.down = packed(case.h, case.i, 1)
        self.factors = [
            normal(case.e, case.r, case.h, scale=case.h**-0.5), normal(case.e, 2 * case.i, case.r, scale=0.1),
            normal(case.e, case.r, case.i, scale=case.i**-0.5), normal(case.e, case.h, case.r, scale=0.1),
        ]  # fmt: skip
        biases = [normal(case.e, n, scale=0.1).detach() if case.bias else None for n in (2 * case.i, case.h)]
        self.kind = Kind(case.activation, case.limit, *biases)
        self.grad = torch.randn(case.t, case.h, **options).to(BF16)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, *self.factors]
