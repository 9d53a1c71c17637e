"""A compiled layer on a GPU: one graph, the eager layer's numbers."""

import pytest
import torch
from cuda_layers import on_cuda, random_grad
from strategies import Layer, make_layer
from torch import Tensor

pytestmark = pytest.mark.gpu


def results(layer: Layer, grad: Tensor, compile: bool) -> dict[str, Tensor]:
    layer = layer.requires_grad()

    def call(*args: Tensor | None) -> Tensor:
        return torch.ops.nvfp4.moe_lora(*args, **layer.options)

    out = (torch.compile(call, fullgraph=True) if compile else call)(*layer.args)
    leaves = layer.differentiable
    return {"output": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_compiled_equals_eager(dtype: torch.dtype) -> None:
    layer = on_cuda(make_layer(t=40, k=3, h=96, i=160, dtype=dtype, bias=True, pattern="minus_one"))
    grad = random_grad(layer)
    eager, compiled = (results(layer, grad, compile) for compile in (False, True))
    for name, wanted in eager.items():
        # The combine is Inductor's own kernel here; it may round its sum once more or less.
        error = (compiled[name].double() - wanted.double()).norm()
        assert error <= torch.finfo(dtype).eps * wanted.double().norm(), name
