"""Adapter files: written so that a reader never meets a mixture of two saves, read strictly."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def write_adapter(directory: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write both files by rename.

    With an unchanged config only the weights are exchanged, in one step. With another one the old config
    goes first and the new one comes last, so that between the two there is no loadable adapter.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    weights, config_file = directory / WEIGHTS, directory / CONFIG
    staged_weights, staged_config = (p.with_name(f".{p.name}.{os.getpid()}") for p in (weights, config_file))
    try:
        save_file(dict(state), staged_weights, metadata={"format": "pt"})
        staged_config.write_text(text)
        _sync(staged_weights)
        _sync(staged_config)
        if weights.exists() and config_file.exists() and config_file.read_text() != text:
            config_file.unlink()
        os.replace(staged_weights, weights)
        os.replace(staged_config, config_file)
    finally:
        staged_weights.unlink(missing_ok=True)
        staged_config.unlink(missing_ok=True)
    _sync(directory)


def read_adapter(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config of an adapter directory; ValueError says what is missing or damaged."""
    if directory.is_file():
        raise ValueError(f"{directory} is a file: give the adapter's folder, {directory.parent}")
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}: not an adapter, or its saving was interrupted")
    try:
        config = json.loads((directory / CONFIG).read_text())
        state = load_file(directory / WEIGHTS)
    except (ValueError, safetensors.SafetensorError) as error:  # no JSON, or no UTF-8
        raise ValueError(f"{directory} holds a damaged adapter: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{directory / CONFIG} must hold a JSON object of LoRA settings, got {type(config).__name__}")
    return state, config


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
