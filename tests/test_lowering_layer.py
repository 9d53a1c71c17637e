"""A whole layer as Inductor compiles it for a GPU, on a machine without one: its launches, and their numbers."""

import math
from pathlib import Path
from typing import Any

import expecttest
import fakecuda
import pytest
import torch
from fakecuda import Graph
from launches import buffers, launches, of_router
from moe_block import block_and_inputs

SIZES = dict(t=64, k=8, e=16, h=128, i=128, ranks=(8, 4), dtype=torch.bfloat16)


def journal(graphs: tuple[Graph, Graph], path: str) -> tuple[list[str], list[str]]:
    forward, backward = (list(launches(graph.source, path)) for graph in graphs)
    assert len([launch for launch in forward if not of_router(launch)]) <= 8
    assert len([launch for launch in backward if not of_router(launch)]) <= 11
    return forward, backward


def assert_nothing_decoded(graphs: tuple[Graph, Graph]) -> None:
    """No tensor around the launches is as large as a decoded weight."""
    e, h, i = SIZES["e"], SIZES["h"], SIZES["i"]
    decoded = {e * 2 * i * h, e * h * i}
    factor = {e * r * width for r in SIZES["ranks"] for width in (h, 2 * i, i)}
    assert not decoded & factor
    for graph in graphs:
        sizes = {math.prod(size) for size in buffers(graph.source)}
        assert max(sizes) < min(decoded) and not sizes & decoded


def test_launches_of_a_layer_on_hopper() -> None:
    block, inputs = block_and_inputs(**SIZES)
    graphs = fakecuda.generate_training(block, *inputs, capability=(9, 0))
    assert_nothing_decoded(graphs)
    forward, backward = journal(graphs, "HOPPER")
    expecttest.assert_expected_inline(
        "\n".join(forward),
        """\
library: mm
router: softmax
library: aten.topk
router: div_sum
route_at_once
template: shrink
hopper grouped_product: y
template: glu_forward
template: shrink
hopper grouped_product: y
rows: add ge index select mean mul pow rsqrt where""",
    )
    expecttest.assert_expected_inline(
        "\n".join(backward),
        """\
rows: add div mul pow sum
template: shrink
hopper grouped_product: gx
template: glu_backward
template: wgrad
template: wgrad
hopper grouped_product: gx
template: wgrad
template: wgrad
pointwise: add ge index select where
router: scatter
router: scatter
router: softmax
library: mm
library: addmm""",
    )


Graphs = list[tuple[torch.dtype, tuple[Graph, Graph]]]
SMALL: tuple[dict[str, Any], ...] = (
    dict(dtype=torch.float32, bias=True),
    dict(dtype=torch.bfloat16, bias=True),
    dict(dtype=torch.float16, bias=True, fmt="mxfp4"),
    dict(dtype=torch.float16, ranks=(32, 17)),  # v by a shrink, the router weights' gradient without sums
)


@pytest.fixture(scope="module")
def small() -> Graphs:
    """Graphs of small layers; in bf16 the number of tokens is symbolic."""
    made = []
    for sizes in SMALL:
        block, inputs = block_and_inputs(**dict(t=6, k=2, e=3, h=64, i=32) | sizes)
        for token_side in inputs[:2]:
            if sizes["dtype"] == torch.bfloat16 and token_side is not None:
                torch._dynamo.mark_dynamic(token_side, 0)
        made.append((sizes["dtype"], fakecuda.generate_training(block, *inputs, capability=(8, 0))))
    return made


def test_a_layer_on_ampere_is_all_templates(small: Graphs) -> None:
    for _, graphs in small:
        forward, backward = (list(launches(graph.source)) for graph in graphs)
        assert forward.count("template: grouped_linear") == backward.count("template: grouped_dgrad") == 2
        assert not any("nvfp4." in launch for launch in (*forward, *backward))


def test_the_backward_of_a_large_rank_takes_a_shrink_more_and_no_sums(small: Graphs) -> None:
    of_rank_4, of_rank_32 = (list(launches(small[i][1][1].source)) for i in (2, 3))
    assert (of_rank_4.count("template: shrink"), of_rank_4.count("template: sum_chunks")) == (1, 1)  # a bias
    assert (of_rank_32.count("template: shrink"), of_rank_32.count("template: sum_chunks")) == (2, 0)


def test_generated_kernels_compute_the_layer(small: Graphs, tmp_path: Path) -> None:
    """Forward and backward, run in the interpreter, give what the same graphs give on the CPU."""
    saved = [(dtype, g.source, g.inputs, g.outputs) for dtype, graphs in small for g in graphs]
    fakecuda.assert_interpreted_graphs_agree(saved, tmp_path)
