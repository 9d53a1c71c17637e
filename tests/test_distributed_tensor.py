"""DTensor's rules: results, gradients and placements against the whole tensors."""

from __future__ import annotations

from typing import Any

import expert_parallel as ep
import pytest
import torch
from ranks import Ranks
from sharded_models import close
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import torch_nvfp4.distributed  # noqa: F401  (registers the rules)
from torch_nvfp4.nn import NVFP4Experts

E, N, C, R, M = 3, 64, 64, 3, 10
OPS: Any = torch.ops.nvfp4


def _weight(n: int, c: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n + c)
    dense = torch.randn(E, n, c, generator=generator)
    codes, scales, global_scale = OPS.quantize(dense, torch.full((E, 1), 1e-3))
    return codes, scales, global_scale, torch.randn(E, R, c, generator=generator), torch.randn(E, n, R)


def _offsets() -> Tensor:
    return torch.tensor([4, 4, 9], dtype=torch.int32)


def _spread(tensors: dict[str, Tensor | None], split: dict[str, Placement]) -> dict[str, Any]:
    """The arguments as DTensors; float8 travels as bytes."""
    mesh = ep.mesh_of(2)
    spread: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            spread[name] = None
            continue
        byte = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor.detach()
        placed = distribute_tensor(byte, mesh, [split.get(name, Replicate())])
        placed = placed.view(tensor.dtype) if tensor.dtype == torch.float8_e4m3fn else placed
        spread[name] = placed.requires_grad_(tensor.requires_grad)
    return spread


COLUMN = {"codes": Shard(1), "scales": Shard(1), "lora_b": Shard(1)}
ROW = {"codes": Shard(2), "scales": Shard(2), "lora_a": Shard(2)}


def _linear(split: dict[str, Placement], placed: list[Placement], options: dict[str, Any]) -> None:
    names = ("codes", "scales", "global_scale", "lora_a", "lora_b")
    codes, scales, global_scale, a, b = _weight(N, C)
    x = torch.randn(M, C, generator=torch.Generator().manual_seed(1)).requires_grad_()
    b = torch.randn(E, N, R, generator=torch.Generator().manual_seed(2))
    whole: dict[str, Tensor | None] = {"x": x, "rows": None, "offsets": _offsets()}
    whole |= dict(zip(names, (codes, scales, global_scale, a.requires_grad_(), b.requires_grad_()), strict=True))
    parts = _spread(whole, split)
    y, u = OPS.grouped_lora_linear(*whole.values(), scaling=0.5, **options)
    y_parts, u_parts = OPS.grouped_lora_linear(*parts.values(), scaling=0.5, **options)
    assert [y_parts.placements[0], u_parts.placements[0]] == placed
    routed = int(_offsets()[-1])
    close(y_parts.full_tensor()[:routed].detach(), y[:routed].detach(), 2e-6, "y")
    close(u_parts.full_tensor()[:routed].detach(), u[:routed].detach(), 2e-6, "u")
    gy = torch.randn(M, N, generator=torch.Generator().manual_seed(4))
    grads = torch.autograd.grad(y, (x, a, b), gy)
    gy_parts = distribute_tensor(gy, parts["x"].device_mesh, [Shard(1) if placed[0] == Shard(1) else Replicate()])
    if placed[0] == Partial():
        y_parts = y_parts.redistribute(placements=[Replicate()])
    with implicit_replication():  # the backward makes positions of its own, plain tensors
        found = torch.autograd.grad(y_parts, (parts["x"], parts["lora_a"], parts["lora_b"]), gy_parts)
    for name, part, truth in zip("xab", found, grads, strict=True):
        whole_part = part.full_tensor()
        close(whole_part[:routed] if name == "x" else whole_part, truth[:routed] if name == "x" else truth, 3e-6, name)


@pytest.mark.parametrize("options", [{}, {"merge_aware": True}])
@pytest.mark.parametrize(
    ("split", "placed"),
    [({}, [Replicate(), Replicate()]), (COLUMN, [Shard(1), Replicate()]), (ROW | {"x": Shard(1)}, [Partial()] * 2)],
    ids=["whole", "column", "row"],
)
def test_linear(two: Ranks, split: dict[str, Placement], placed: list[Placement], options: dict[str, Any]) -> None:
    two.run(_linear, split, placed, options)


def _computed() -> None:
    """Sums over parts of the columns are for w4a16 alone, whatever ran before; and an input scale comes by keyword."""
    names = ("codes", "scales", "global_scale", "lora_a", "lora_b")
    x = torch.randn(M, C, generator=torch.Generator().manual_seed(1))
    whole: dict[str, Tensor | None] = {"x": x, "rows": None, "offsets": _offsets()}
    whole |= dict(zip(names, _weight(N, C), strict=True))
    parts, routed = _spread(whole, {"x": Shard(1)}), int(_offsets()[-1])
    scale = torch.tensor(1e-3)
    spread_scale = distribute_tensor(scale, ep.mesh_of(2), [Replicate()])
    for given, spread, placed in (
        ({"compute": "w4a16"}, {}, Partial()),
        ({"compute": "w4a4"}, {}, Replicate()),
        ({"compute": "w4a4", "input_scale": scale}, {"input_scale": spread_scale}, Replicate()),
        ({"compute": "w4a4", "input_scale": scale}, {}, Replicate()),
    ):
        y, _ = OPS.grouped_lora_linear(*whole.values(), **given)
        y_parts, _ = OPS.grouped_lora_linear(*parts.values(), **(given | spread))
        assert y_parts.placements == (placed,), given
        close(y_parts.full_tensor()[:routed], y[:routed], 2e-6, str(given))


def test_a_rule_is_that_of_the_computation(two: Ranks) -> None:
    two.run(_computed)


def _quantised() -> None:
    """quantize, dequantize and fake_quantize by each dim, merge_lora by each: the same bytes."""
    mesh = ep.mesh_of(2)
    x = torch.randn(4, N, C, generator=torch.Generator().manual_seed(5))
    scale = torch.full((4, 1), 1e-3)
    codes, scales, _ = OPS.quantize(x, scale)
    for dim in range(3):
        parts = distribute_tensor(x, mesh, [Shard(dim)])
        along = distribute_tensor(scale, mesh, [Shard(0) if dim == 0 else Replicate()])
        of_codes, of_scales, _ = OPS.quantize(parts, along)
        assert of_codes.placements == of_scales.placements == (Shard(dim),)
        assert torch.equal(of_codes.full_tensor(), codes)
        values = OPS.dequantize(of_codes, of_scales, along, dtype=torch.float32)
        assert values.placements == (Shard(dim),)
        assert torch.equal(values.full_tensor(), OPS.dequantize(codes, scales, scale, dtype=torch.float32))
        assert torch.equal(OPS.fake_quantize(parts, along).full_tensor(), OPS.fake_quantize(x, scale))
    whole = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(OPS.quantize(whole)[0].full_tensor(), OPS.quantize(x)[0])  # the scale is that of all


def _merged() -> None:
    codes, scales, global_scale, a, b = _weight(N, C)
    b = torch.randn(E, N, R, generator=torch.Generator().manual_seed(2))
    whole = {"codes": codes, "scales": scales, "global_scale": global_scale, "a": a, "b": b}
    merged = OPS.merge_lora(*whole.values(), 0.5)
    by_dim: list[dict[str, Placement]] = [
        dict.fromkeys(whole, Shard(0)), {"codes": Shard(1), "scales": Shard(1), "b": Shard(1)},
        {"codes": Shard(2), "scales": Shard(2), "a": Shard(2)},
    ]  # fmt: skip
    for dim, split in enumerate(by_dim):
        parts = OPS.merge_lora(*_spread(whole, split).values(), 0.5)
        assert all(part.placements == (Shard(dim),) for part in parts)
        for part, truth in zip(parts, merged, strict=True):
            rank, size = ep.my_rank(), -(-truth.shape[dim] // 2)
            mine = truth.view(torch.uint8).split(size, dim)[rank]
            assert torch.equal(part.to_local().view(torch.uint8), mine)


def test_merging_by_every_dim(two: Ranks) -> None:
    two.run(_merged)


def test_quantising_by_every_dim(two: Ranks) -> None:
    two.run(_quantised)


def _refused() -> list[str]:
    layer = NVFP4Experts.from_dense(torch.randn(4, 32, 32), torch.randn(4, 32, 16))
    x, offsets = torch.randn(6, 32), torch.tensor([2, 3, 5, 6], dtype=torch.int32)
    names = ("codes", "scales", "global_scale")
    whole: dict[str, Tensor | None] = {"x": x, "rows": None, "offsets": offsets}
    whole |= dict(zip(names, layer.packed("gate_up"), strict=True))
    texts = []
    with pytest.raises(Exception) as caught:
        OPS.grouped_lora_linear(*_spread(whole, {"codes": Shard(0), "scales": Shard(0)}).values())
    texts.append(str(caught.value))
    # Gate and up have a global scale each: a share of the rows is gathered, not computed with the wrong halves.
    y, _ = OPS.grouped_lora_linear(*_spread(whole, {"codes": Shard(1)}).values())
    close(y.full_tensor(), OPS.grouped_lora_linear(*whole.values())[0], 1e-6)
    # A split that cuts blocks, too: 32 columns are two blocks, which two ranks can share, but 48 are three.
    odd = dict(
        zip(
            names,
            NVFP4Experts.from_dense(torch.randn(4, 32, 48), torch.randn(4, 48, 16)).packed("gate_up"),
            strict=True,
        )
    )
    whole |= odd | {"x": torch.randn(6, 48)}
    y, _ = OPS.grouped_lora_linear(*_spread(whole, {"codes": Shard(2)}).values())
    close(y.full_tensor(), OPS.grouped_lora_linear(*whole.values())[0], 1e-6)
    return texts


def test_experts_are_refused_and_what_has_no_rule_is_gathered(two: Ranks) -> None:
    for (text,) in two.run(_refused):
        assert "codes is sharded over experts (dim 0)" in text and "parallelize_experts" in text


def _layer() -> None:
    """A whole layer of replicated DTensors; without a gate the products are split by column, then by row."""
    generator = torch.Generator().manual_seed(8)
    dense = torch.randn(E, N, C, generator=generator) * 0.2, torch.randn(E, C, N, generator=generator) * 0.2
    layer = NVFP4Experts.from_dense(*dense, activation="relu2")
    layer.add_lora(R, scaling=0.5)
    for name, parameter in layer.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    x = torch.randn(M, C, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(M)])
    weights = torch.rand(M, 2, generator=generator)
    names = ("x", "topk_ids", "topk_weights", *(f"{p}_{t}" for p in ("gate_up", "down") for t in COLUMN_NAMES))
    factors = {f"{p}_{t}": getattr(layer, f"{p}_{t}") for p in ("gate_up", "down") for t in ("lora_a", "lora_b")}
    values = (x.requires_grad_(), ids, weights.requires_grad_(), *layer.packed("gate_up"), *layer.packed("down"))
    whole: dict[str, Tensor | None] = dict(zip(names, values, strict=True)) | factors
    split: dict[str, Placement] = {f"gate_up_{name}": placement for name, placement in COLUMN.items()}
    split |= {f"down_{name}": placement for name, placement in ROW.items()}
    for placements in ({}, split):
        parts = _spread(whole, placements)
        y = OPS.moe_lora(*whole.values(), gate_up_scaling=0.5, down_scaling=0.5, activation="relu2")
        y_parts = OPS.moe_lora(*parts.values(), gate_up_scaling=0.5, down_scaling=0.5, activation="relu2")
        assert isinstance(y_parts, DTensor)
        close(y_parts.full_tensor().detach(), y.detach(), 3e-6, "y")
        leaves = [name for name, tensor in whole.items() if tensor is not None and tensor.requires_grad]
        grads = torch.autograd.grad(y.square().sum(), [whole[name] for name in leaves])
        found = torch.autograd.grad(y_parts.full_tensor().square().sum(), [parts[name] for name in leaves])
        for name, part, truth in zip(leaves, found, grads, strict=True):
            close(part.full_tensor(), truth, 5e-6, name)


COLUMN_NAMES = ("codes", "scales", "global_scale")


def test_a_layer(two: Ranks) -> None:
    two.run(_layer)
