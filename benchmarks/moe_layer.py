"""One MoE layer with LoRA on a CUDA card, forward and forward + backward, against what public torch gives.

Baselines of the same run, fifteen lines of torch each, eager and compiled: `packed` dequantises all experts with bit
arithmetic and multiplies with `torch._grouped_mm`; `resident` keeps the dense bf16 weights instead. The floor is
twice the forward's base FLOPs (frozen weights have no gradient) at the matrix rate that this run measures.

Run: `python benchmarks/moe_layer.py [--cases NAME …] [--out FILE.json]`.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_nvfp4.ops import cuda

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A layer's sizes; `skew` > 0 draws the router's scores with a bias that falls off over the experts."""

    name: str
    t: int
    h: int
    i: int
    e: int
    k: int
    r: int
    skew: float = 0.0


CASES = (
    Case("qwen3-30b-a3b-512", 512, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-8192", 8192, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-32768", 32768, 2048, 768, 128, 8, 16),
    Case("gpt-oss-20b-8192", 8192, 2880, 2880, 32, 4, 16),
    Case("mixtral-8x7b-8192", 8192, 4096, 14336, 8, 2, 32),
    Case("deepseek-v3-like-8192", 8192, 7168, 2048, 64, 8, 16),
    Case("qwen3-30b-a3b-8192-skewed", 8192, 2048, 768, 128, 8, 16, skew=2.0),
    Case("qwen3-30b-a3b-1", 1, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-16", 16, 2048, 768, 128, 8, 16),
    Case("qwen3-30b-a3b-64", 64, 2048, 768, 128, 8, 16),
)


class Inputs:
    """Random tensors of a case on the device; weights scaled so that activations stay of order one."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        options: dict[str, Any] = dict(device="cuda", generator=generator)

        def normal(*shape: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return (torch.randn(*shape, **options) * scale).to(dtype).requires_grad_()

        def packed(n: int, c: int, halves: int) -> tuple[Tensor, Tensor, Tensor]:
            codes = torch.randint(0, 256, (case.e, n, c // 2), dtype=torch.uint8, **options)
            scales = torch.randint(48, 72, (case.e, n, c // 16), dtype=torch.uint8, **options)
            global_scale = (1 + torch.rand(case.e, halves, **options)) * 0.2 * c**-0.5
            return codes, scales.view(torch.float8_e4m3fn), global_scale

        self.case = case
        self.x = normal(case.t, case.h, scale=1.0, dtype=BF16)
        scores = torch.rand(case.t, case.e, **options)
        scores -= case.skew * torch.arange(case.e, device="cuda") / case.e
        weights, self.ids = scores.topk(case.k, 1)
        self.weights = torch.softmax(weights, 1).requires_grad_()
        self.gate_up = packed(2 * case.i, case.h, 2)
        self.down = packed(case.h, case.i, 1)
        self.factors = [
            normal(case.e, case.r, case.h, scale=case.h**-0.5), normal(case.e, 2 * case.i, case.r, scale=0.1),
            normal(case.e, case.r, case.i, scale=case.i**-0.5), normal(case.e, case.h, case.r, scale=0.1),
        ]  # fmt: skip
        self.grad = torch.randn(case.t, case.h, **options).to(BF16)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, *self.factors]

    @property
    def forward_flops(self) -> float:
        case = self.case
        return 2.0 * case.t * case.k * case.h * case.i * 3


def dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Public torch: e2m1 by moving its bits to the top of an fp16."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int16)
    values = (((nibbles & 7) << 9) | ((nibbles & 8) << 12)).view(torch.float16).float() * 16384.0
    rows = global_scale.repeat_interleave(codes.shape[1] // global_scale.shape[1], 1)
    e, n, blocks = scales.shape
    scale = (scales.float() * rows[..., None]).unsqueeze(-1)
    return (values.view(e, n, blocks, 16) * scale).view(e, n, -1).to(BF16)


def torch_layer(
    x: Tensor, ids: Tensor, weights: Tensor, factors: list[Tensor], gate_up: Tensor, down: Tensor
) -> Tensor:
    """Route by argsort, grouped matrix products for the base and both LoRA factors, SwiGLU, gather-sum."""
    k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    offsets = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    offsets = offsets.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)

    def project(rows: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = torch._grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
        u = torch._grouped_mm(rows, a.to(BF16).transpose(1, 2), offs=offsets)
        return y + torch._grouped_mm(u, b.to(BF16).transpose(1, 2), offs=offsets)

    pre = project(x[order // k], gate_up, *factors[:2])
    gate, up = pre.chunk(2, -1)
    h = (F.silu(gate) * up * weights.flatten()[order, None]).to(BF16)
    y = project(h, down, *factors[2:])
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    return y[inverse].view(*ids.shape, -1).sum(1)


def packed_layer(x: Tensor, ids: Tensor, weights: Tensor, factors: list[Tensor], gate_up: Any, down: Any) -> Tensor:
    return torch_layer(x, ids, weights, factors, dequantize(*gate_up), dequantize(*down))


def ours(inputs: Inputs) -> Tensor:
    a1, b1, a2, b2 = inputs.factors
    return torch.ops.nvfp4.moe_lora(inputs.x, inputs.ids, inputs.weights, *inputs.gate_up, *inputs.down, a1, b1, a2, b2)


def fp32_results(inputs: Inputs) -> list[Tensor]:
    """Output and gradients, an expert at a time in fp32 on the dequantised weights."""
    leaves = [leaf.detach().float().requires_grad_() for leaf in inputs.leaves]
    x, weights, a1, b1, a2, b2 = leaves
    out = torch.zeros_like(x)
    for e in range(inputs.case.e):
        tokens, slots = (inputs.ids == e).nonzero(as_tuple=True)
        w1, w2 = (_dense_fp32(w, e) for w in (inputs.gate_up, inputs.down))
        gate, up = (x[tokens] @ w1.t() + (x[tokens] @ a1[e].t()) @ b1[e].t()).chunk(2, -1)
        h = F.silu(gate) * up * weights[tokens, slots, None]
        out = out.index_add(0, tokens, h @ w2.t() + (h @ a2[e].t()) @ b2[e].t())
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad.float())]


def _dense_fp32(packed: tuple[Tensor, Tensor, Tensor], e: int) -> Tensor:
    codes, scales, global_scale = (part[e : e + 1] for part in packed)
    return torch.ops.nvfp4.dequantize(codes, scales, global_scale, dtype=torch.float32)[0]


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """Median over runs queued one after another and timed by events: launches of the host hide behind the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


def measure(
    inputs: Inputs, forward: Callable[[], Tensor], repeats: int, reference: list[Tensor] | None
) -> dict[str, Any]:
    """Times, memory above what was resident, and the error of output and gradients."""

    def step() -> tuple[Tensor, ...]:
        out = forward()
        return (out.detach(), *torch.autograd.grad(out, inputs.leaves, inputs.grad))

    results = step()
    errors = None
    if reference is not None:
        errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(results, reference, strict=True)]
    del results
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    saved = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    torch.autograd.grad(out, inputs.leaves, inputs.grad)
    peak = torch.cuda.max_memory_allocated() - before
    del out
    with torch.no_grad():
        forward_ms = median_ms(forward, repeats)
    return dict(fwd_ms=forward_ms, fwd_bwd_ms=median_ms(step, repeats), saved_mib=saved / 2**20, peak_mib=peak / 2**20,
                errors=errors)  # fmt: skip


def matmul_rate() -> float:
    """bf16 FLOP/s of an 8192³ product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return 2 * 8192**3 / (median_ms(lambda: a @ b, 10) * 1e-3)


def run_case(case: Case, repeats: int, baselines: bool, rate: float, check: bool) -> dict[str, Any]:
    inputs = Inputs(case)
    floor = 2 * inputs.forward_flops / rate * 1e3
    reference = fp32_results(inputs) if check else None
    rows = {"torch_nvfp4 eager": measure(inputs, lambda: ours(inputs), repeats, reference)}
    if baselines:
        args = (inputs.x, inputs.ids, inputs.weights, inputs.factors)
        compiled_packed = torch.compile(packed_layer, fullgraph=True)
        rows["packed compiled"] = measure(
            inputs, lambda: compiled_packed(*args, inputs.gate_up, inputs.down), repeats, reference
        )
        dense = [torch.ops.nvfp4.dequantize(*w, dtype=BF16) for w in (inputs.gate_up, inputs.down)]
        compiled_layer = torch.compile(torch_layer, fullgraph=True)
        rows["resident compiled"] = measure(inputs, lambda: compiled_layer(*args, *dense), repeats, reference)
        rows["resident eager"] = measure(inputs, lambda: torch_layer(*args, *dense), repeats, reference)
        torch._dynamo.reset()
    report(case, floor, rows)
    return dict(case=asdict(case), floor_ms=floor, results=rows)


def report(case: Case, floor: float, rows: dict[str, dict[str, Any]]) -> None:
    print(f"{case.name}: floor {floor:.2f} ms")
    mine = rows["torch_nvfp4 eager"]["fwd_bwd_ms"]
    for name, row in rows.items():
        error = "" if row["errors"] is None else f"  error {max(row['errors']):.4f}"
        print(
            f"  {name:18s} fwd {row['fwd_ms']:8.3f}  fwd+bwd {row['fwd_bwd_ms']:8.3f} ms  "
            f"({row['fwd_bwd_ms'] / mine:5.2f}x ours, {row['fwd_bwd_ms'] / floor:5.1f}x floor)  "
            f"saved {row['saved_mib']:7.0f}  peak {row['peak_mib']:7.0f} MiB{error}", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--out", default=None, help="JSON file for the results")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="leave out the fp32 reference")
    cuda.enable()
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rate = matmul_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {rate / 1e12:.0f} TFLOP/s in bf16")
    chosen = [case for case in CASES if case.name in options.cases]
    results = [run_case(case, options.repeats, not options.no_baselines, rate, not options.no_check) for case in chosen]
    if options.out:
        with open(options.out, "w") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, matmul_tflops=rate / 1e12,
                           cases=results), file, indent=1)  # fmt: skip


if __name__ == "__main__":
    main()
