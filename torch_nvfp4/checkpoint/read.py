"""Reads packed weights into the canonical layout. Bytes move; no value is decoded or rounded."""

import math

import torch
from torch import Tensor

from ..format import MXFP4
from .entries import PackedExperts, PackedWeight
from .errors import CheckpointError
from .files import Reader, TensorInfo, iterate_bytes
from .layouts import Fp8, Packed
from .stacks import Projection, Stack


def read_experts(reader: Reader, stack: Stack, which: range | None = None) -> PackedExperts:
    """All experts, or those in a range. One at a time, so that beside the result only one expert's bytes are held."""
    which = range(stack.entry.num_experts) if which is None else which
    gate_up, down = (_read_projection(reader, projection, which) for projection in (stack.gate_up, stack.down))
    if stack.entry.gated and gate_up.global_scale.shape[1] == 1:  # fused: one value for both
        gate_up = gate_up._replace(global_scale=gate_up.global_scale.repeat(1, 2))
    biases = (_read_biases(reader, projection, which) for projection in (stack.gate_up, stack.down))
    return PackedExperts(gate_up, down, *biases)


def read_linear(reader: Reader, packed: Packed, rows: range | None = None) -> PackedWeight:
    """The whole weight, or a range of its rows."""
    codes, scales = _read_rows(reader, packed, 0, rows)
    return PackedWeight(codes, scales, read_global_scale(reader, packed).reshape(1))


def check_global_scale(reader: Reader, packed: Packed) -> float:
    """The global scale as stored; CheckpointError for a value that no quantiser writes, or the wrong way round."""
    info = packed.global_scale
    if info is None:
        return 1.0
    value = _positive(reader, info)
    if packed.names.divisor and value < 1:
        raise CheckpointError(
            f"{info.file.path}: tensor {info} is {value}, a multiplier; compressed-tensors keeps a divisor there"
        )
    if not packed.names.divisor and value > 1:
        raise CheckpointError(
            f"{info.file.path}: tensor {info} is {value}, a divisor; ModelOpt keeps a multiplier there"
        )
    return value


def read_global_scale(reader: Reader, packed: Packed) -> Tensor:
    """The fp32 multiplier, 0-d."""
    return _multiplier(check_global_scale(reader, packed), packed)


def read_input_scale(reader: Reader, packed: Packed) -> Tensor | None:
    """The fp32 multiplier of the activations, 0-d."""
    if packed.input_scale is None:
        return None
    return _multiplier(_positive(reader, packed.input_scale), packed)


def read_input_scales(reader: Reader, stack: Stack) -> Tensor | None:
    """`[E, P]`: of gate, up and down, or of up and down. None where no weight has one.

    Experts that saw no token when the model was calibrated may lack theirs: that harms only who asks, here.
    """
    projections = 3 if stack.entry.gated else 2
    rows, lacking = [], []
    for gate_up, down in zip(stack.gate_up.weights, stack.down.weights, strict=True):
        weights = (*gate_up[:1] * (projections - len(gate_up) - 1), *gate_up, *down)  # fused: one for gate and up
        lacking += [packed for packed in weights if packed.input_scale is None]
        rows.append([read_input_scale(reader, packed) for packed in weights])
    if len(lacking) == len(rows) * projections:
        return None
    if lacking:
        codes = lacking[0].codes
        raise CheckpointError(f"{codes.file.path}: tensor {codes} has no input scale, others of its stack have one")
    return torch.tensor([[scale.item() for scale in row if scale is not None] for row in rows])


def read_fp8(reader: Reader, fp8: Fp8) -> Tensor:
    """weight * scale in fp32, rounded once to bf16."""
    weight, scale = reader.read(fp8.weight), reader.read(fp8.scale).to(torch.float32)
    _check_no_nan(fp8.weight, weight, 0x7F, both_signs=True)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(f"{fp8.scale.file.path}: tensor {fp8.scale} must be finite and positive")
    values = torch.empty(weight.shape, dtype=torch.bfloat16)
    if fp8.block is None:
        block, scale = 1, scale.reshape(-1, 1).expand(len(weight), 1)
    else:
        block, scale = fp8.block, scale.repeat_interleave(fp8.block, dim=1)[:, : weight.shape[1]]
    for start in range(0, len(weight), 1024):  # the fp32 copies stay small; 1024 is a multiple of a block
        part = slice(start, start + 1024)
        factors = scale[start // block : (start + 1024) // block].repeat_interleave(block, dim=0)
        values[part] = weight[part].to(torch.float32) * factors[: len(weight[part])]
    return values


def _positive(reader: Reader, info: TensorInfo) -> float:
    value = reader.number(info)
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{info.file.path}: tensor {info} is {value}, must be finite and positive")
    return value


def _multiplier(value: float, packed: Packed) -> Tensor:
    stored = torch.tensor(value, dtype=torch.float32)
    return stored.reciprocal() if packed.names.divisor else stored


def _read_projection(reader: Reader, projection: Projection, which: range) -> PackedWeight:
    globals_ES = torch.stack(
        [torch.stack([read_global_scale(reader, weight) for weight in projection.weights[e]]) for e in which]
    )
    first = projection.weights[0]
    n, c, fmt = sum(weight.rows for weight in first), first[0].columns, first[0].format
    codes = torch.empty(len(globals_ES), n, c // 2, dtype=torch.uint8)
    scales = torch.empty(len(globals_ES), n, c // fmt.block_size, dtype=torch.uint8)
    for place, e in enumerate(which):
        row = 0
        for weight in projection.weights[e]:
            here = slice(row, row + weight.rows)
            for target, source in zip((codes, scales), _read_rows(reader, weight, e), strict=True):
                target[place, here] = _gate_then_up(source.view(torch.uint8), projection.interleaved)
            row += weight.rows
    return PackedWeight(codes, scales.view(fmt.scale_dtype), globals_ES)


def _read_rows(reader: Reader, packed: Packed, e: int, rows: range | None = None) -> tuple[Tensor, Tensor]:
    """codes `[N, C/2]` and scales `[N, C/B]` of one expert; rows: of these alone (for a weight that holds no stack).

    Packed along another dim than the last, a byte still holds two neighbours along C: only bytes move.
    """
    index = rows if packed.experts is None else e
    codes, scales = reader.read(packed.codes, index), reader.read(packed.scales, index)
    nan, signed = packed.format.nan_byte, packed.format is not MXFP4
    _check_no_nan(packed.scales, scales, nan, signed)
    if packed.names.layout == "columns":
        codes, scales = codes.t(), scales.view(torch.uint8).t()
    elif packed.names.layout == "blocks":
        codes = codes.flatten(1)
    scales = scales.view(torch.uint8)
    if packed.repeat != 1:
        scales = scales.repeat_interleave(packed.repeat, dim=1)
    return codes.view(torch.uint8), scales.view(packed.format.scale_dtype)


def _gate_then_up(rows: Tensor, interleaved: bool) -> Tensor:
    return torch.cat([rows[0::2], rows[1::2]]) if interleaved else rows


def _read_biases(reader: Reader, projection: Projection, which: range) -> Tensor | None:
    if projection.biases is None:
        return None
    rows = []
    for e in which:
        pairs = zip(projection.weights[e], projection.biases[e], strict=True)
        parts = [reader.read(bias, None if weight.experts is None else e) for weight, bias in pairs]
        rows.append(_gate_then_up(torch.cat(parts), projection.interleaved))
    return torch.stack(rows)


def _check_no_nan(info: TensorInfo, tensor: Tensor, nan_byte: int, both_signs: bool) -> None:
    for piece in iterate_bytes(tensor):
        bad = (piece & 0x7F) == nan_byte if both_signs else piece == nan_byte
        if bool(bad.any()):
            raise CheckpointError(f"{info.file.path}: tensor {info} holds NaN")
