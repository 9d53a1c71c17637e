"""`moe_lora` against the float64 specification: values, gradients, every subset of them, and what they leave alone."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_as_close_as_plain, exact, plain
from strategies import DIFFERENTIABLE, Layer, layers, make_layer
from torch import Tensor


def output_and_grads(layer: Layer, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    fresh = layer.requires_grad()
    out = fresh.run()
    leaves = fresh.differentiable
    return out, dict(zip(leaves, torch.autograd.grad(out, leaves.values(), grad), strict=True))


def random_grad(layer: Layer, seed: int = 0) -> Tensor:
    shape = (layer.x.shape[0], layer.down_codes.shape[1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(layer.x.dtype)


@given(layer=layers())
def test_output_and_every_gradient_match_float64(layer: Layer, poison: object) -> None:
    grad = random_grad(layer)
    out, grads = output_and_grads(layer, grad)
    assert out.shape == (layer.x.shape[0], layer.down_codes.shape[1]) and out.dtype == layer.x.dtype
    assert out.is_contiguous()
    exact_out, exact_leaves = exact(layer)
    plain_out, plain_leaves = plain(layer)
    assert_as_close_as_plain("output", out, plain_out, exact_out, layer.x.dtype)
    if not exact_out.requires_grad:  # no slot is routed, or T = 0
        assert all(not g.any() for g in grads.values())
        return
    exact_grads = grads_of(exact_out, exact_leaves, grad)
    plain_grads = grads_of(plain_out, plain_leaves, grad)
    for name, got in grads.items():
        assert got.dtype == layer.tensors[name].dtype and got.shape == layer.tensors[name].shape
        assert_as_close_as_plain(name, got, plain_grads[name], exact_grads[name], layer.x.dtype)


def grads_of(out: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, leaves.values(), grad.to(out.dtype), allow_unused=True)
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, found, strict=True)}


@settings(max_examples=10)
@given(layers(dtypes=(torch.float64,), activations=("silu", "gelu", "gelu_tanh", "swiglu_oai"), tokens=(2, 3)))
def test_float64_passes_gradcheck(layer: Layer) -> None:
    layer = Layer({k: t.double() if t is not None and k in DIFFERENTIABLE else t for k, t in layer.tensors.items()},
                  {**layer.options, "limit": None})  # fmt: skip
    names = list(layer.differentiable)

    def run(*leaves: Tensor) -> Tensor:
        return layer.replaced(**dict(zip(names, leaves, strict=True))).run()

    leaves = [t.detach().contiguous().requires_grad_() for t in layer.differentiable.values()]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@given(layers(dtypes=(torch.float32,), tokens=(2, 7, 17)), st.randoms(use_true_random=False))
def test_permuting_tokens_permutes_results_fault_c7(layer: Layer, random: Random) -> None:
    t = layer.x.shape[0]
    order = torch.tensor(random.sample(range(t), t))
    permuted = layer.replaced(x=layer.x[order], topk_ids=layer.topk_ids[order], topk_weights=layer.topk_weights[order])
    grad = random_grad(layer)
    out, grads = output_and_grads(layer, grad)
    permuted_out, permuted_grads = output_and_grads(permuted, grad[order])
    # A CPU's matrix product may sum a row in another order where the row lies elsewhere, so not to the bit.
    pairs = {"output": (permuted_out, out[order])}
    pairs |= {name: (permuted_grads[name], grads[name][order]) for name in ("x", "topk_weights")}
    for name, (got, wanted) in pairs.items():
        assert (got - wanted).norm() <= 16 * torch.finfo(torch.float32).eps * wanted.norm(), name


@given(layers(), st.sets(st.sampled_from(DIFFERENTIABLE)))
def test_each_subset_of_gradients_is_what_all_of_them_give(layer: Layer, names: set[str]) -> None:
    names &= set(layer.differentiable)
    grad = random_grad(layer)
    _, every = output_and_grads(layer, grad)
    some = layer.requires_grad(names)
    out = some.run()
    assert out.requires_grad == bool(names)
    if names:
        wanted = [some.tensors[name] for name in sorted(names)]
        for name, got in zip(sorted(names), torch.autograd.grad(out, wanted, grad), strict=True):
            torch.testing.assert_close(got, every[name], rtol=0, atol=0)


@given(layers(), st.sets(st.sampled_from(DIFFERENTIABLE)))
def test_only_pre_routing_and_rank_sized_tensors_are_saved(layer: Layer, names: set[str]) -> None:
    names &= set(layer.differentiable)
    own = {t.untyped_storage().data_ptr() for t in layer.tensors.values() if t is not None and t.numel()}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer.requires_grad(names).run()
    m, n = layer.topk_ids.numel(), layer.gate_up_codes.shape[1]
    e = layer.gate_up_codes.shape[0]
    ranks = {layer.tensors[f"{p}_lora_a"].shape[1] for p in ("gate_up", "down") if f"{p}_lora_b" in names}
    needs_pre = names & {
        "x",
        "topk_weights",
        "gate_up_lora_a",
        "gate_up_lora_b",
        "gate_up_bias",
        "down_lora_a",
    }
    allowed = {(m,), (e,)} | {(m, r) for r in ranks} | ({(m, n)} if needs_pre else set())
    assert {tuple(t.shape) for t in saved} <= (allowed if names else set())


def test_gradients_accumulate_and_repeat_to_the_bit() -> None:
    layer = make_layer().requires_grad()
    grad = random_grad(layer)
    for _ in range(2):
        layer.run().backward(grad)
    once = make_layer().requires_grad()
    once.run().backward(grad)
    for name, leaf in layer.differentiable.items():
        assert torch.equal(leaf.grad, 2 * once.tensors[name].grad), name
