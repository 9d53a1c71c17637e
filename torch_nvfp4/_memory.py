"""The memory of a LoRA training step on one device: one model of it, for `inspect` and for `finetune`.

What is counted, in bytes:

    resident     packed experts and packed layers, all other weights as they are held
    adapters     each parameter, its gradient, and what the optimiser keeps for it
    kept         what layers keep for backward: with gradient checkpointing each layer's input, else all of it
    layer        what one layer adds while its backward runs (with checkpointing its recomputed activations too)
    logits       of the head and the loss, where the vocabulary makes them large

They are not all there at once, so the peak is the largest of these moments (each beside weights, adapters, moments):

    loss         all that layers keep, and the logits; no gradient yet
    first        all that layers keep, and the layer that backward begins with
    last         the layer that backward ends with, and all gradients

Not counted: the CUDA context and its libraries (about half a GiB), what the allocator reserves without using it, the
workspace of compilers and autotuning, weights while they are loaded, and a vision tower's activations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Compiled = Literal["off", "layers", "model", "step"]
"""What torch.compile takes: nothing, each layer by itself, the model with its loss (as Trainer does, where logits are a
result of the graph too), or a step that returns its loss alone."""

# Bytes of a logit at the highest moment, for logits of 2 bytes and of 4. Eager: log-softmax, its gradient and that of
# the fp32 logits, 4 each; the logits are gone by then. Compiled, backward makes a logit's gradient (2) from the logit
# (2); where the graph returns logits too, as fp32 under Trainer's autocast, it also takes zeros (4) for their gradient.
# Read from transformers 5.23's ForCausalLMLoss, and from the graphs that torch 2.13 makes of it.
_LOGIT_BYTES: dict[Compiled, tuple[int, int]] = {"off": (12, 12), "layers": (12, 12), "model": (8, 12), "step": (4, 8)}


@dataclass(frozen=True)
class Sizes:
    """What of an architecture decides its activations, in elements; of a layer where the layers differ the widest.

    hidden: H. query, key_value: heads times head size. slots: K. pre: columns of gate_up (2I, or I without a gate).
    intermediate: I. shared: the width of shared experts. vocab: of the head.
    """

    layers: int
    hidden: int
    query: int
    key_value: int
    slots: int
    pre: int
    intermediate: int
    shared: int
    vocab: int

    @classmethod
    def of(cls, config: Any, gated: bool = True) -> "Sizes":
        """From a transformers config. Names differ between architectures; what one lacks counts as absent."""
        text = config.get_text_config()

        def first(*names: str) -> int:
            return next((v for name in names if isinstance(v := getattr(text, name, None), int) and v), 0)

        hidden, heads = text.hidden_size, text.num_attention_heads
        latent = first("qk_nope_head_dim") + first("qk_rope_head_dim")
        head_dim = latent or first("head_dim") or hidden // heads
        intermediate = first("moe_intermediate_size", "intermediate_size")
        shared = first("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        shared = shared or intermediate * first("n_shared_experts", "moe_num_shared_experts")
        return cls(
            layers=text.num_hidden_layers,
            hidden=hidden,
            query=heads * head_dim,
            key_value=(heads if latent else first("num_key_value_heads") or heads) * head_dim,
            slots=first("num_experts_per_tok", "top_k_experts", "moe_k") or 1,
            pre=(2 if gated else 1) * intermediate,
            intermediate=intermediate,
            shared=shared,
            vocab=text.vocab_size,
        )


@dataclass(frozen=True)
class Run:
    """tokens: of a micro-batch. itemsize: of an activation. optimizer: bytes that it keeps for a byte of an adapter."""

    tokens: int
    itemsize: int = 2
    gradient_checkpointing: bool = True
    compiled: Compiled = "model"
    optimizer: int = 2


@dataclass(frozen=True)
class Activations:
    """The bytes of a micro-batch: what all layers keep, what one adds in its backward, and the logits' share."""

    kept: int
    kept_last: int
    layer: int
    logits: int


def activations(sizes: Sizes, run: Run) -> Activations:
    """What a micro-batch of `run.tokens` needs.

    Per token, in elements. Attention and norms keep 6 H, 4 Q and 2 KV (q, k, v before and after their rotation, the
    attention's result). The experts keep K·pre (pre-activations of M = T·K rows), and their indices. In backward they
    hold K·pre once more (its gradient) and K·H (rows of the input's gradient), eager also K·I (the activation).
    Shared experts are dense: 3 widths kept, 3 more in backward.

    Measured on an H200, the experts of T = 8192, H 2048, I 768, E 128, K 8, R 16: 197 MiB kept and 615 MiB (eager 759)
    above what is resident; this gives 192, and 640 (736). Training steps of Qwen3-30B-A3B with checkpointed layers,
    4096 tokens, R = 16: compiled layers 33.04 GiB, this gives 32.94.
    """
    s, size = sizes, run.tokens * run.itemsize
    attention = 6 * s.hidden + 4 * s.query + 2 * s.key_value
    own = attention + s.slots * s.pre + 3 * s.shared
    extra = s.slots * (s.pre + s.hidden + (s.intermediate if run.compiled == "off" else 0)) + 3 * s.shared
    routing = run.tokens * s.slots * 12  # rows, their inverse and ids: int32 each
    logits = run.tokens * s.vocab * _LOGIT_BYTES[run.compiled][run.itemsize > 2]
    if run.gradient_checkpointing:
        kept_one = size * s.hidden
        return Activations(s.layers * kept_one, kept_one, size * (own + extra) + routing, logits)
    kept_one = size * own + routing
    return Activations(s.layers * kept_one, kept_one, size * extra, logits)


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step, by part, and the moments of which the largest is the peak.

    weights: resident, adapters apart. adapters: their parameters; gradients and moments belong to them.
    """

    weights: int
    adapters: int
    gradients: int
    moments: int
    activations: Activations

    @property
    def stages(self) -> Mapping[str, int]:
        """What each moment adds to weights, adapters and moments."""
        a = self.activations
        return {
            "loss": a.kept + a.logits,
            "first layer of backward": a.kept + a.layer,
            "last layer of backward": a.kept_last + a.layer + self.gradients,
        }

    @property
    def highest_stage(self) -> str:
        return max(self.stages, key=lambda name: self.stages[name])

    @property
    def peak(self) -> int:
        return self.weights + self.adapters + self.moments + self.stages[self.highest_stage]


def estimate(weights: int, adapters: int, sizes: Sizes, run: Run) -> Estimate:
    """`weights`, `adapters`: bytes of parameters, as they are held."""
    return Estimate(weights, adapters, adapters, run.optimizer * adapters, activations(sizes, run))
