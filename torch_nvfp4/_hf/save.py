"""Packed models of transformers as checkpoints: under the names that their files have, and with their configs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from .. import checkpoint as packed_checkpoint
from .._lora.sites import stock_layout_of
from ..checkpoint import Checkpoint, Written
from ..checkpoint.forms import Form, default_roles, numbered_form
from ..checkpoint.save import FORM, Naming, declare_packed, find_packed, tell_of_numerics
from ..checkpoint.write import SHARD_BYTES
from ..nn import NVFP4Experts

_NUMBERED = re.compile(r".*\.experts\.0\.(\w+)\.weight", re.DOTALL)


def save_packed(
    model: PreTrainedModel, folder: str | Path, *, layout: str | None = None, shard_bytes: int = SHARD_BYTES
) -> Written:
    """Write a model with packed experts as a checkpoint that loads again, here and in the layout's own tools.

    Unlike `save_pretrained` it goes layer by layer, gives the folder its name only when it is whole, and lets choose
    the layout: "modelopt", "compressed-tensors" or "mxfp4" (gpt-oss's own, for MXFP4 experts); None for the one that
    the model was loaded from, "modelopt" if it was packed here.
    CheckpointError as `torch_nvfp4.checkpoint.save_packed`, among others for a model with adapters. UserWarning
    where packed modules compute otherwise than they will when loaded.
    """
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    documents = {}
    if model.can_generate() and model.generation_config is not None:
        documents["generation_config.json"] = json.loads(model.generation_config.to_json_string())
    config = json.loads(model.config.to_json_string()) | {"quantization_config": _declared(model)}
    rename = renaming(model)
    forms = _stock_forms(model, rename)
    plain = find_packed(model, layout, config, forms).plain(model)
    plain = rename(remove_tied_weights_from_state_dict(plain, model))
    naming = Naming(plain, rename, forms, documents)
    return packed_checkpoint.save_packed(
        model, folder, config=config, layout=layout, naming=naming, shard_bytes=shard_bytes
    )


def state_dict_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `save_pretrained` is to write, before it turns the model's names into those of files.

    The model's config then declares what is written. Packed weights are copied, to the CPU: transformers would clone
    parts of one tensor where they are. UserWarning as `save_packed`.
    """
    rename = renaming(model)
    packed = find_packed(model, None, model.config.to_dict(), _stock_forms(model, rename))
    tell_of_numerics(packed)
    state = packed.plain(model)
    quantization: Any = model.config.quantization_config
    quantization.declared = declare_packed(packed, _declared(model), rename(state))
    quantization.outdated = False
    for path in packed.modules:
        state |= {name: tensor.to("cpu", copy=True) for name, tensor in packed.entries(path)}
    return state


def _declared(model: PreTrainedModel) -> dict[str, Any] | None:
    """The `quantization_config` that the model came with, if it still holds."""
    quantization: Any = getattr(model.config, "quantization_config", None)
    return None if quantization is None or quantization.outdated else quantization.to_dict()


def keep_forms(model: nn.Module, checkpoint: Checkpoint, sources: dict[str, str]) -> None:
    """Note at each packed module how its checkpoint keeps it; `sources`: path in the model -> in the checkpoint."""
    for path, source in sources.items():
        model.get_submodule(path).__dict__[FORM] = checkpoint.form(source)


def renaming(model: PreTrainedModel) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """The model's tensors -> what transformers writes into files for them."""
    return lambda named: dict(revert_weight_conversion(model, named))


def _stock_forms(model: PreTrainedModel, rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, Form]:
    """The forms of experts that were packed here: the projections are called as in the dense model's files.

    Transformers tells the names by splitting a tensor in which each half of each expert is its own number.
    """
    forms = {}
    for path, module in model.named_modules():
        if isinstance(module, NVFP4Experts) and FORM not in module.__dict__:
            layout, halves = stock_layout_of(module), 2 if module.gated else 1
            tags = torch.arange(module.num_experts * halves).view(-1, halves, 1)
            probe = {f"{path}.{layout.gate_up_name}": tags, f"{path}.{layout.down_name}": tags[:, :1] + tags.numel()}
            found = {int(value): match[1] for name, value in rename(probe).items()
                     if value.numel() == 1 and (match := _NUMBERED.fullmatch(name))}  # fmt: skip
            roles = tuple(found[number] for number in sorted(found))
            forms[path] = numbered_form(roles if len(roles) == halves + 1 else default_roles(module.gated))
    return forms
