"""The gate's third part: every op under torch.compile and torch.export, and on tensors that have no data."""

import pytest
import torch
from samples import Sample, T, assert_same_bits, loss, samples
from torch import Tensor, nn
from torch.export import Dim

ALL = samples()


class Call(nn.Module):
    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.run = sample.function()

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return self.run(tensors)


@pytest.mark.parametrize("sample", ALL, ids=str)
def test_fullgraph_gives_the_bits_of_eager(sample: Sample) -> None:
    first = next(s for s in ALL if s.op == sample.op)
    backend = "inductor" if sample is first else "aot_eager"  # one kernel compilation an op is enough
    compiled = torch.compile(sample.function(), fullgraph=True, backend=backend)
    eager, traced = sample.leaves(), sample.leaves()
    wanted, got = eager.run(), compiled(traced.tensors)
    assert_same_bits(sample.defined(got), sample.defined(wanted))
    if sample.differentiable:
        grads = []
        for side, results in ((eager, wanted), (traced, got)):
            arguments = [side.arguments[name] for name in sample.differentiable]
            grads.append(torch.autograd.grad(loss(sample, results), arguments))
        assert_same_bits(*grads)


@pytest.mark.parametrize(("sample", "other"), zip(ALL, samples(T + 2), strict=True), ids=str)
def test_exported_program_runs_at_another_size(sample: Sample, other: Sample) -> None:
    dynamic = {name: {0: Dim.AUTO} if name in sample.token_side else None for name in sample.tensors}
    program = torch.export.export(Call(sample), (sample.tensors,), dynamic_shapes={"tensors": dynamic})
    for case in (sample, other) if sample.token_side else (sample,):
        assert_same_bits(case.defined(program.module()(case.tensors)), case.defined(case.run()))


@pytest.mark.parametrize("tokens", [0, 1, T])
def test_meta_tensors_have_the_shapes_of_real_ones(tokens: int) -> None:
    for sample in samples(tokens):
        for m, r in zip(sample.map(lambda t: t.to("meta")).run(), sample.run(), strict=True):
            assert (m.shape, m.stride(), m.dtype) == (r.shape, r.stride(), r.dtype), sample
