"""The gate's second part: what every op does about derivatives, in eager mode."""

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.functional as autograd_functional
from samples import Sample, assert_same_bits, gradients, loss, samples
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from torch_nvfp4.format import saturation_mask

Function = Callable[..., Tensor]

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


def function_of(sample: Sample, names: tuple[str, ...] | None = None) -> Function:
    """The weighted sum of the op's defined results as a function of the named arguments (None: all differentiable)."""
    names = sample.differentiable if names is None else names

    def run(*tensors: Tensor) -> Tensor:
        y = sample.defined(sample.replaced(dict(zip(names, tensors, strict=True))).run())[0].double()
        return (y * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum()

    return run


def straight_through(sample: Sample) -> Function:
    """`function_of` fake_quantize in stock torch."""
    x, scale, fmt = (sample.arguments.get(name) for name in ("x", "global_scale", "format"))
    values = sample.run()[0]
    passes = torch.ones_like(x) if scale is None else (~saturation_mask(x, scale, fmt or "nvfp4")).to(x.dtype)

    def run(x: Tensor) -> Tensor:
        y = (x * passes + (values - x * passes).detach()).double()
        return (y * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum()

    return run


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def by_grad(f: Function, x: Tensor) -> Tensor:
    """A penalty on the gradient beside another use of x: what autograd could leave out without a word."""
    x = leaf(x)
    loss = f(x)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(loss + g.double().square().sum(), x)[0]


def by_backward(f: Function, x: Tensor, inputs: bool = False) -> Tensor:
    x = leaf(x)
    loss = f(x)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + g.double().square().sum()).backward(inputs=[x] if inputs else None)
    assert x.grad is not None
    return x.grad


def by_checkpoint(f: Function, x: Tensor) -> Tensor:
    return by_grad(lambda x: checkpoint(f, x, use_reentrant=False), x)


def by_grad_of_func_grad(f: Function, x: Tensor) -> Tensor:
    x = leaf(x)
    return torch.autograd.grad(f(x) + torch.func.grad(f)(x).double().square().sum(), x)[0]


def by_grad_of_vmap(f: Function, x: Tensor) -> Tensor:
    x = leaf(torch.stack([x, x]))
    g = torch.vmap(torch.func.grad(f))(x).double()
    return torch.autograd.grad(x.double().sum() + g.square().sum(), x)[0]


def by_incoming_gradient(f: Function, x: Tensor) -> Tensor:
    x, scale = leaf(x), torch.ones((), dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(f(x), x, scale, create_graph=True)
    return torch.autograd.grad(scale + g.double().square().sum(), scale)[0]


def by_vjp(f: Function, x: Tensor) -> Tensor:
    pull = torch.func.vjp(f, x)[1]
    return torch.func.grad(lambda scale: pull(scale)[0].double().square().sum())(torch.ones((), dtype=torch.float64))


def by_dual_incoming_gradient(f: Function, x: Tensor) -> Tensor:
    x, scale = leaf(x), torch.ones((), dtype=torch.float64)
    loss = f(x)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(torch.autograd.grad(loss, x, forward_ad.make_dual(scale, scale))[0]).tangent


SECOND_DERIVATIVES: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad": by_grad,
    "backward": by_backward,
    "backward_inputs": lambda f, x: by_backward(f, x, inputs=True),
    "checkpoint": by_checkpoint,
    "func_hessian": lambda f, x: torch.func.hessian(f)(x),
    "jacrev_of_jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
    "jvp_of_func_grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,))[1],
    "func_grad_of_func_grad": lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).double().square().sum())(x),
    "grad_of_func_grad": by_grad_of_func_grad,
    "grad_of_vmap_of_func_grad": by_grad_of_vmap,
    "vmap_of_jvp_of_func_grad": lambda f, x: torch.vmap(lambda v: torch.func.jvp(torch.func.grad(f), (x,), (v,))[1])(
        torch.stack([x, x])
    ),
    "functional_hvp": lambda f, x: autograd_functional.hvp(f, x, x)[1],
    "functional_vhp": lambda f, x: autograd_functional.vhp(f, x, x)[1],
    "functional_hessian": lambda f, x: autograd_functional.hessian(f, x),
    "functional_hessian_vectorized": lambda f, x: autograd_functional.hessian(f, x, vectorize=True),
    "incoming_gradient": by_incoming_gradient,
    "dual_incoming_gradient": by_dual_incoming_gradient,
    "vjp": by_vjp,
}
"""Ways to a second derivative (through an incoming gradient: of first order where the op is straight-through)."""


@pytest.mark.parametrize("way", SECOND_DERIVATIVES)
@every_differentiable_op
def test_second_derivatives_are_right_or_refused_in_words(sample: Sample, way: str) -> None:
    """Never 0, nor left out. The square makes even the gradient of a linear op depend on its arguments."""
    compute, name = SECOND_DERIVATIVES[way], sample.differentiable[0]
    x, run = sample.arguments[name], function_of(sample, (name,))
    refused = pytest.raises(RuntimeError, match="nvfp4::.* has (no forward-mode derivative|a first derivative only)")
    forward_mode = way in ("func_hessian", "jvp_of_func_grad", "vmap_of_jvp_of_func_grad")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        if sample.op != "fake_quantize" or forward_mode:
            with refused:
                compute(lambda x: run(x).square(), x)
        else:
            stock = straight_through(sample)
            wanted = compute(lambda x: stock(x).square(), x)
            assert wanted.any()
            torch.testing.assert_close(compute(lambda x: run(x).square(), x), wanted)


def second_of_autograd(run: Function, a: Tensor, b: Tensor) -> Tensor | None:
    a, b = leaf(a), leaf(b)
    (g,) = torch.autograd.grad(run(a, b), a, create_graph=True)
    return torch.autograd.grad(b.double().sum() + g.double().square().sum(), b)[0] - 1


def second_of_func(run: Function, a: Tensor, b: Tensor) -> Tensor | None:
    b = leaf(b)
    g = torch.func.grad(run)(a, b)
    return torch.autograd.grad(b.double().sum() + g.double().square().sum(), b)[0] - 1


@pytest.mark.parametrize("second", [second_of_autograd, second_of_func])
@pytest.mark.parametrize("sample", [s for s in DIFFERENTIABLE if s.op != "fake_quantize"], ids=str)
def test_a_gradient_refuses_towards_all_it_depends_on(sample: Sample, second: Callable[..., Tensor]) -> None:
    """With no other gradient asked for, so that as little as can be is saved; and with a constant incoming one."""
    for name, other in itertools.permutations(sample.differentiable, 2):
        run = function_of(sample, (name, other))
        a, b = sample.arguments[name], sample.arguments[other]
        depends = not torch.equal(torch.func.grad(run)(a, b), torch.func.grad(run)(a, -2 * b))
        try:
            derivative = second(run, a, b)
        except RuntimeError as error:
            assert f"nvfp4::{sample.op} has a first derivative only" in str(error)
        else:
            assert not depends, (name, other)
            assert not derivative.any()


@every_differentiable_op
def test_create_graph_alone_changes_no_gradient(sample: Sample) -> None:
    leaves = sample.leaves()
    arguments = [leaves.arguments[name] for name in sample.differentiable]
    grads = torch.autograd.grad(loss(leaves, leaves.run()), arguments, create_graph=True)
    assert_same_bits([grad.detach() for grad in grads], gradients(sample))


@every_differentiable_op
def test_levels_of_functorch_that_do_not_meet_are_of_first_order(sample: Sample) -> None:
    name = sample.differentiable[0]
    x, run = sample.arguments[name], function_of(sample, (name,))
    wanted = torch.func.grad(run)(x)
    one = torch.ones((), dtype=torch.float64)
    outside = torch.func.grad(lambda x: torch.func.grad(lambda factor: run(x) * factor)(one))(x)
    inside = torch.func.grad(lambda factor: (torch.func.grad(run)(x).double() * factor).sum())(one)
    assert_same_bits([outside], [wanted])
    torch.testing.assert_close(inside, wanted.double().sum())
    x = leaf(x)
    value = torch.func.grad_and_value(run)(x)[1]
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], wanted)  # the layer's small ops are summed up apart


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
    leaves = sample.leaves((name,))
    argument = leaves.arguments[name]
    result = sample.defined(leaves.run())[0]
    with pytest.raises(RuntimeError, match=f"nvfp4::{sample.op} has no derivative"):  # not left out of a sum
        torch.autograd.grad(argument.double().sum() + result.double().sum(), argument)


@pytest.mark.parametrize("sample", [s for s in ALL if s.op in ("quantize", "merge_lora", "moe_route")], ids=str)
def test_ops_into_bytes_or_integers_are_never_differentiable(sample: Sample) -> None:
    results = sample.leaves(tuple(float_arguments(sample))).run()
    assert not any(result.requires_grad for result in results)


@every_differentiable_op
def test_deepcopy_of_results_and_arguments(sample: Sample) -> None:
    assert_same_bits(sample.defined(copy.deepcopy(sample.leaves()).run()), sample.defined(sample.run()))
