"""Eager CUDA launchers at the two ends of a layer: slots to routed rows, and rows back to tokens."""

import torch
from torch import Tensor

from . import configs
from .kernels import combine as combine_kernels
from .kernels import route
from .launch import cdiv, check_dtype, launch, power_of_two, with_unit_stride


def moe_route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.routing.moe_route`; one launch or three, by the number of slots."""
    ids = topk_ids.reshape(-1).contiguous()  # flattening may give a view with gaps
    m = ids.shape[0]
    rows, inverse = (ids.new_empty(m, dtype=torch.int32) for _ in range(2))
    if m == 0:
        return rows, inverse, ids.new_zeros(num_experts, dtype=torch.int32)
    offsets = ids.new_empty(num_experts, dtype=torch.int32)
    programs = num_experts + 1  # the last one for the slots that are not routed
    for slots, warps in configs.ROUTE_AT_ONCE:
        if m <= slots:
            launch(
                route.route_at_once, (programs,), ids.device, ids, rows, inverse, offsets, m,
                E=num_experts, SLOTS=slots, num_warps=warps,
            )  # fmt: skip
            return rows, inverse, offsets
    bins = power_of_two(programs, 16)
    blocks = cdiv(m, configs.ROUTE_BLOCK)
    per_chunk = cdiv(blocks, configs.ROUTE_CHUNKS)
    chunks = cdiv(blocks, per_chunk)
    counts = ids.new_empty(chunks, bins, dtype=torch.int32)
    options = dict(E=num_experts, BINS=bins, BLOCK=configs.ROUTE_BLOCK, num_warps=configs.ROUTE_WARPS)
    launch(route.route_count, (chunks,), ids.device, ids, counts, m, per_chunk, **options)
    launch(
        route.route_scan, (programs,), ids.device, counts, chunks, BINS=bins, CHUNKS=configs.ROUTE_CHUNKS, num_warps=4
    )
    launch(
        route.route_place, (chunks,), ids.device, ids, counts, rows, inverse, offsets, m, per_chunk, chunks, **options
    )
    return rows, inverse, offsets


def combine(rows_MN: Tensor, inverse_M: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """See `ops.routing.combine`; one launch."""
    check_dtype("combine", rows_MN.dtype)
    rows_MN = with_unit_stride(rows_MN)
    tokens, width = inverse_M.shape[0] // top_k, rows_MN.shape[1]
    out = rows_MN.new_empty(tokens, width, dtype=dtype)
    columns = min(1024, power_of_two(width, 16))
    splits = cdiv(width, columns)
    launch(
        combine_kernels.combine, (tokens * splits,), out.device, rows_MN, rows_MN.stride(0), inverse_M, out, width,
        TOP_K=top_k, COLUMNS=columns, SPLITS=splits, num_warps=4,
    )  # fmt: skip
    return out
