"""Models of transformers without weights, for whose names adapters are read."""

from collections.abc import Iterator

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .._merge.names import Skeleton, dense_layers
from ..checkpoint import Checkpoint
from .load import Names, place
from .save import renaming


def skeletons(checkpoint: Checkpoint) -> list[Skeleton]:
    """For `torch_nvfp4.merge.merge_folder`: the models that a packed checkpoint loads into, and what their modules are
    called in it. None where transformers does not know the architecture, or refuses to load it packed.
    """
    found = []
    for model in _models(checkpoint):
        try:
            placement = place(model, checkpoint)
        except ValueError:
            continue
        names, sources = Names(model), placement.experts | placement.linears | placement.decoded
        for path in dense_layers(checkpoint):
            if (module := names.module(path)) is not None:
                sources[module] = path
        found.append(Skeleton(model, sources, renaming(model)))
    return found


def _models(checkpoint: Checkpoint) -> Iterator[PreTrainedModel]:
    """Of the class that config.json names, then the causal language model; on the meta device."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return
    named = [getattr(transformers, str(name), None) for name in getattr(config, "architectures", None) or ()]
    with torch.device("meta"):
        seen = set()
        for known in named:
            if isinstance(known, type) and issubclass(known, PreTrainedModel):
                seen.add(known)
                yield known(config)
        if type(config) in AutoModelForCausalLM._model_mapping:
            model = AutoModelForCausalLM.from_config(config)
            if type(model) not in seen:
                yield model
