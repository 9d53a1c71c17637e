"""Which tensors form one packed weight: found by names, dtypes and shapes alone.

`ignore` lists of quantisation configs are not asked: shipped exporters write damaged ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..format import MXFP4, NVFP4, Format
from .errors import CheckpointError
from .files import TensorInfo

FLOATS = ("F32", "BF16", "F16")
_BYTES = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_SCALE_DTYPES = {"nvfp4": ("F8_E4M3",), "mxfp4": ("U8", "F8_E8M0")}

Layout = Literal["rows", "columns", "blocks"]
"""How codes lie in the file: `[N, C/2]`, `[E, C/2, N]` or `[E, N, C/32, 16]`."""


@dataclass(frozen=True)
class Names:
    """Where a convention keeps the parts of the weight that is called `stem` (a module path, or a fused parameter)."""

    convention: str
    codes: str
    scales: str
    global_scale: str | None
    input_scale: str | None
    layout: Layout
    divisor: bool = False  # the scales per tensor are 1 / multiplier


MODELOPT = Names("modelopt", ".weight", ".weight_scale", ".weight_scale_2", ".input_scale", "rows")
COMPRESSED = Names(
    "compressed-tensors", ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale", "rows", True
)
FUSED = Names("modelopt", "", "_weight_scale", "_weight_scale_2", "_input_scale", "columns")
GPT_OSS = Names("mxfp4", "_blocks", "_scales", None, None, "blocks")
_FUSED_PARAMETERS = ("gate_up_proj", "down_proj")

_COMPANIONS = frozenset(
    """weight_scale weight_scale_2 weight_global_scale input_scale input_global_scale weight_packed weight_scale_inv
    weight_zero_point weight_g_idx weight_shape pre_quant_scale qweight qzeros forward_hadamard_matrix
    backward_hadamard_matrix""".split()
)
_COMPANION_ENDS = ("_weight_scale", "_weight_scale_2", "_input_scale", "_scale_inv", "_proj_blocks", "_proj_scales")


@dataclass(frozen=True)
class Packed:
    """One packed weight `[N, C]`, or E of them in one tensor."""

    stem: str
    names: Names
    format: Format
    experts: int | None
    rows: int
    columns: int
    codes: TensorInfo
    scales: TensorInfo
    global_scale: TensorInfo | None
    input_scale: TensorInfo | None

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        found = (self.codes, self.scales, self.global_scale, self.input_scale)
        return tuple(info for info in found if info is not None)


@dataclass(frozen=True)
class Fp8:
    """An FP8 weight and its scale, a multiplier: one value, or one a row."""

    path: str
    weight: TensorInfo
    scale: TensorInfo
    input_scale: TensorInfo | None

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        return tuple(info for info in (self.weight, self.scale, self.input_scale) if info is not None)


@dataclass
class Found:
    """What the names tell: packed weights and FP8 weights by stem, and the tensors that belong to neither."""

    packed: dict[str, Packed] = field(default_factory=dict)
    fp8: dict[str, Fp8] = field(default_factory=dict)
    rest: dict[str, TensorInfo] = field(default_factory=dict)


def is_quantised(info: TensorInfo) -> bool:
    """Whether this tensor means nothing without others: by its dtype, or by the name of a companion."""
    leaf = info.name.rpartition(".")[2]
    return info.dtype in _BYTES or leaf in _COMPANIONS or leaf.endswith(_COMPANION_ENDS)


def find_weights(tensors: Mapping[str, TensorInfo]) -> Found:
    """Group all tensors; CheckpointError for one that is quantised but incomplete, or of no known layout."""
    found = Found()
    for stem, names in _seeds(tensors):  # of two with one stem, the codes of the first are left over: refused below
        found.packed[stem] = _packed(stem, names, tensors)
    for name, info in tensors.items():
        if name.endswith(".weight") and info.dtype in ("F8_E4M3", "F8_E5M2"):
            found.fp8[name] = _fp8(name.removesuffix(".weight"), tensors)
    taken = {info.name for weights in (found.packed, found.fp8) for weight in weights.values() for info in weight.parts}
    found.rest = {name: info for name, info in tensors.items() if name not in taken}
    for info in found.rest.values():
        if is_quantised(info) and not _is_spare_input_scale(info, tensors):
            raise CheckpointError(
                f"{info.file.path}: tensor {info} belongs to no weight of a known layout: its companions are missing, "
                "or another quantiser wrote it"
            )
    return found


def _is_spare_input_scale(info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """An activation scale beside a dense weight, as exports of mixed precision leave: it changes no weight."""
    weight = tensors.get(info.name.removesuffix(".input_scale") + ".weight")
    return info.name.endswith(".input_scale") and weight is not None and weight.dtype in FLOATS


def _seeds(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Names]]:
    for name, info in tensors.items():
        leaf = name.rpartition(".")[2]
        if name.endswith(MODELOPT.codes) and info.dtype in ("U8", "I8"):
            yield name.removesuffix(MODELOPT.codes), MODELOPT
        elif name.endswith(COMPRESSED.codes):
            yield name.removesuffix(COMPRESSED.codes), COMPRESSED
        elif leaf in _FUSED_PARAMETERS and info.dtype in _BYTES:
            yield name, FUSED
        elif leaf.endswith(GPT_OSS.codes) and leaf.removesuffix(GPT_OSS.codes) in _FUSED_PARAMETERS:
            yield name.removesuffix(GPT_OSS.codes), GPT_OSS


def _require(tensors: Mapping[str, TensorInfo], name: str, owner: TensorInfo) -> TensorInfo:
    if name not in tensors:
        raise CheckpointError(f"{owner.file.path}: tensor {owner} has no companion {name!r}")
    return tensors[name]


def check_tensor(info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """CheckpointError unless the tensor has one of these dtypes and one of these shapes."""
    if info.dtype not in dtypes or info.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{info.file.path}: tensor {info} must be {' or '.join(dtypes)} {expected}")


def _format_of(codes: TensorInfo, scales: TensorInfo, allowed: tuple[Format, ...]) -> Format:
    if codes.dtype != "U8":
        raise CheckpointError(f"{codes.file.path}: tensor {codes} must be U8, two 4-bit codes a byte")
    for fmt in allowed:
        if scales.dtype in _SCALE_DTYPES[fmt.name]:
            return fmt
    expected = " or ".join(f"{_SCALE_DTYPES[fmt.name][0]} ({fmt.name})" for fmt in allowed)
    raise CheckpointError(f"{scales.file.path}: tensor {scales} must hold block scales, {expected}")


def _packed(stem: str, names: Names, tensors: Mapping[str, TensorInfo]) -> Packed:
    codes = tensors[stem + names.codes]
    scales = _require(tensors, stem + names.scales, codes)
    allowed = {"rows": (NVFP4, MXFP4), "columns": (NVFP4,), "blocks": (MXFP4,)}[names.layout]
    fmt = _format_of(codes, scales, allowed)
    experts, n, c, scale_shape = _sizes(codes, names.layout, fmt)
    check_tensor(scales, _SCALE_DTYPES[fmt.name], scale_shape)
    global_scale = input_scale = None
    if fmt is NVFP4 and names.global_scale is not None:
        global_scale = _require(tensors, stem + names.global_scale, codes)
        check_tensor(global_scale, ("F32",), (), (1,))
    if names.input_scale is not None and stem + names.input_scale in tensors:
        input_scale = tensors[stem + names.input_scale]
        check_tensor(input_scale, ("F32",), (), (1,))
    return Packed(stem, names, fmt, experts, n, c, codes, scales, global_scale, input_scale)


def _sizes(codes: TensorInfo, layout: Layout, fmt: Format) -> tuple[int | None, int, int, tuple[int, ...]]:
    """E (or None), N, C and the shape of the scales that goes with these codes."""
    block, shape = fmt.block_size, codes.shape
    if len(shape) == {"rows": 2, "columns": 3, "blocks": 4}[layout] and 0 not in shape:
        if layout == "blocks" and 2 * shape[3] == block:
            return shape[0], shape[1], shape[2] * block, shape[:3]
        c = 2 * shape[1]
        if layout == "columns" and c % block == 0:
            return shape[0], shape[2], c, (shape[0], c // block, shape[2])
        if layout == "rows" and c % block == 0:
            return None, shape[0], c, (shape[0], c // block)
    expected = {"rows": "[N, C/2]", "columns": "[E, C/2, N]", "blocks": f"[E, N, C/{block}, {block // 2}]"}[layout]
    raise CheckpointError(
        f"{codes.file.path}: tensor {codes} must be {expected}, C a multiple of {block} ({fmt.name}), none empty"
    )


def _fp8(path: str, tensors: Mapping[str, TensorInfo]) -> Fp8:
    weight = tensors[path + ".weight"]
    scale = _require(tensors, path + ".weight_scale", weight)
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise CheckpointError(f"{weight.file.path}: tensor {weight} must be F8_E4M3 [N, C]")
    n = weight.shape[0]
    check_tensor(scale, FLOATS, (), (1,), (n,), (n, 1))
    input_scale = tensors.get(path + ".input_scale")
    if input_scale is not None:
        check_tensor(input_scale, FLOATS, (), (1,))
    return Fp8(path, weight, scale, input_scale)
