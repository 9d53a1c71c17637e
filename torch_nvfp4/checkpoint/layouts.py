"""Which tensors form one packed weight: found by names, dtypes and shapes alone.

`ignore` lists of quantisation configs are not asked: shipped exporters write damaged ones.
"""

from collections.abc import Collection, Iterator, Mapping
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
DEEPSEEK = Names("fp8", ".weight", ".scale", None, None, "rows")
_FUSED_PARAMETERS = ("gate_up_proj", "down_proj")

_COMPANIONS = frozenset(
    """weight_scale weight_scale_2 weight_global_scale input_scale input_global_scale weight_packed weight_scale_inv
    weight_zero_point weight_g_idx weight_shape pre_quant_scale qweight qzeros forward_hadamard_matrix
    backward_hadamard_matrix qscale_weight""".split()
)
_FP8_SCALES = (".weight_scale", ".weight_scale_inv", ".scale")
_FP8_BLOCK = 128
_COMPANION_ENDS = ("_weight_scale", "_weight_scale_2", "_input_scale", "_scale_inv", "_proj_blocks", "_proj_scales")
_ALLOWED = {FUSED: (NVFP4,), GPT_OSS: (MXFP4,), DEEPSEEK: (MXFP4,)}


@dataclass(frozen=True)
class Packed:
    """One packed weight `[N, C]`, or E of them in one tensor. A scale in the file is that of `repeat` blocks."""

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
    repeat: int = 1

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        found = (self.codes, self.scales, self.global_scale, self.input_scale)
        return tuple(info for info in found if info is not None)


@dataclass(frozen=True)
class Fp8:
    """An FP8 weight and its scale, a multiplier: one value, one a row, or one for each block of 128 x 128."""

    path: str
    weight: TensorInfo
    scale: TensorInfo
    input_scale: TensorInfo | None
    block: int | None = None

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


def find_weights(tensors: Mapping[str, TensorInfo], group_sizes: Collection[int] = ()) -> Found:
    """Group all tensors; CheckpointError for one that is quantised but incomplete, or of no known layout.

    group_sizes: what the config says of weights to a scale. NVFP4 with 32 is read only where it says so: scales that
    were cut in half have the same shape.
    """
    found = Found()
    repeat = 2 if 32 in group_sizes else 1
    for stem, names in _seeds(tensors):  # of two with one stem, the codes of the first are left over: refused below
        found.packed[stem] = _packed(stem, names, tensors, repeat)
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
            stem = name.removesuffix(MODELOPT.codes)
            yield stem, DEEPSEEK if stem + DEEPSEEK.scales in tensors and info.dtype == "I8" else MODELOPT
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


def _format_of(codes: TensorInfo, scales: TensorInfo, names: Names, allowed: tuple[Format, ...]) -> Format:
    if codes.dtype != "U8" and names is not DEEPSEEK:
        raise CheckpointError(f"{codes.file.path}: tensor {codes} must be U8, two 4-bit codes a byte")
    for fmt in allowed:
        if scales.dtype in _SCALE_DTYPES[fmt.name]:
            return fmt
    expected = " or ".join(f"{_SCALE_DTYPES[fmt.name][0]} ({fmt.name})" for fmt in allowed)
    raise CheckpointError(f"{scales.file.path}: tensor {scales} must hold block scales, {expected}")


def _packed(stem: str, names: Names, tensors: Mapping[str, TensorInfo], repeat: int) -> Packed:
    codes = tensors[stem + names.codes]
    scales = _require(tensors, stem + names.scales, codes)
    _check_packed_dim(codes, scales, names)
    fmt = _format_of(codes, scales, names, _ALLOWED.get(names, (NVFP4, MXFP4)))
    experts, n, c, scale_shapes = _sizes(codes, names.layout, fmt, repeat if fmt is NVFP4 else 1)
    check_tensor(scales, _SCALE_DTYPES[fmt.name], *scale_shapes)
    repeat = 1 if scales.shape == scale_shapes[0] else repeat
    global_scale = input_scale = None
    if fmt is NVFP4 and names.global_scale is not None:
        global_scale = _require(tensors, stem + names.global_scale, codes)
        check_tensor(global_scale, ("F32",), (), (1,))
    if names.input_scale is not None and stem + names.input_scale in tensors:
        input_scale = tensors[stem + names.input_scale]
        check_tensor(input_scale, ("F32",), (), (1,))
    return Packed(stem, names, fmt, experts, n, c, codes, scales, global_scale, input_scale, repeat)


def _check_packed_dim(codes: TensorInfo, scales: TensorInfo, names: Names) -> None:
    """ModelOpt packs fused experts in MXFP4, or with 32 weights to a scale, along their outputs.

    No product can take such blocks, and turning them round would round the weights again.
    """
    if names is FUSED and len(codes.shape) == 3 and scales.shape == (*codes.shape[:2], codes.shape[2] // 16):
        raise CheckpointError(
            f"{codes.file.path}: tensor {codes} is packed along its last dim, the outputs, as its scales {scales} "
            "tell; only weights that are packed along their inputs can be multiplied as they are"
        )


def _sizes(
    codes: TensorInfo, layout: Layout, fmt: Format, repeat: int
) -> tuple[int | None, int, int, list[tuple[int, ...]]]:
    """E (or None), N, C and the shapes of the scales that go with these codes: the format's own, then the repeated."""
    block, shape = fmt.block_size, codes.shape
    if len(shape) == {"rows": 2, "columns": 3, "blocks": 4}[layout] and 0 not in shape:
        if layout == "blocks" and 2 * shape[3] == block:
            return shape[0], shape[1], shape[2] * block, [shape[:3]]
        c = 2 * shape[1]
        groups = [c // (block * step) for step in (1, repeat)[:repeat] if c % (block * step) == 0]
        if layout == "columns" and c % block == 0:
            return shape[0], shape[2], c, [(shape[0], count, shape[2]) for count in groups]
        if layout == "rows" and c % block == 0:
            return None, shape[0], c, [(shape[0], count) for count in groups]
    expected = {"rows": "[N, C/2]", "columns": "[E, C/2, N]", "blocks": f"[E, N, C/{block}, {block // 2}]"}[layout]
    raise CheckpointError(
        f"{codes.file.path}: tensor {codes} must be {expected}, C a multiple of {block} ({fmt.name}), none empty"
    )


def _fp8(path: str, tensors: Mapping[str, TensorInfo]) -> Fp8:
    weight = tensors[path + ".weight"]
    name = next((path + leaf for leaf in _FP8_SCALES if path + leaf in tensors), path + _FP8_SCALES[0])
    scale = _require(tensors, name, weight)
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise CheckpointError(f"{weight.file.path}: tensor {weight} must be F8_E4M3 [N, C]")
    n, c = weight.shape
    grid = (-(-n // _FP8_BLOCK), -(-c // _FP8_BLOCK))
    check_tensor(scale, (*FLOATS, "F8_E8M0"), (), (1,), (n,), (n, 1), grid)
    input_scale = tensors.get(path + ".input_scale")
    if input_scale is not None:
        check_tensor(input_scale, FLOATS, (), (1,))
    return Fp8(path, weight, scale, input_scale, _FP8_BLOCK if scale.shape == grid else None)
