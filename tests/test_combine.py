"""The combine: summed in fp32 in the order of k, to the bit, in eager mode and compiled."""

import pytest
import torch
from torch import Tensor

from torch_nvfp4.ops.routing import combine

T, N = 17, 33


def in_order(rows: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    total = torch.zeros(T, N)
    for t in range(T):
        for row in inverse[t * top_k : (t + 1) * top_k].tolist():
            if row >= 0:
                total[t] += rows[row].float()
    return total.to(rows.dtype)


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits(dtype: torch.dtype, top_k: int, one_thread: None) -> None:
    rows = torch.randn(T * top_k, N).to(dtype)
    inverse = torch.randperm(T * top_k, dtype=torch.int32)
    unrouted = torch.rand(T * top_k) < 0.2
    rows[inverse[unrouted]] = torch.nan
    inverse[unrouted] = -1
    rows[inverse[~unrouted][0]] = -0.0
    wanted = in_order(rows, inverse, top_k)
    compiled = torch.compile(combine, fullgraph=True)
    for run in (combine, compiled):
        got = run(rows, inverse, top_k, dtype)
        assert got.dtype == dtype and torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
