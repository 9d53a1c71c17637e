"""What a packed model's configs declare: config.json's `quantization_config`, and ModelOpt's hf_quant_config.json."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..format import NVFP4, Format
from .errors import CheckpointError

_MODELOPT = {"name": "modelopt", "version": "torch_nvfp4"}


@dataclass(frozen=True)
class Declaration:
    """What there is to declare.

    layout: "modelopt", "compressed-tensors" or "mxfp4". ignore: paths of the matrices that are not quantised.
    activations: whether there are static scales of activations (W4A4). fp8: paths of FP8 layers, packed: of the others,
    which ModelOpt lists one by one where both are there. kv_cache: whether the cache is FP8.
    """

    layout: str
    format: Format
    ignore: Collection[str]
    activations: bool = False
    fp8: Collection[str] = ()
    packed: Collection[str] = ()
    kv_cache: bool = False


def the_format(holder: str, formats: set[str]) -> str:
    """The only one of these formats; CheckpointError, which begins with `holder`, where they are several."""
    if len(formats) > 1:
        raise CheckpointError(f"{holder} holds {' and '.join(sorted(formats))}; no layout declares both")
    (format,) = formats
    return format


def plain_matrices(dims: Iterable[tuple[str, int]]) -> list[str]:
    """Of plain tensors (name, number of dims) the paths that `ignore` lists name: those of matrices."""
    return sorted(name.removesuffix(".weight") for name, dim in dims if dim == 2 and name.endswith(".weight"))


def quantization_config(declared: Declaration) -> dict[str, Any]:
    """config.json's `quantization_config`, in the words of the layout's tool."""
    make = {"compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "mxfp4": _mxfp4}
    return {"quant_method": declared.layout} | make[declared.layout](declared)


def hf_quant_config(quantization: Mapping[str, Any], block_size: int) -> dict[str, Any] | None:
    """ModelOpt's file that says the same as a `quantization_config` of its method; None for other methods."""
    if quantization.get("quant_method") != "modelopt":
        return None
    details = {
        "quant_algo": quantization.get("quant_algo"),
        "kv_cache_quant_algo": "FP8" if quantization.get("kv_cache_scheme") else None,
        "group_size": block_size,
        "exclude_modules": list(quantization.get("ignore") or ()),
    }
    if layers := quantization.get("quantized_layers"):
        details["quantized_layers"] = layers
    return {"producer": quantization.get("producer") or _MODELOPT, "quantization": details}


def _numbers(fmt: Format) -> dict[str, Any]:
    return {"num_bits": 4, "type": "float", "group_size": fmt.block_size, "dynamic": False}


def _compressed_tensors(declared: Declaration) -> dict[str, Any]:
    nvfp4 = declared.format is NVFP4
    pack = f"{declared.format.name}-pack-quantized"
    shared = _numbers(declared.format) | {"symmetric": True, "strategy": "tensor_group" if nvfp4 else "group"}
    weights = shared | {"scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8"}
    activations = shared | {"dynamic": "local"} if declared.activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    groups: dict[str, Any] = {"group_0": group}
    eight = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    if declared.fp8:
        groups = {"group_0": group | {"format": pack}, "group_1": {
            "targets": sorted(declared.fp8), "weights": eight, "input_activations": eight, "output_activations": None,
            "format": "float-quantized",
        }}  # fmt: skip
    return {
        "format": "mixed-precision" if declared.fp8 else pack, "quantization_status": "compressed",
        "config_groups": groups, "ignore": list(declared.ignore),
        "kv_cache_scheme": eight if declared.kv_cache else None,
    }  # fmt: skip


def _modelopt(declared: Declaration) -> dict[str, Any]:
    numbers = _numbers(declared.format)
    group: dict[str, Any] = {"weights": numbers, "targets": ["Linear"]}
    algorithm = "W4A16_NVFP4" if declared.format is NVFP4 else "MXFP4"
    if declared.activations and declared.format is NVFP4:
        group, algorithm = {"input_activations": numbers, **group}, "NVFP4"
    result: dict[str, Any] = {
        "quant_algo": algorithm, "ignore": list(declared.ignore), "producer": _MODELOPT,
        "config_groups": {"group_0": group},
    }  # fmt: skip
    if declared.fp8:
        four = {"quant_algo": algorithm, "group_size": declared.format.block_size}
        layers = dict.fromkeys(sorted(declared.packed), four)
        layers |= dict.fromkeys(sorted(declared.fp8), {"quant_algo": "FP8"})
        result |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if declared.kv_cache:
        result["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return result


def _mxfp4(declared: Declaration) -> dict[str, Any]:
    return {"modules_to_not_convert": list(declared.ignore)}
