"""A model with packed modules -> a checkpoint's folder, a layer at a time."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..format import get_format
from ..nn import PROJECTIONS, NVFP4Experts, NVFP4Linear
from .declare import Declaration, hf_quant_config, plain_matrices, quantization_config, the_format
from .emit import Named, expert_entries, linear_entries, multipliers_of, stored_scales
from .entries import PackedExperts, PackedWeight
from .errors import CheckpointError
from .forms import Form, default_roles, numbered_form, retarget
from .scalars import Numbers
from .write import SHARD_BYTES, FolderWriter, Written

FORM = "checkpoint_form"
"""The attribute of a packed module that was loaded from a checkpoint: the `Form` that it had there."""


@dataclass(frozen=True)
class Naming:
    """What a model's framework knows of its checkpoints. By default names are those of the modules.

    plain: all that is not packed, under the names that it has in files; None for what the state_dict has.
    rename: the tensors of a packed module, named by its path in the model -> named as in files.
    forms: of packed modules that were not loaded from a checkpoint, by path.
    documents: JSON files to write beside the weights.
    """

    plain: Mapping[str, Tensor] | None = None
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    forms: Mapping[str, Form] = field(default_factory=dict)
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedModules:
    """A model's packed modules by path, their layout and format, and the form of each in that layout."""

    modules: Mapping[str, NVFP4Experts | NVFP4Linear]
    forms: Mapping[str, Form]
    layout: str
    format: str
    inexact: int

    def entries(self, path: str) -> Named:
        """The tensors of a module, named by its path."""
        weights, form = _weights(self.modules[path]), self.forms[path]
        if isinstance(weights, PackedExperts):
            return expert_entries(path, form, [weights])
        return linear_entries(path, form, weights)

    def plain(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state_dict without them. The bias of a packed dense layer is plain, those of experts are not."""
        packed = {f"{path}." for path, module in self.modules.items() if isinstance(module, NVFP4Experts)}
        packed |= {f"{path}.weight_" for path, module in self.modules.items() if isinstance(module, NVFP4Linear)}
        begins = tuple(packed)
        return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(begins)}


def save_packed(
    model: nn.Module, folder: str | Path, *, config: Mapping[str, Any], layout: str | None = None,
    naming: Naming | None = None, shard_bytes: int = SHARD_BYTES,
) -> Written:  # fmt: skip
    """Write the model to a new folder, its packed modules as they are: no weight is decoded or rounded.

    config: the model's config.json. Its `quantization_config` is kept if it is of the layout, else replaced.
    layout: "modelopt", "compressed-tensors", or "mxfp4" (gpt-oss's own, for MXFP4 experts). None: that of the
        checkpoint that the packed modules were loaded from, "modelopt" if they were not.
    shard_bytes: the most that a file holds.
    CheckpointError for a model without packed modules, with adapters (they have files of their own), or with weights
    that the layout cannot hold as they are, and for a folder that exists and is not empty. It has its name only when it
    is whole. UserWarning where packed modules compute otherwise than they will when loaded.
    """
    naming = naming or Naming()
    packed = find_packed(model, layout, config, naming.forms)
    tell_of_numerics(packed)
    plain = packed.plain(model) if naming.plain is None else naming.plain
    with FolderWriter(Path(folder), shard_bytes) as writer:
        for path in packed.modules:
            for name, tensor in naming.rename(dict(packed.entries(path))).items():
                writer.add(name, tensor)
        for name, tensor in plain.items():
            writer.add(name, tensor)
        declared = declare_packed(packed, config.get("quantization_config"), plain)
        hf_quant = hf_quant_config(declared, get_format(packed.format).block_size)
        documents = {**naming.documents, "config.json": {**config, "quantization_config": declared}}
        writer.finish(documents | {"hf_quant_config.json": hf_quant}, None)
    weights = sum(len(form.stems(path, _count(packed.modules[path]))) for path, form in packed.forms.items())
    return Written(weights, packed.inexact)


def find_packed(
    model: nn.Module, layout: str | None, config: Mapping[str, Any], forms: Mapping[str, Form]
) -> PackedModules:
    """The packed modules and their forms in a layout (None: where they came from); CheckpointError as `save_packed`."""
    modules = {path: m for path, m in model.named_modules() if isinstance(m, NVFP4Experts | NVFP4Linear)}
    if not modules:
        raise CheckpointError(f"{type(model).__name__} has no packed modules")
    _refuse_adapters(model)
    for path, module in modules.items():
        if hasattr(module, "share"):  # also within whole_adapters, which has the adapters alone whole
            raise CheckpointError(f"{path} holds this rank's share of the experts: save the model before it is split")
        if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
            raise CheckpointError(f"{path} is sharded over devices: gather the model on one first")
    format = the_format(type(model).__name__, {module.format for module in modules.values()})
    sources = {path: _form_before(module, forms.get(path)) for path, module in modules.items()}
    loaded = {form.names.convention for path, form in sources.items() if FORM in modules[path].__dict__}
    if layout is None and len(loaded) > 1:
        raise CheckpointError(f"its weights come from checkpoints of {' and '.join(sorted(loaded))}: name the layout")
    layout = layout or next(iter(loaded), "modelopt")
    for path, form in sources.items():
        if form.names.convention != layout:  # what is in memory counts, not where the source had it from
            sources[path] = replace(form, global_scales=None)
    targets = {path: retarget(path, form, layout, format, config) for path, form in sources.items()}
    inexact = sum(_count_inexact(_weights(module), targets[path]) for path, module in modules.items())
    return PackedModules(modules, targets, layout, format, inexact)


def tell_of_numerics(packed: PackedModules) -> None:
    """Warn of settings that are not the defaults (see `set_numerics`): no packed checkpoint holds them."""
    changed = [module for module in packed.modules.values() if module._unusual_numerics()]
    if not changed:
        return
    words = dict.fromkeys(word for module in changed for word in module._unusual_numerics())
    modes = sorted({module.compute for module in changed} - {"w4a16"})
    again = [f'compute="{mode}"' for mode in modes]
    again += ["merge_aware=True"] if any(module.merge_aware for module in changed) else []
    then = ", then torch_nvfp4.checkpoint.use_input_scales(model)" if "calibrated" in words else ""
    warnings.warn(
        f"{len(changed)} of {len(packed.modules)} packed modules compute {', '.join(words)}, which a packed checkpoint "
        "does not hold: loaded again they are w4a16 and not merge-aware. After loading call "
        f"torch_nvfp4.set_numerics(model, {', '.join(again)}){then}",
        stacklevel=3,
    )


def declare_packed(packed: PackedModules, declared: Any, plain: Mapping[str, Tensor]) -> dict[str, Any]:
    """The model's `quantization_config`: the declared one if it is of this layout, else a new one.

    plain: names in files, for the list of what is not packed.
    """
    if isinstance(declared, Mapping) and declared.get("quant_method") == packed.layout:
        return dict(declared)
    ignore = plain_matrices((name, tensor.dim()) for name, tensor in plain.items())
    activations = any(form.input_scales is not None for form in packed.forms.values())
    return quantization_config(Declaration(packed.layout, get_format(packed.format), ignore, activations))


def _refuse_adapters(model: nn.Module) -> None:
    for name, _ in model.named_parameters():
        if any(part.startswith("lora_") or part == "base_layer" or "_lora_" in part for part in name.split(".")):
            raise CheckpointError(
                f"{name} belongs to an adapter, which packed checkpoints do not hold: save it by itself, and remove it"
            )


def _form_before(module: nn.Module, told: Form | None) -> Form:
    """The form that a module was loaded in; else the one that is told, or the usual one."""
    if FORM in module.__dict__:
        return module.__dict__[FORM]
    if isinstance(module, NVFP4Linear):
        return numbered_form(())
    return told or numbered_form(default_roles(bool(module.gated)))


def _count(module: NVFP4Experts | NVFP4Linear) -> int:
    return module.num_experts if isinstance(module, NVFP4Experts) else 1


def _weights(module: NVFP4Experts | NVFP4Linear) -> PackedExperts | PackedWeight:
    if isinstance(module, NVFP4Linear):
        return PackedWeight(*module.packed())
    gate_up, down = (PackedWeight(*module.packed(projection)) for projection in PROJECTIONS)
    biases: Any = (module.gate_up_bias, module.down_bias)
    return PackedExperts(gate_up, down, *biases)


def _count_inexact(weights: PackedExperts | PackedWeight, form: Form) -> int:
    """How many global scales, and input scales of the source, will be read as others than these."""
    multipliers = multipliers_of(weights)
    stored = stored_scales(form, multipliers)
    if multipliers is None or stored is None:
        return form.inexact
    return replace(form, global_scales=Numbers(stored, form.names.divisor, multipliers)).inexact
