"""A fine-tune's settings in a YAML file, by the names of the flags; the run folder holds one, all values resolved."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, flag, one_line

FILE_NAME = "config.yaml"

# What other trainers call a setting; a likeness of spelling would lead elsewhere.
ELSEWHERE = {
    "base_model": "model",
    "model_name_or_path": "model",
    "datasets": "dataset",
    "test_datasets": "eval_dataset",
    "val_set_size": "eval_fraction",
    "chat_template_jinja": "chat_template",
    "output_dir": "output",
    "train_on_inputs": "train_on",
    "sample_packing": "pack",
    "packing": "pack",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lora_target_modules": "targets",
    "lora_target_parameters": "targets",
    "peft_use_rslora": "rslora",
    "learning_rate": "lr",
    "max_steps": "steps",
    "num_epochs": "steps",
    "micro_batch_size": "batch",
    "per_device_train_batch_size": "batch",
    "sequence_len": "seq_len",
    "gradient_accumulation_steps": "grad_accum",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "max_grad_norm": "clip",
    "bf16": "dtype",
    "optimizer": "optim",
    "torch_compile": "compile",
    "fsdp_config": "fsdp",
    "dp_shard_size": "fsdp",
    "expert_parallel_size": "ep",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep",
    "resume_from_checkpoint": "resume",
}


def resolve(file: Path | None, flags: Mapping[str, Any]) -> FinetuneConfig:
    """The settings: what a flag says, else what the file says, else the default.

    Args:
        file: what --config names, if anything.
        flags: by field; None where the command line says nothing.

    Raises:
        FinetuneError: the file cannot be read, or a setting in it is unknown or of the wrong kind.
    """
    settings = {} if file is None else read(file)
    settings |= {name: value for name, value in flags.items() if value is not None}
    for name in ("model", "output"):
        if name not in settings:
            raise FinetuneError(f"Missing option '{flag(name)}'. (see torch-nvfp4 --help)")
    return FinetuneConfig(**settings)


def read(file: Path) -> dict[str, Any]:
    """The settings in a YAML file, as the values that FinetuneConfig takes; names with - or with _."""
    result: dict[str, Any] = {}
    for key, value in _mapping(file).items():
        name = str(key).replace("-", "_")
        if name not in _kinds():
            raise FinetuneError(f"{file}: there is no setting {key!r}: the closest flag is {flag(_closest(name))}")
        if name in result:
            raise FinetuneError(f"{file}: {key!r} is there twice: delete one")
        if name == "compile" and isinstance(value, bool):  # for YAML 1.1, on and off are booleans
            value = "on" if value else "off"
        try:
            result[name] = _convert(_kinds()[name], value)
        except (TypeError, ValueError, OverflowError):
            raise FinetuneError(f"{file}: {key} is {value!r}: give {_wanted(_kinds()[name], value)}") from None
    return result


def write(config: FinetuneConfig, file: Path) -> None:
    """Write every setting; `read` gives the same ones back."""
    settings = {f.name: _plain(getattr(config, f.name)) for f in fields(config)}
    file.write_text(load_yaml().safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _mapping(file: Path) -> dict[Any, Any]:
    yaml = load_yaml()
    try:
        text = file.read_text(encoding="utf-8-sig")
        _refuse_repeats(file, yaml.compose(text, Loader=yaml.SafeLoader))
        content = yaml.safe_load(text)
    except OSError as e:
        raise FinetuneError(f"{file} cannot be read ({e.strerror}): check the path given to --config") from None
    except (yaml.YAMLError, ValueError) as e:
        raise FinetuneError(f"{file} is not YAML ({one_line(e)}): mend it") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise FinetuneError(f"{file} holds no settings: write one a line, such as `rank: 16`")
    return content


def _refuse_repeats(file: Path, node: Any) -> None:
    """YAML forbids a key twice; PyYAML takes the last in silence."""
    seen = set()
    for key, _ in node.value if node is not None and node.id == "mapping" else ():
        if key.value in seen:
            raise FinetuneError(f"{file}: {key.value!r} is there twice: delete one")
        seen.add(str(key.value))


def _closest(name: str) -> str:
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    return difflib.get_close_matches(name, _kinds(), n=1, cutoff=0.0)[0]


@cache
def _kinds() -> dict[str, Any]:
    """The type of every setting."""
    types = get_type_hints(FinetuneConfig)
    return {f.name: types[f.name] for f in fields(FinetuneConfig)}


def _convert(kind: Any, value: Any) -> Any:
    """A YAML value as a setting of a kind. Raises ValueError or TypeError if it is none."""
    if kind in (tuple[Path, ...], tuple[str, ...]):
        items = value.split(",") if isinstance(value, str) and kind == tuple[str, ...] else value
        items = [items] if isinstance(items, str) else items
        item_kind = Path if kind == tuple[Path, ...] else str
        if not isinstance(items, list):
            raise TypeError
        return tuple(_convert(item_kind, item) for item in items)
    if kind == Path | None:
        return None if value is None else _convert(Path, value)
    if kind in (str, Path):
        if not isinstance(value, str):
            raise TypeError
        return kind(value.strip() if kind is str else value)
    if kind is float and not isinstance(value, bool):
        return float(value)  # a string too: for YAML 1.1, 2e-4 is one
    if type(value) is not kind:
        raise TypeError
    return value


def _wanted(kind: Any, value: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path | None: "a path",
        tuple[Path, ...]: "a path, or a list of paths",
        tuple[str, ...]: "a text, or a list of texts",
    }
    quotes = kind is str and value is not None  # a bare `no` is a boolean, a bare 3 a number
    return words[kind] + (" (in quotes: YAML reads it as something else)" if quotes else "")


def load_yaml() -> Any:
    """PyYAML; FinetuneError where it is not installed."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise FinetuneError("PyYAML is not installed: pip install 'torch-nvfp4[demo]'") from None
    return yaml
