"""transformers' quantizer for checkpoints that are packed already: `from_pretrained` gives packed modules."""

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .._lora.sharded import refuse_share
from .._lora.sites import adapted_sites
from ..checkpoint import open_checkpoint
from ..nn import NVFP4Experts, NVFP4Linear
from .capture import install_capturing
from .convert import dequantize_experts
from .load import fill, place, stock_linear
from .save import keep_forms, state_dict_of

METHOD = "torch_nvfp4"
_FORMATS_OF_COMPRESSED_TENSORS = {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}


@register_quantization_config("modelopt")
class PackedConfig(QuantizationConfigMixin):
    """A checkpoint's `quantization_config`, kept as its file declares it.

    What is packed, and how, is read from the tensors. `from_pretrained(folder, quantization_config=PackedConfig())`
    loads a checkpoint whose config.json does not declare it (older ModelOpt exports: hf_quant_config.json alone).
    """

    def __init__(self, **declared: Any) -> None:
        self.quant_method: Any = METHOD
        self.declared = declared
        self.outdated = False  # once something that it declares was decoded, or is no part of the model

    def to_dict(self) -> dict[str, Any]:
        return dict(self.declared)


@register_quantizer(METHOD)
@register_quantizer("modelopt")
class PackedQuantizer(HfQuantizer):
    """Places packed modules before transformers loads the plain tensors, and fills them afterwards."""

    quantization_config: PackedConfig
    requires_calibration = False  # True would refuse a checkpoint that only the caller declares

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # What is left for transformers to load is plain: cast to the model's dtype, renamed or not (5.17 does neither
        # for a quantised checkpoint's renamed tensors).
        self.pre_quantized = False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ValueError("device_map offloads to disk: packed weights must lie on the device that runs them")

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("packed weights are read from a checkpoint's files; a state_dict alone does not do")
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "transformers' parallel plans (tp_plan, distributed_config) shard dense experts, not packed ones: load "
                "the model whole"
            )
        self._checkpoint = open_checkpoint(Path(checkpoint_files[0]).parent)
        self._placement = place(model, self._checkpoint)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """What `device_map="auto"` plans with: the tensors' own sizes, but of those that are decoded the final ones."""
        path, _, leaf = param_name.rpartition(".")
        if path in self._placement.decoded and leaf.startswith("weight_"):
            return 2 * model.dtype.itemsize if leaf == "weight_codes" else 0
        return param.element_size()

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        checkpoint, placement = self._checkpoint, self._placement
        fill(model, checkpoint, placement)
        install_capturing(model)
        keep_forms(model, checkpoint, placement.experts | placement.linears)
        of_cache = any(name.endswith((".k_scale", ".v_scale")) for name in checkpoint.plain)
        self.quantization_config.outdated = bool(placement.fp8 or placement.decoded or of_cache)
        del self._checkpoint, self._placement

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        if any(isinstance(module, NVFP4Experts) for module in model.modules()):
            dequantize_experts(model)
        for path, module in list(model.named_modules()):
            if isinstance(module, NVFP4Linear):
                model.set_submodule(path, stock_linear(module, dtype or model.dtype))
        return model

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What `save_pretrained` writes: the packed weights as their checkpoint had them. Adapters it saves itself."""
        if getattr(model, "_hf_peft_config_loaded", False):
            refuse_share(model)
            return None, {}
        return state_dict_of(model), {}

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _saving_what_was_packed_here(save: Callable[..., None]) -> Callable[..., None]:
    """`save_pretrained` of a model that was packed after loading: for the time of the call it has the quantizer.

    Not longer, because transformers treats a model that has one otherwise. Adapters of `add_lora` stay in the file, as
    trainers save them to resume, and the quantizer would refuse.
    """

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        packed = any(isinstance(module, NVFP4Experts | NVFP4Linear) for module in self.modules())
        if not packed or getattr(self, "hf_quantizer", None) is not None:
            return save(self, *args, **kwargs)
        if adapted_sites(self):
            warnings.warn(
                "packed weights with adapters of add_lora are saved as this model's state_dict, which load_state_dict "
                "reads and from_pretrained does not: save the adapters with save_adapter, and the base, without them, "
                "with torch_nvfp4.hf.save_packed",
                stacklevel=2,
            )
            return save(self, *args, **kwargs)
        before = {name: value for name, value in vars(self.config).items() if name == "quantization_config"}
        self.config.quantization_config = PackedConfig()
        self.hf_quantizer = PackedQuantizer(self.config.quantization_config)
        try:
            return save(self, *args, **kwargs)
        finally:
            del self.hf_quantizer, self.config.quantization_config
            vars(self.config).update(before)

    return save_pretrained


def _is_packed(declared: Mapping[str, Any]) -> bool:
    groups = (declared.get("config_groups") or {}).values()
    formats = [declared.get("format"), *(group.get("format") for group in groups if isinstance(group, Mapping))]
    return not _FORMATS_OF_COMPRESSED_TENSORS.isdisjoint(formats)


# The methods that transformers has a loader for, and which of their checkpoints are taken from it.
_TAKEN: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "compressed-tensors": _is_packed,
    "mxfp4": lambda _: True,
    "fp8": lambda declared: declared.get("expert_dtype") == "fp4",
}
_STOCK = {method: AUTO_QUANTIZATION_CONFIG_MAPPING[method] for method in _TAKEN}


def pack_on_load(quant_method: str, enabled: bool = True) -> None:
    """Say who loads checkpoints of a method that transformers knows too, from the next `from_pretrained` on.

    quant_method: "compressed-tensors" (its 4-bit float formats alone; on from the start, because transformers loads
        NVFP4 experts of that method without their global scales), "mxfp4" (gpt-oss) or "fp8" (DeepSeek-V4, whose
        experts are MXFP4; its FP8 layers are decoded); these two are off from the start.
    """
    if quant_method not in _TAKEN:
        raise ValueError(f"quant_method must be one of {', '.join(_TAKEN)}, got {quant_method!r}")
    stock = _STOCK[quant_method]
    AUTO_QUANTIZATION_CONFIG_MAPPING[quant_method] = _choice(stock, _TAKEN[quant_method]) if enabled else stock


def _choice(stock: Any, taken: Callable[[Mapping[str, Any]], bool]) -> type:
    """The stock config class, but reading a config gives a `PackedConfig` for what is taken."""

    class Choice(stock):
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            target = PackedConfig if taken(config_dict) else stock
            return target.from_dict(config_dict, *args, **kwargs)

    Choice.__name__ = Choice.__qualname__ = stock.__name__
    return Choice


pack_on_load("compressed-tensors")
_stock: Any = PreTrainedModel
_stock.save_pretrained = _saving_what_was_packed_here(PreTrainedModel.save_pretrained)
