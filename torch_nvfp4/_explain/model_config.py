"""The sizes of a model's MoE layers from its config.json, under the names that transformers' models use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..format import get_format
from .keys import LayerSizes

_HIDDEN = ("hidden_size",)
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


class ConfigError(ValueError):
    """What is wrong with a model's config.json, for the user to read."""


def read_sizes(path: Path, *, rank: int, format: str, dtype: torch.dtype) -> LayerSizes:
    """The MoE layer of the model whose config.json, or folder with one, is at `path`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: give a folder with a config.json, or such a file") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read as JSON ({e})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return _sizes(config.get("text_config") or config, file, rank, format, dtype)


def _sizes(config: dict[str, Any], file: Path, rank: int, format: str, dtype: torch.dtype) -> LayerSizes:
    def number(letter: str, names: tuple[str, ...]) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{file} does not give {letter} ({' or '.join(names)}): is it a mixture-of-experts model?"
            )
        return value

    h, i, e, k = (number(*pair) for pair in (("H", _HIDDEN), ("I", _INTERMEDIATE), ("E", _EXPERTS), ("K", _TOP_K)))
    if k > e:
        raise ConfigError(f"{file} chooses K = {k} of E = {e} experts")
    block = get_format(format).block_size
    if h % block or i % block:
        raise ConfigError(f"{file}: H = {h} and I = {i} must be multiples of B = {block} ({format})")
    activation, limit, bias = _activation(config, file)
    return LayerSizes(h, i, e, k, rank, activation, limit, bias, format, dtype)


def _activation(config: dict[str, Any], file: Path) -> tuple[str, float | None, bool]:
    """(activation, limit, whether the experts have biases)."""
    if config.get("model_type") == "gpt_oss":
        return "swiglu_oai", float(config.get("swiglu_limit") or 7.0), True
    name = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{file}: activation {name!r} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name], None, False
