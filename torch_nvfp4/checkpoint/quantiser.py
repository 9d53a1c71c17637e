"""Who quantised a checkpoint, as its configs declare, and whether the tensors are of that hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .files import TensorInfo
from .layouts import Packed, is_quantised

KNOWN = ("modelopt", "compressed-tensors", "mxfp4", "fp8")
_NESTED = ("config_groups", "weights")


def check_quantiser(
    folder: Path, config: Mapping[str, Any], hf_quant: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> str | None:
    """The declared quantiser of a checkpoint with quantised tensors, None for one without any.

    CheckpointError if it is not one whose numbers are known: the same bytes mean other weights to another one.
    """
    some = next((info for info in tensors.values() if is_quantised(info)), None)
    if some is None:
        return None
    declared, method = _declared(folder, config, hf_quant)
    if method not in KNOWN:
        what = "no quantization_config says who wrote them" if method is None else f"quant_method is {method!r}"
        raise CheckpointError(
            f"{folder / 'config.json'}: {what}; the packed tensors ({some}) can be read for {', '.join(KNOWN)} only"
        )
    if declared.get("transform_config"):
        raise CheckpointError(
            f"{folder / 'config.json'}: transform_config is set: rotated weights ({some}) are not supported"
        )
    return method


def _declared(
    folder: Path, config: Mapping[str, Any], hf_quant: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str | None]:
    text = config.get("text_config")
    for source in (config, text):
        declared = source.get("quantization_config") if isinstance(source, Mapping) else None
        if declared is not None:
            method = declared.get("quant_method") if isinstance(declared, Mapping) else None
            if not isinstance(method, str):
                raise CheckpointError(f"{folder / 'config.json'}: quantization_config has no quant_method")
            return declared, method
    producer = hf_quant.get("producer")
    name = producer.get("name") if isinstance(producer, Mapping) else None
    return {}, name if isinstance(name, str) else None


def group_sizes(config: Mapping[str, Any], hf_quant: Mapping[str, Any]) -> set[int]:
    """Every number of weights to a scale that the configs name, of whichever layers."""
    sizes = (source.get("group_size") for source in _declarations(config, hf_quant))
    return {size for size in sizes if type(size) is int}


def takes_8_bits(config: Mapping[str, Any], hf_quant: Mapping[str, Any]) -> bool:
    """Whether a 4-bit layer is declared with 8-bit activations, whose calibrated scales are another format's."""
    for source in _declarations(config, hf_quant):
        parts = source.get("weights"), source.get("input_activations")
        bits = [part.get("num_bits") if isinstance(part, Mapping) else None for part in parts]
        if bits == [4, 8] or str(source.get("quant_algo")).startswith("W4A8"):
            return True
    return False


def _declarations(config: Mapping[str, Any], hf_quant: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every mapping of the configs that says how layers are quantised."""
    text = config.get("text_config")
    sources = [config.get("quantization_config"), hf_quant.get("quantization")]
    sources += [text.get("quantization_config")] if isinstance(text, Mapping) else []
    while sources:
        source = sources.pop()
        if isinstance(source, Mapping):
            yield source
            sources += [value for key, value in source.items() if key in _NESTED or key.startswith("group_")]
            sources += source.get("quantized_layers", {}).values() if _is_map(source.get("quantized_layers")) else []


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def check_convention(folder: Path, method: str | None, packed: Mapping[str, Packed]) -> None:
    """CheckpointError for a weight under the names of another quantiser than the declared one."""
    for weight in packed.values():
        if weight.names.convention != method:
            raise CheckpointError(
                f"{weight.codes.file.path}: tensor {weight.codes} is named as {weight.names.convention} does it, "
                f"{folder / 'config.json'} declares {method}"
            )
