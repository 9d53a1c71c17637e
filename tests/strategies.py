"""Hypothesis strategies for the ops, in one place, and hostile on purpose.

A `Layer` is one drawn MoE layer: every tensor of `torch.ops.nvfp4.moe_lora`, with empty experts, one expert that takes
all, ids of -1 and of E and more, repeated ids, T of 0 and 1, odd ranks, E != R, 2I = H, and strided or expanded inputs.
Sizes are drawn by hypothesis, values come from a generator with a drawn seed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from torch_nvfp4.format import get_format, quantize
from torch_nvfp4.ops.validation import ACTIVATIONS, LIMITED_ACTIVATIONS, is_gated

TENSORS = (
    "x", "topk_ids", "topk_weights",
    "gate_up_codes", "gate_up_scales", "gate_up_global_scale", "down_codes", "down_scales", "down_global_scale",
    "gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b", "gate_up_bias", "down_bias",
)  # fmt: skip
DIFFERENTIABLE = ("x", "topk_weights", *TENSORS[9:])
HALF_OR_FULL = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Layer:
    """The arguments of one `moe_lora` call."""

    tensors: dict[str, Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["tensors"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        return tuple(self.tensors[name] for name in TENSORS)

    @property
    def differentiable(self) -> dict[str, Tensor]:
        return {name: t for name in DIFFERENTIABLE if (t := self.tensors[name]) is not None}

    def run(self) -> Tensor:
        return torch.ops.nvfp4.moe_lora(*self.args, **self.options)

    def requires_grad(self, names: set[str] | None = None) -> "Layer":
        """A copy with fresh leaves (same strides) that require a gradient where named (None: all that can)."""
        fresh = dict(self.tensors)
        for name, tensor in self.differentiable.items():
            leaf = tensor.detach()  # keeps strides, unlike a clone of a non-dense view
            fresh[name] = leaf.requires_grad_(names is None or name in names)
        return Layer(fresh, self.options)

    def replaced(self, **tensors: Tensor | None) -> "Layer":
        return Layer({**self.tensors, **tensors}, self.options)


def packed_experts(
    generator: torch.Generator, e: int, n: int, c: int, halves: int, fmt: str, global_scales: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Random packed experts whose halves have global scales of their own (up to 2.14 apart, as real models have)."""
    block = get_format(fmt).block_size
    codes, scales = [], []
    for _ in range(e):
        weight = torch.randn(n, c, generator=generator)
        code, scale, _ = quantize(weight, format=fmt)
        codes.append(code)
        scales.append(scale.view(torch.uint8))
    shape = (e, n, c // block)
    scale_EN = torch.stack(scales).view(get_format(fmt).scale_dtype).view(shape)
    global_scale = torch.ones(e, halves)
    if fmt == "nvfp4" and global_scales:
        spread = 1 + 1.14 * torch.rand(e, halves, generator=generator)
        global_scale = spread / (448.0 * c**0.5)
    return torch.stack(codes), scale_EN, global_scale


def topk_ids(generator: torch.Generator, t: int, k: int, e: int, pattern: str) -> Tensor:
    """Router ids by pattern: distinct, repeated, one expert for all, or with slots that are not routed."""
    if pattern == "one_expert":
        return torch.full((t, k), int(torch.randint(e, (1,), generator=generator)))
    if pattern == "none":
        return torch.full((t, k), -1)
    low, high = {"repeated": (0, e), "minus_one": (-1, e), "sentinel": (-1, e + 3)}.get(pattern, (0, e))
    if pattern == "distinct" and k <= e:
        scores = torch.rand(t, e, generator=generator)
        return scores.argsort(1)[:, :k].contiguous()
    return torch.randint(low, high, (t, k), generator=generator)


ID_PATTERNS = ("distinct", "repeated", "one_expert", "minus_one", "sentinel", "none")


VALUE_KINDS = ("bits", "spread", "ties", "zeros")


def hostile_values(
    kind: str, shape: tuple[int, ...], exponent: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Values of any magnitude, ties, subnormals, both zeros, or every pattern of the dtype (NaN and infinity too)."""
    if kind == "bits":
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
        return raw.view(dtype)
    x = torch.randn(shape, generator=generator)
    if kind == "spread":
        x = x * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    if kind == "ties":
        x = torch.randint(-24, 25, shape, generator=generator) * 0.25
    if kind == "zeros":
        x = x * torch.randint(-1, 2, (*shape[:-1], 1), generator=generator)
    return (x * 2.0**exponent).to(dtype)


def strided(tensor: Tensor, how: str) -> Tensor:
    """The same values under other strides (a tensor with too few dims for that comes back as it is)."""
    if tensor.dim() < {"sliced": 1, "transposed": 2}.get(how, 0):
        return tensor
    if how == "sliced":  # columns of a wider tensor
        wide = torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)
        wide.view(torch.uint8).fill_(0xFF)  # NaN in every float format, -1 or the largest value in integers
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]
    if how == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor


STRIDES = ("contiguous", "sliced", "transposed")


def make_layer(
    *, t: int = 7, k: int = 2, e: int = 5, h: int = 32, i: int = 16, ranks: tuple[int | None, int | None] = (3, 4),
    activation: str = "silu", limit: float | None = None, dtype: torch.dtype = torch.float32,
    lora_dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype = torch.float32,
    id_dtype: torch.dtype = torch.int64, bias: bool = False, pattern: str = "distinct", halves: int = 2,
    fmt: str = "nvfp4", stride_of: Callable[[Tensor], Tensor] = lambda tensor: tensor, seed: int = 0,
) -> Layer:  # fmt: skip
    """One layer; `ranks` are R of gate_up and of down, None for no LoRA there."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    gated = is_gated(activation)
    tensors: dict[str, Tensor | None] = dict.fromkeys(TENSORS)
    tensors["x"] = stride_of(normal(t, h).to(dtype))
    tensors["topk_ids"] = topk_ids(generator, t, k, e, pattern).to(id_dtype)
    tensors["topk_weights"] = stride_of(torch.rand(t, k, generator=generator).to(weight_dtype))
    sizes = {"gate_up": (2 * i if gated else i, h, halves if gated else 1), "down": (h, i, 1)}
    for (name, (n, c, s)), r in zip(sizes.items(), ranks, strict=True):
        packed = packed_experts(generator, e, n, c, s, fmt)
        for part, tensor in zip(("codes", "scales", "global_scale"), packed, strict=True):
            tensors[f"{name}_{part}"] = tensor
        if r is not None:
            tensors[f"{name}_lora_a"] = stride_of(normal(e, r, c, scale=c**-0.5).to(lora_dtype))
            tensors[f"{name}_lora_b"] = stride_of(normal(e, n, r, scale=0.3).to(lora_dtype))
        if bias:
            tensors[f"{name}_bias"] = normal(e, n).to(lora_dtype)
    return Layer(tensors, dict(activation=activation, limit=limit, gate_up_scaling=2.0, down_scaling=0.5))


@st.composite
def layers(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = HALF_OR_FULL,
    activations: tuple[str, ...] = ACTIVATIONS,
    id_patterns: tuple[str, ...] = ID_PATTERNS,
    formats: tuple[str, ...] = ("nvfp4", "mxfp4"),
    tokens: tuple[int, ...] = (0, 1, 2, 7, 17),
) -> Layer:
    """One MoE layer; every argument of `moe_lora`, optional ones present or not."""
    fmt = draw(st.sampled_from(formats))
    block = get_format(fmt).block_size
    dtype = draw(st.sampled_from(dtypes))
    activation = draw(st.sampled_from(activations))
    rank = st.sampled_from((None, 1, 3, 4, 5))
    # The slope jumps at the limit, and in half precision values round to its other side: no gradient to compare.
    limits = (None, 0.5, 7.0) if dtype in (torch.float32, torch.float64) else (None,)
    return make_layer(
        t=draw(st.sampled_from(tokens)),
        k=draw(st.integers(1, 3)),
        e=draw(st.integers(1, 6)),
        h=block * draw(st.integers(1, 3)),
        i=block * draw(st.integers(1, 3)),
        ranks=(draw(rank), draw(rank)),
        activation=activation,
        limit=draw(st.sampled_from(limits)) if activation in LIMITED_ACTIVATIONS else None,
        dtype=dtype,
        lora_dtype=draw(st.sampled_from((torch.float32, dtype))),
        weight_dtype=draw(st.sampled_from((torch.float32, dtype))),
        id_dtype=draw(st.sampled_from((torch.int64, torch.int32, torch.int16))),
        bias=draw(st.booleans()),
        pattern=draw(st.sampled_from(id_patterns)),
        halves=draw(st.sampled_from((1, 2))),
        fmt=fmt,
        stride_of=lambda tensor: strided(tensor, draw(st.sampled_from(STRIDES))),
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def merges(draw: st.DrawFn, fmt: str) -> tuple[Tensor, ...]:
    """Arguments of `merge_lora`: a weight of any bytes, or quantised, and factors of any magnitude, some zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    e, n, blocks, r = (draw(st.integers(1, most)) for most in (3, 9, 3, 5))
    halves = draw(st.integers(1, 2)) if fmt == "nvfp4" else 1
    n, c = 2 * n if halves == 2 else n, blocks * get_format(fmt).block_size
    global_scale = torch.rand(e, halves, generator=generator) * draw(st.sampled_from((1.0, 1e-3, 1e-40, 0.0)))
    if fmt == "mxfp4":
        global_scale = torch.ones(e, 1)
    if draw(st.booleans()):
        codes = torch.randint(0, 256, (e, n, c // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 256, (e, n, blocks), generator=generator, dtype=torch.uint8)
        scales = scales.view(get_format(fmt).scale_dtype)
    else:
        weight, given_scale = torch.randn(e, n, c, generator=generator), global_scale if fmt == "nvfp4" else None
        codes, scales, _ = quantize(weight, given_scale, fmt, check_finite=False)
    size = 2.0 ** draw(st.sampled_from((-70, -8, 0, 40, 63)))
    dtype = draw(st.sampled_from((*HALF_OR_FULL, torch.float64)))
    a = (torch.randn(e, r, c, generator=generator) * size * torch.randint(0, 2, (e, 1, c), generator=generator)).to(
        dtype
    )
    b = (torch.randn(e, n, r, generator=generator) * size * torch.randint(0, 2, (e, n, 1), generator=generator)).to(
        dtype
    )
    a, b = (strided(factor, draw(st.sampled_from(STRIDES))) for factor in (a, b))
    return codes, scales, global_scale, a, b
