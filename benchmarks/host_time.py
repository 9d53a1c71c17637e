"""What a call of the layer costs the host beside its kernels: microseconds of CPU time a call, at tiny sizes.

`kernels` calls the CPU kernels that the step called, with the same arguments and nothing around them. `around` is the
rest: argument checks, dispatch, autograd and combine, most of which a CUDA call pays too. The lowest of several
repeats, in one thread.

Run: `python benchmarks/host_time.py`.
"""

import time
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from torch_nvfp4.format import quantize
from torch_nvfp4.ops import direct, validation

T, K, E, H, I, R = 1, 1, 1, 32, 16, 2
CALLS, REPEATS = 200, 15


def inputs() -> dict[str, Tensor]:
    """The tensor arguments of `moe_lora`; x, router weights and LoRA factors require a gradient."""
    x, weights = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
    packed: list[Tensor] = []
    factors: list[Tensor] = []
    for n, c in ((2 * I, H), (H, I)):
        packed += quantize(torch.randn(E, n, c), torch.full((E, 1), 1e-3))
        factors += [torch.randn(E, R, c, requires_grad=True), torch.randn(E, n, R, requires_grad=True)]
    names = [argument.name for argument in torch.ops.nvfp4.moe_lora.default._schema.arguments]
    return dict(zip(names, [x, torch.randint(0, E, (T, K)), weights, *packed, *factors], strict=False))


def microseconds(call: Callable[[], Any]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS, timer=time.process_time)) / CALLS * 1e6


def kernels_of(step: Callable[[], Any]) -> Callable[[], None]:
    """One call of every kernel that `step` calls, with the arguments that it gets there."""
    calls: list[Callable[[], Any]] = []

    def recorder(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
            calls.append(lambda: kernel(*detached, **kwargs))
            return kernel(*args, **kwargs)

        return record

    kernels = vars(direct.KERNELS["cpu"])
    recorders = SimpleNamespace(**{op: recorder(kernel) for op, kernel in kernels.items()})
    with mock.patch.dict(direct.KERNELS, cpu=recorders):
        step()

    def run() -> None:
        for call in calls:
            call()

    return run


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    arguments = inputs()
    tensors = list(arguments.values())
    leaves = [t for t in tensors if t.requires_grad]
    grad = torch.randn(T, H)

    def forward() -> Tensor:
        with torch.no_grad():
            return torch.ops.nvfp4.moe_lora(*tensors)

    def step() -> Any:
        return torch.autograd.grad(torch.ops.nvfp4.moe_lora(*tensors), leaves, grad)

    print(f"{'':22}{'all':>8}{'kernels':>9}{'around':>8}  us")
    for name, call in (("forward", forward), ("forward and backward", step)):
        total, kernels = microseconds(call), microseconds(kernels_of(call))
        print(f"{name:22}{total:8.0f}{kernels:9.0f}{total - kernels:8.0f}")
    print(f"{'checking the arguments':22}{microseconds(lambda: validation.check('moe_lora', arguments)):8.1f}")


if __name__ == "__main__":
    main()
