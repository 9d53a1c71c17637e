"""The model of a packed checkpoint without memory: every tensor on the meta device, and where each is to come from."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as hf_init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import get_hf_quantizer

from .._hf.capture import install_capturing
from .._hf.load import Placement
from .._hf.quantizer import PackedQuantizer
from .._hf.save import keep_forms
from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.files import DTYPES
from ..checkpoint.layouts import FLOATS

SOURCE = "checkpoint_source"
"""The attribute of a module that holds its `Source`."""


@dataclass(frozen=True)
class Source:
    """Where a module's tensors are in a checkpoint: `path` of a packed module, `plain` by parameter and buffer name."""

    checkpoint: Checkpoint
    path: str = ""
    decoded: bool = False
    plain: dict[str, str] = field(default_factory=dict)


def empty_model(folder: str | Path, *, dtype: torch.dtype | None = None, **options: Any) -> PreTrainedModel:
    """The causal language model of a packed checkpoint with every tensor on the meta device, for `load_shards`.

    dtype: of what is not packed; None for the checkpoint's. options: as `AutoModelForCausalLM.from_config` takes them,
        such as attn_implementation.

    ValueError for a folder that is not there or whose config.json cannot be read, for a checkpoint that is not packed,
    and for tensors that transformers would have to compute from others.
    """
    if not Path(folder).is_dir():  # which transformers would look for on the hub
        raise ValueError(f"{folder} is no folder here: only a packed checkpoint in one is loaded in parts")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise ValueError(f"{folder} has no config.json that transformers can read ({str(e).splitlines()[0]})") from e
    files = sorted(str(path) for path in Path(folder).glob("*.safetensors"))
    quantizer, config, _ = get_hf_quantizer(config, None, None, True, {})
    if not isinstance(quantizer, PackedQuantizer) or not files:
        raise ValueError(f"{folder} is no folder of a packed checkpoint: only such are loaded in parts")
    dtype = dtype or config.dtype or _floating_dtype(open_checkpoint(folder))
    with torch.device("meta"), hf_init.meta_device_safe_creation_ops():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    _keep_in_fp32(model)
    quantizer.preprocess_model(model=model, dtype=model.dtype, checkpoint_files=files)
    _remember_sources(model, quantizer._checkpoint, quantizer._placement)
    install_capturing(model)
    keep_forms(model, quantizer._checkpoint, quantizer._placement.experts | quantizer._placement.linears)
    placement = quantizer._placement
    quantizer.quantization_config.outdated = bool(placement.fp8 or placement.decoded)
    del quantizer._checkpoint, quantizer._placement
    model.hf_quantizer = quantizer  # type: ignore[assignment]
    model.requires_grad_(False)
    model.tie_weights()
    return model.eval()


def _floating_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Of a checkpoint whose config does not say: that of its first plain floating tensor."""
    return next(
        (DTYPES[kind] for name in checkpoint.plain if (kind := checkpoint.dtype(name)) in FLOATS), torch.bfloat16
    )


def _keep_in_fp32(model: PreTrainedModel) -> None:
    """What the model keeps in fp32 whatever its dtype, as `from_pretrained` does."""
    plan = [(re.compile(pattern), dtype) for pattern, dtype in model._get_dtype_plan(model.dtype).items()]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype = next((dtype for pattern, dtype in plan if pattern.search(name)), None)
        if dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _remember_sources(model: PreTrainedModel, checkpoint: Checkpoint, placement: Placement) -> None:
    """Note at each module where its tensors come from, for whatever wraps it later changes its name."""
    for path, source in (placement.experts | placement.linears).items():
        module = model.get_submodule(path)
        module.__dict__[SOURCE] = Source(checkpoint, source)
        for parameter in module.parameters():
            if parameter.is_floating_point():  # a bias, which is of the model's dtype as any other plain tensor
                parameter.data = parameter.data.to(model.dtype)
    for path, source in placement.decoded.items():
        stock: nn.Module = model.get_submodule(path).__dict__["stock_module"]
        model.set_submodule(path, stock)
        stock.__dict__[SOURCE] = Source(checkpoint, source, decoded=True)
    names = _plain_names(model, checkpoint) | placement.fp8
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        leaves = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        plain = {leaf: names[prefix + leaf] for leaf in leaves if prefix + leaf in names}
        if plain and SOURCE not in module.__dict__:
            module.__dict__[SOURCE] = Source(checkpoint, plain=plain)
        elif plain:  # a packed layer's bias
            module.__dict__[SOURCE].plain.update(plain)


def _plain_names(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the model -> in the checkpoint, of tensors that are no part of a packed weight."""
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    known = model.state_dict().keys()
    names = {}
    for name in checkpoint.plain:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model.state_dict())
        if renamed in known and pattern is not None:
            raise ValueError(f"{name}: transformers makes {renamed} of several tensors; load the model whole")
        names[renamed] = name
    return names
