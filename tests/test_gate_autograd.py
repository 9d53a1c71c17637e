"""The gate's second part: what every op does about derivatives, in eager mode."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from samples import Sample, assert_same_bits, gradients, loss, samples
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

ALL = samples()
DIFFERENTIABLE = [sample for sample in ALL if sample.differentiable]
REFUSING = ("dequantize", "grouped_lora_dgrad", "grouped_lora_wgrad", "glu_backward")
"""Ops with floating results and no derivative."""
every_differentiable_op = pytest.mark.parametrize("sample", DIFFERENTIABLE, ids=str)


def float_arguments(sample: Sample) -> list[str]:
    return [n for n, t in sample.tensors.items() if t.is_floating_point() and t.element_size() > 1]


@every_differentiable_op
def test_gradients_look_like_their_arguments(sample: Sample) -> None:
    for name, grad in zip(sample.differentiable, gradients(sample), strict=True):
        argument = sample.arguments[name]
        assert (grad.shape, grad.dtype, grad.device) == (argument.shape, argument.dtype, argument.device), name
        assert grad.isfinite().all() and grad.any(), name


@every_differentiable_op
def test_each_gradient_alone_is_what_all_of_them_give(sample: Sample) -> None:
    for name, wanted in zip(sample.differentiable, gradients(sample), strict=True):
        assert_same_bits(gradients(sample, (name,)), [wanted])


@every_differentiable_op
def test_checkpointing_gives_the_same_gradients(sample: Sample) -> None:
    leaves = sample.leaves()
    results = checkpoint(leaves.function(), leaves.tensors, use_reentrant=False)
    grads = torch.autograd.grad(loss(sample, results), [leaves.arguments[name] for name in sample.differentiable])
    assert_same_bits(grads, gradients(sample))


@every_differentiable_op
def test_torch_func_grad(sample: Sample) -> None:
    def run(*tensors: Tensor) -> Tensor:
        changed = sample.replaced(dict(zip(sample.differentiable, tensors, strict=True)))
        results = sample.defined(changed.run())
        return (results[0].double() * torch.linspace(0.5, 1.5, results[0].numel()).view(results[0].shape)).sum()

    tensors = [sample.arguments[name] for name in sample.differentiable]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    wanted = torch.autograd.grad(run(*leaves), leaves)
    assert_same_bits(torch.func.grad(run, tuple(range(len(tensors))))(*tensors), wanted)


@every_differentiable_op
def test_nan_where_not_routed_gives_the_same_gradients_fault_b7(sample: Sample, poison: Callable[[], None]) -> None:
    wanted = gradients(sample)
    assert all(grad.isfinite().all() for grad in wanted)
    assert_same_bits(gradients(sample.with_nan_where_not_routed()), wanted)


@every_differentiable_op
def test_gradients_repeat_to_the_bit(sample: Sample) -> None:
    assert_same_bits(gradients(sample), gradients(sample))


@every_differentiable_op
def test_vmap_of_grad_is_right(sample: Sample) -> None:
    first = sample.arguments[sample.differentiable[0]]
    stacked = torch.stack([first, first.flip(0)])

    def run(tensor: Tensor) -> Tensor:
        return sample.defined(sample.replaced({sample.differentiable[0]: tensor}).run())[0].double().square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        got = torch.vmap(torch.func.grad(run))(stacked)
    assert_same_bits(got, [torch.func.grad(run)(tensor) for tensor in stacked])


@every_differentiable_op
def test_double_backward_is_refused_in_words(sample: Sample) -> None:
    def first_gradients(create_graph: bool) -> tuple[Tensor, ...]:
        leaves = sample.leaves()
        arguments = [leaves.arguments[name] for name in sample.differentiable]
        # The square makes even the gradient of a linear op depend on its arguments.
        return torch.autograd.grad(loss(leaves, leaves.run()).square(), arguments, create_graph=create_graph)

    first = first_gradients(create_graph=True)
    assert_same_bits(first, first_gradients(create_graph=False))  # asking for the graph alone is no error
    for grad in first:
        with pytest.raises(RuntimeError, match=f"nvfp4::{sample.op} has a first derivative only"):
            grad.double().sum().backward(retain_graph=True)


@pytest.mark.parametrize("sample", [s for s in DIFFERENTIABLE if s.op != "fake_quantize"], ids=str)
def test_nested_torch_func_grad_is_refused_in_words(sample: Sample) -> None:
    """Refused, not silently 0. (A straight-through gradient has a right second one, 0 where the loss is linear.)"""

    def run(tensor: Tensor) -> Tensor:
        return sample.defined(sample.replaced({sample.differentiable[0]: tensor}).run())[0].double().square().sum()

    with pytest.raises(RuntimeError, match="nvfp4::.* has (no derivative|a first derivative only)"):
        torch.func.grad(lambda x: torch.func.grad(run)(x).double().sum())(sample.arguments[sample.differentiable[0]])


@pytest.mark.parametrize("sample", [s for s in ALL if s.differentiable or s.op in REFUSING], ids=str)
def test_forward_mode_is_refused_in_words(sample: Sample) -> None:
    for name in sample.differentiable or float_arguments(sample)[:1]:
        with (
            forward_ad.dual_level(),
            pytest.raises(NotImplementedError, match="has no forward-mode derivative"),
        ):
            primal = sample.arguments[name]
            sample.replaced({name: forward_ad.make_dual(primal, torch.ones_like(primal))}).run()


@pytest.mark.parametrize("sample", [s for s in ALL if s.op in REFUSING], ids=str)
def test_ops_without_a_derivative_say_so(sample: Sample) -> None:
    name = float_arguments(sample)[0]
    result = sample.defined(sample.leaves((name,)).run())[0]
    with pytest.raises(RuntimeError, match=f"nvfp4::{sample.op} has no derivative"):
        result.sum().backward()


@pytest.mark.parametrize("sample", [s for s in ALL if s.op in ("quantize", "merge_lora", "moe_route")], ids=str)
def test_ops_into_bytes_or_integers_are_never_differentiable(sample: Sample) -> None:
    results = sample.leaves(tuple(float_arguments(sample))).run()
    assert not any(result.requires_grad for result in results)


@every_differentiable_op
def test_deepcopy_of_results_and_arguments(sample: Sample) -> None:
    assert_same_bits(sample.defined(copy.deepcopy(sample.leaves()).run()), sample.defined(sample.run()))
