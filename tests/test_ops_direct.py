"""The layer checks its arguments once, and its small ops are seen by everything that watches ops."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from samples import samples
from strategies import make_layer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nvfp4.ops import direct, observe, validation


class Subclass(Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nvfp4":
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


WATCHERS: dict[str, Callable[[], Any]] = {
    "a dispatch mode": Dispatched,
    "a function mode": Functions,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a profiler": profiled,
    "an observer": lambda: observe.observing(mock.Mock()),
}


def test_the_kernels_themselves_where_nobody_watches() -> None:
    x = torch.ones(2)
    assert direct.small_ops([x, None, torch.nn.Parameter(x)]) is direct.KERNELS["cpu"]


@pytest.mark.parametrize("watcher", WATCHERS)
def test_the_dispatcher_where_something_watches(watcher: str) -> None:
    x = torch.ones(2)
    with WATCHERS[watcher]():
        assert direct.small_ops([x]) is torch.ops.nvfp4
    assert direct.small_ops([x]) is direct.KERNELS["cpu"]


def test_the_dispatcher_for_subclasses_and_transforms_and_other_devices() -> None:
    x = torch.ones(2)
    assert direct.small_ops([x, x.as_subclass(Subclass)]) is torch.ops.nvfp4
    assert direct.small_ops([x.to("meta")]) is torch.ops.nvfp4
    seen = []
    torch.func.grad(lambda y: seen.append(direct.small_ops([x])) or y.sum())(x)
    assert seen == [torch.ops.nvfp4]


def test_a_layer_is_checked_once_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    plain_check = validation.check
    monkeypatch.setattr(validation, "check", lambda op, arguments: (checked.append(op), plain_check(op, arguments)))
    layer = make_layer(bias=True).requires_grad()
    layer.run().sum().backward()
    assert checked == ["moe_lora"]


@pytest.mark.parametrize("sample", samples(ops=vars(direct.KERNELS["cpu"])), ids=str)
def test_a_small_op_called_by_itself_is_checked(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(validation, "check", lambda op, arguments: checked.append(op))
    sample.run()
    assert checked == [sample.op]


def test_a_dispatch_mode_sees_every_small_op_of_a_layer() -> None:
    layer = make_layer().requires_grad()
    with Dispatched() as seen:
        layer.run().sum().backward()
    assert set(seen.ops) == set(vars(direct.KERNELS["cpu"]))


def test_watched_or_not_the_bits_are_the_same() -> None:
    def results() -> list[Tensor]:
        fresh = make_layer(bias=True, pattern="minus_one", dtype=torch.bfloat16).requires_grad()
        out = fresh.run()
        return [out, *torch.autograd.grad(out.float().square().sum(), list(fresh.differentiable.values()))]

    with Dispatched():
        watched = results()
    assert all(map(torch.equal, results(), watched))


def test_a_global_scale_that_requires_a_gradient_gets_no_graph() -> None:
    layer = make_layer()
    scale = layer.gate_up_global_scale.clone().requires_grad_()
    assert not layer.replaced(gate_up_global_scale=scale).run().requires_grad
