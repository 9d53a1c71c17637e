"""One MoE layer forward + backward on the CPU: packed NVFP4 experts against the same layer on dense fp32 experts.

The baseline is what one writes by hand: torch.mm per expert on dense, unquantised fp32 weights, LoRA on both
projections, autograd for the gradients of x, the router weights and the factors. Both sides run in this process, in
turns, and the median of each is printed as one JSON line.

    python benchmarks/cpu_layer.py [--threads 2] [--repeats 30]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from torch_nvfp4 import NVFP4Experts

T, H, I, E, K, R = 512, 256, 128, 16, 4, 8
SCALING = 2.0


class DenseExperts(torch.nn.Module):
    """fp32 experts, one torch.mm per expert and projection."""

    def __init__(self, gate_up: Tensor, down: Tensor, packed: NVFP4Experts) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        for name in ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b"):
            setattr(self, name, torch.nn.Parameter(getattr(packed, name).detach().clone()))

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            tokens, slots = (topk_ids == e).nonzero(as_tuple=True)
            x_e = x[tokens]
            pre = torch.mm(x_e, self.gate_up[e].t()) + SCALING * torch.mm(
                torch.mm(x_e, self.gate_up_lora_a[e].t()), self.gate_up_lora_b[e].t()
            )
            gate, up = pre.chunk(2, -1)
            h = torch.nn.functional.silu(gate) * up
            y = torch.mm(h, self.down[e].t()) + SCALING * torch.mm(
                torch.mm(h, self.down_lora_a[e].t()), self.down_lora_b[e].t()
            )
            out = out.index_add(0, tokens, y * topk_weights[tokens, slots].unsqueeze(-1))
        return out


def leaves(experts: torch.nn.Module, x: Tensor, topk_weights: Tensor) -> list[Tensor]:
    return [x, topk_weights, *(p for p in experts.parameters() if p.requires_grad)]


def median_ms(step: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    gate_up, down = torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5
    packed = NVFP4Experts.from_dense(gate_up, down)
    packed.add_lora(R, scaling=SCALING)
    for b in (packed.gate_up_lora_b, packed.down_lora_b):
        torch.nn.init.normal_(b, std=0.05)
    dense = DenseExperts(gate_up, down, packed)
    x = torch.randn(T, H, requires_grad=True)
    weights, ids = torch.randn(T, E).softmax(-1).topk(K)
    weights = weights.detach().requires_grad_()
    grad = torch.randn(T, H)

    def step(experts: torch.nn.Module) -> Callable[[], object]:
        wanted = leaves(experts, x, weights)
        return lambda: torch.autograd.grad(experts(x, ids, weights), wanted, grad)

    sides = {"dense_fp32": step(dense), "nvfp4": step(packed)}
    for run in sides.values():
        median_ms(run, 5)
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(5):  # in turns, so that a busy machine slows both
        for name, run in sides.items():
            rounds[name].append(median_ms(run, -(-args.repeats // 5)))
    result = {name: round(statistics.median(values), 2) for name, values in rounds.items()}
    with torch.no_grad():
        difference = (packed(x, ids, weights) - dense(x, ids, weights)).norm() / dense(x, ids, weights).norm()
    print(
        json.dumps(
            {
                "shape": {"T": T, "H": H, "I": I, "E": E, "K": K, "R": R},
                "forward_backward_ms": result,
                "ratio": round(result["nvfp4"] / result["dense_fp32"], 2),
                "expert_bytes": {
                    "dense_fp32": 4 * (gate_up.numel() + down.numel()),
                    "nvfp4": packed.packed_bytes,
                },
                "quantisation_error": round(float(difference), 3),
                "threads": args.threads,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
