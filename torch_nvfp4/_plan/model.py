"""A model's parameters and work, counted from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .._explain.model_config import ConfigError, read_sizes
from .._memory import Sizes
from ..format import get_format


@dataclass(frozen=True)
class Model:
    """Counts, each of one layer where the name does not say otherwise.

    moe_layers, dense_layers: how many of each. experts, slots: E and K. hidden, intermediate: H and I.
    expert_bytes: packed bytes of one expert. expert_adapter: adapter elements of one expert.
    attention, shared, dense_mlp: elements of weights that are not packed.
    linear_adapter: adapter elements of attention.
    vocabulary: elements of embedding and head together.
    attention_width: heads times the mean width of a query and a value, for the work of attention.
    """

    name: str
    moe_layers: int
    dense_layers: int
    experts: int
    slots: int
    hidden: int
    intermediate: int
    expert_bytes: int
    expert_adapter: int
    attention: int
    shared: int
    dense_mlp: int
    linear_adapter: int
    vocabulary: int
    head: int
    attention_width: int
    sizes: Sizes

    @property
    def layers(self) -> int:
        return self.moe_layers + self.dense_layers

    @property
    def packed_bytes(self) -> int:
        """All experts."""
        return self.moe_layers * self.experts * self.expert_bytes

    @property
    def plain_bytes(self) -> int:
        """All else, in bf16."""
        return 2 * (
            self.layers * self.attention + self.dense_layers * self.dense_mlp
            + self.moe_layers * (self.shared + self.hidden * self.experts) + self.vocabulary
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Elements, each counted once, as a model's name states them."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.intermediate + self.plain_bytes // 2


def read_model(path: Path, rank: int, format: str = "nvfp4") -> Model:
    """From a config.json or the folder with one: adapters of rank R on all experts and on attention's linear layers.

    ConfigError says what is missing or not understood.
    """
    layer = read_sizes(path, rank=rank, format=format, dtype=torch.bfloat16)
    file = path / "config.json" if path.is_dir() else path
    config: dict[str, Any] = json.loads(file.read_text())
    config = config.get("text_config") or config
    for name in ("num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(config.get(name), int):
            raise ConfigError(f"{file} does not give {name}")
    if layer.activation == "relu2":
        raise ConfigError(f"{file}: experts without a gate are not counted here")
    wrapped = SimpleNamespace(**config)
    wrapped.get_text_config = lambda: wrapped
    sizes = Sizes.of(wrapped)
    heads, h = config["num_attention_heads"], layer.h
    linears, width = _attention(config, h, heads)
    dense = int(config.get("first_k_dense_replace") or 0)
    tied = bool(config.get("tie_word_embeddings"))
    head = h * config["vocab_size"]
    block = get_format(format).block_size
    weights = 3 * h * layer.i
    return Model(
        name=str(config.get("name") or file.stem),
        moe_layers=config["num_hidden_layers"] - dense,
        dense_layers=dense,
        experts=layer.e,
        slots=layer.k,
        hidden=h,
        intermediate=layer.i,
        expert_bytes=weights // 2 + weights // block + 12,  # codes, scales, three global scales
        expert_adapter=layer.r * (h + 2 * layer.i + layer.i + h),
        attention=sum(n * c for n, c in linears),
        shared=3 * h * sizes.shared,
        dense_mlp=3 * h * int(config.get("intermediate_size") or 0) if dense else 0,
        linear_adapter=layer.r * sum(n + c for n, c in linears),
        vocabulary=head if tied else 2 * head,
        head=head,
        attention_width=width,
        sizes=sizes,
    )


def _attention(config: dict[str, Any], h: int, heads: int) -> tuple[list[tuple[int, int]], int]:
    """(N, C) of attention's linear layers, and heads times half of what a query and a value have together."""
    if config.get("kv_lora_rank"):
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        latent, query = config["kv_lora_rank"], config.get("q_lora_rank")
        of_query = [(query, h), (heads * (nope + rope), query)] if query else [(heads * (nope + rope), h)]
        rest = [(latent + rope, h), (heads * (nope + value), latent), (h, heads * value)]
        return of_query + rest, heads * (nope + rope + value) // 2
    size = config.get("head_dim") or h // heads
    kv = config.get("num_key_value_heads") or heads
    return [(heads * size, h), (kv * size, h), (kv * size, h), (h, heads * size)], heads * size
