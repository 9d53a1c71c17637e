"""A packed checkpoint's folder -> the same weights in another layout, an expert at a time.

At most a shard and one weight are in memory (a layer's experts where the new layout keeps them in one tensor). What is
not packed to 4 bits comes out byte for byte.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..format import get_format
from .checkpoint import Checkpoint, open_checkpoint
from .declare import Declaration, hf_quant_config, plain_matrices, quantization_config, the_format
from .emit import expert_entries, linear_entries
from .errors import CheckpointError
from .folder import read_json
from .forms import Form, retarget
from .write import SHARD_BYTES, FolderWriter, Written


def convert_folder(
    source: Path, out: Path, *, layout: str, exact: bool = False, shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str], None] | None = None,
) -> Written:  # fmt: skip
    """Write the packed checkpoint in folder `source` to `out` in another layout; codes and block scales only move.

    layout: "modelopt", "compressed-tensors", or "mxfp4" (gpt-oss's own, for its MXFP4 experts).
    exact: refuse, before anything is written, a checkpoint whose result would count as `inexact`.
    CheckpointError for a folder that cannot be read, holds nothing packed or has that layout already, and for weights
    that the layout cannot hold.
    """
    return convert_checkpoint(open_checkpoint(source), out, layout, exact, shard_bytes, progress)


def convert_checkpoint(
    checkpoint: Checkpoint, out: Path, layout: str, exact: bool, shard_bytes: int,
    progress: Callable[[str], None] | None,
) -> Written:  # fmt: skip
    """`convert_folder` of an opened checkpoint, whose weights need not be those of its files."""
    source, format = checkpoint.folder, _check(checkpoint, layout)
    inexact, forms = 0, {}
    for path in (*checkpoint.experts, *checkpoint.linears):
        form = forms[path] = retarget(path, checkpoint.form(path), layout, format, checkpoint.config)
        if form.inexact and exact:
            kept = "divisor" if form.names.divisor else "multiplier"
            raise CheckpointError(
                f"{source}: {path}: {form.inexact} of its scales have no exact {kept}, as {layout} wants"
            )
        inexact += form.inexact
    with FolderWriter(out, shard_bytes) as writer:
        try:
            for name, tensor in _tensors(checkpoint, forms, progress):
                writer.add(name, tensor)
        except CheckpointError as error:  # of a reader, which names its file, or of what the new layout cannot hold
            raise error if str(source) in str(error) else CheckpointError(f"{source}: {error}") from None
        quantization = _quantization(checkpoint, forms, layout, format)
        config = without_quantization(checkpoint.config) | {"quantization_config": quantization}
        hf_quant = hf_quant_config(quantization, get_format(format).block_size)
        writer.finish({"config.json": config, "hf_quant_config.json": hf_quant}, source)
    weights = sum(len(forms[path].stems(path, entry.num_experts)) for path, entry in checkpoint.experts.items())
    return Written(weights + len(checkpoint.linears), inexact)


def _check(checkpoint: Checkpoint, layout: str) -> str:
    """The format of all packed weights."""
    formats = {entry.format for entry in checkpoint.experts.values()}
    formats |= {entry.format for entry in checkpoint.linears.values()}
    if not formats:
        raise CheckpointError(f"{checkpoint.folder}: holds no packed weights")
    if checkpoint.layout == layout:
        raise CheckpointError(f"{checkpoint.folder}: has the layout {layout} already")
    for entry in checkpoint.fp8.values():
        for name in entry.tensors:
            if name != entry.weight and (name.endswith("_inv") or math.prod(checkpoint.shape(name)) != 1):
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor {name!r}: FP8 layers are kept as they are, and only those with one "
                    "scale are the same in both layouts"
                )
    return the_format(f"{checkpoint.folder}:", formats)


def _tensors(
    checkpoint: Checkpoint, forms: dict[str, Form], progress: Callable[[str], None] | None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new folder, in the order of the old one."""
    for name, packed in checkpoint.walk(progress):
        if not packed:
            yield name, checkpoint.load_stored(name)
        elif name in checkpoint.experts:
            yield from expert_entries(name, forms[name], checkpoint.iterate_experts(name))
        else:
            yield from linear_entries(name, forms[name], checkpoint.load_linear(name))


def _quantization(checkpoint: Checkpoint, forms: dict[str, Form], layout: str, format: str) -> dict[str, Any]:
    return quantization_config(
        Declaration(
            layout,
            get_format(format),
            plain_matrices((name, len(checkpoint.shape(name))) for name in checkpoint.plain),
            activations=any(form.input_scales is not None for form in forms.values()),
            fp8=[entry.path for entry in checkpoint.fp8.values()],
            packed=[
                *(stem for path, e in checkpoint.experts.items() for stem in forms[path].stems(path, e.num_experts)),
                *checkpoint.linears,
            ],
            kv_cache=_has_fp8_cache(checkpoint),
        )
    )


def _has_fp8_cache(checkpoint: Checkpoint) -> bool:
    details = read_json(checkpoint.folder, "hf_quant_config.json").get("quantization") or {}
    sources = (checkpoint.config, checkpoint.config.get("text_config") or {})
    declared = [source.get("quantization_config") or {} for source in sources]
    return details.get("kv_cache_quant_algo") == "FP8" or any(each.get("kv_cache_scheme") for each in declared)


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json without `quantization_config`."""
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return kept
