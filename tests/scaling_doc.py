"""docs/scaling.md: its words, and the tables that the calculator prints. `python tests/scaling_doc.py` writes it."""

from __future__ import annotations

from pathlib import Path

from torch_nvfp4._plan.card import (
    CARDS,
    EXPERT_BYTES,
    EXPERT_FORWARD,
    EXPERT_PRODUCTS,
    FEW_TOLERANCE,
    HOST_S,
    LAYER_TOLERANCE,
    LINK_EFFICIENCY,
    REST,
    STEP_TOLERANCE,
    USABLE,
)
from torch_nvfp4._plan.layout import Job
from torch_nvfp4._plan.model import read_model
from torch_nvfp4._plan.report import report

DOCS = Path(__file__).parent.parent / "docs"
MODELS = ("qwen3-235b-a22b", "deepseek-v3", "kimi-k2")
GPUS = (8, 64, 512)

_LAYER, _FEW, _STEP = (f"{share:.0%}" for share in (LAYER_TOLERANCE, FEW_TOLERANCE, STEP_TOLERANCE))

_WORDS = f"""# Scaling, on paper

    torch-nvfp4 plan --model-config docs/scaling/kimi-k2.json --gpus 64 --seq-len 4096 --card h200

says for each layout what a card holds, what crosses its links in a step, how long the step takes, and which layout to
take. No run on several cards stands behind these figures: one H200 was measured, the rest is arithmetic. The layouts
themselves: [distributed.md](distributed.md).

Columns: GiB a card for weights, for adapters with their gradients and AdamW's moments, and for what comes and goes
with a step (`_memory.py`, plus the two layers that FSDP2 gathers and the rows that expert parallelism moves); the
peak of them; GB a card and step gathered by FSDP2, exchanged by `all_to_all`, and reduced; seconds of a step; tokens
a second of all cards.

| what | value | from |
| --- | --- | --- |
| experts' products | {EXPERT_PRODUCTS:.0%} of the card's bf16 rate | fitted to `benchmarks/results/layer_*.json` |
| experts' traffic | {EXPERT_BYTES:.0f} bytes for each routed row and each of its H + I columns | likewise |
| experts' forward | {EXPERT_FORWARD:.0%} of forward + backward | likewise |
| a layer takes the host at least | {1e3 * HOST_S:.1f} ms | likewise, few tokens, compiled without CUDA graphs |
| all else | {REST:.0%} of the bf16 rate | what the experts leave of the measured training step |
| links | {LINK_EFFICIENCY:.0%} of NVLink's and of 400 Gb/s a card | assumed |
| memory | {USABLE:.0%} of the card's | assumed |

A test holds the estimate to the measured layers within {_LAYER} ({_FEW} at few tokens) and to the measured training
step (Qwen3-30B-A3B, one H200) within {_STEP} in time, to which "all else" was fitted, and 2 % in memory, to which
nothing was. `h100` and `b200` are scaled from the H200 by their data sheets and not measured.

Taken for granted: experts NVFP4 and all else bf16; adapters fp32, on all experts and attention's linear layers;
layers checkpointed and compiled; every card its own tokens; routing balanced; FSDP2's gathers hidden behind the
computation, the exchange of tokens not; no time for the host sync of the exact exchange. Skewed routing makes the
fullest rank the slowest. Each card's memory while weights are loaded is not counted.

Rank 16, one sequence of 4,096 tokens a card, H200:
"""


def page() -> str:
    parts = [_WORDS]
    for model in MODELS:
        read = read_model(DOCS / "scaling" / f"{model}.json", rank=16)
        parts.append(f"## {read.name}\n")
        parts += [report(read, CARDS["h200"], gpus, Job(4096, 1)) + "\n" for gpus in GPUS]
    return "\n".join(parts)


if __name__ == "__main__":
    (DOCS / "scaling.md").write_text(page())
