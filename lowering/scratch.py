"""Products by decoding slices of the weight into a bounded scratch, on two lanes so that decoding hides.

A lane is a stream with a buffer of its own that decodes a slice, multiplies with it, and goes on to its next slice;
the caller's stream is one lane. While one lane multiplies (tensor cores), the other decodes (memory), and the last
tiles of one lane's product run beside the first of the other's. Both lanes have met again when a call returns, so its
buffers may be freed or used at once on the caller's stream, and a CUDA graph captures the fork and the join.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_nvfp4.ops import observe

from . import configs
from .kernels import scratch as kernels
from .launch import TRITON_DTYPE, cdiv, padded_rank, tma_descriptor

SCRATCH_BYTES = 128 * 2**20
LANES = 2


class Slice(NamedTuple):
    """Experts and output columns of one step."""

    first_expert: int
    experts: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Epilogue:
    """What is added to the product: u (or v) times a factor, and a bias, weighted by slot or not."""

    factor: Tensor | None
    u: Tensor
    bias: Tensor | None = None
    slots: Tensor | None = None
    slot_weights: Tensor | None = None


def slices(e: int, width: int, depth: int, itemsize: int, tile: int) -> Iterator[Slice]:
    """Cut E experts × `width` output columns of `depth` values each into pieces that fit a lane's buffer."""
    room = SCRATCH_BYTES // LANES // (depth * itemsize)  # output columns
    if room >= width:
        step = cdiv(e, cdiv(e, room // width))  # as even as can be
        for expert in range(0, e, step):
            yield Slice(expert, min(step, e - expert), 0, width)
        return
    step = max(room // tile, 1) * tile
    for expert in range(e):
        for column in range(0, width, step):
            yield Slice(expert, 1, column, min(step, width - column))


_side_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


class _DryLane:
    """A lane of a dry run (see `launch`)."""

    def wait_stream(self, other: "Lane") -> None:
        pass


Lane = torch.cuda.Stream | _DryLane


def _lanes(device: torch.device) -> list[Any]:
    """The caller's stream and one that belongs to it alone."""
    if device.type == "meta":
        return [_DryLane() for _ in range(LANES)]
    current = torch.cuda.current_stream(device)
    key = (current.device_index, current.cuda_stream)
    if key not in _side_streams:
        _side_streams[key] = torch.cuda.Stream(device)
    return [current, _side_streams[key]]


def product(
    x: Tensor, offsets: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, epilogue: Epilogue,
    *, transposed: bool, constants: dict[str, Any], packed_asm: bool,
) -> Tensor:  # fmt: skip
    """y `[M, N]` = x W_eᵀ … or, transposed, gx `[M, C]` = x W_e …, for contiguous routed rows x in column order."""
    e, n, half_c = codes.shape
    c = half_c * 2
    width, depth = (c, n) if transposed else (n, c)
    config = configs.DENSE_CONFIG
    y = x.new_empty(x.shape[0], width)
    x_rows = tma_descriptor(x, [config.tokens, config.depth], True)
    lanes = _lanes(x.device)
    parts = list(slices(e, width, depth, x.element_size(), config.outputs))
    room = max(part.experts * part.columns for part in parts) * depth
    buffers = [x.new_empty(room) for _ in lanes[: len(parts)]]
    # After the allocations: in torch's deterministic mode they fill what they hand out, on the caller's stream.
    lanes[1].wait_stream(lanes[0])
    decode = _Relaunched(kernels.decode_slice, configs.DECODE_TILE[2])
    multiply = _Relaunched(kernels.grouped_dense, config.warps)
    processors = configs.processors(x.device.index)
    dtype = TRITON_DTYPE[x.dtype]
    tile_rows, tile_bytes, _ = configs.DECODE_TILE
    block = [config.depth, config.outputs] if transposed else [config.outputs, config.depth]
    with _device_of(lanes[0]):
        for i, part in enumerate(parts):
            stream, buffer = lanes[i % LANES], buffers[i % LANES]
            rows, columns = (n, part.columns) if transposed else (part.columns, c)
            first_row, first_byte = (0, part.first_column // 2) if transposed else (part.first_column, 0)
            weight = buffer[: part.experts * rows * columns].view(part.experts * rows, columns)
            decode(
                stream, (cdiv(columns // 2, tile_bytes), cdiv(rows, tile_rows), part.experts),
                codes, scales, weight, n, part.first_expert, first_row, first_byte, rows, columns // 2,
                c, constants["B"], tile_rows, tile_bytes, packed_asm, dtype,
            )  # fmt: skip
            multiply(
                stream, (processors, 1, 1), x_rows, tma_descriptor(weight, block, True), global_scale,
                epilogue.factor, epilogue.u, epilogue.bias, epilogue.slots, epilogue.slot_weights, offsets, y,
                width, depth, epilogue.u.shape[1], *part, rows, processors, e, constants["E_POW2"], constants["S"],
                padded_rank(epilogue.u.shape[1]), config.tokens, config.outputs, config.depth, config.stages,
                transposed, epilogue.slots is not None, constants["UNIT"], dtype,
            )  # fmt: skip
    lanes[0].wait_stream(lanes[1])
    return y


def _device_of(lane: Lane) -> AbstractContextManager[Any]:
    return nullcontext() if isinstance(lane, _DryLane) else torch.cuda.device(lane.device)


class _Relaunched:
    """A kernel launched many times with arguments of one kind: looked up once, then launched without the look-up."""

    def __init__(self, kernel: Any, warps: int) -> None:
        self._kernel, self._warps = kernel, warps
        self._compiled: Any = None

    def __call__(self, stream: Lane, grid: tuple[int, int, int], *args: Any) -> None:
        if observe.current is not None:
            observe.current.launch(self._kernel, args, {"num_warps": self._warps})
        if isinstance(stream, _DryLane):
            return
        if self._compiled is None:
            with torch.cuda.stream(stream):
                self._compiled = self._kernel[grid](*args, num_warps=self._warps)
        else:
            self._compiled[grid](*args, stream=stream.cuda_stream)
