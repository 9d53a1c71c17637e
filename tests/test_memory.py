"""The model of training memory against what an H200 measured, and how its parts come together."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, DeepseekV3Config, NemotronHConfig, Qwen3MoeConfig

from torch_nvfp4._memory import Activations, Estimate, Run, Sizes, activations, estimate

GIB, MIB = 2**30, 2**20
E, H, I, LAYERS, R, QUERY, KEY_VALUE, VOCAB = 128, 2048, 768, 48, 16, 4096, 512, 151936
QWEN = Qwen3MoeConfig(
    hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=8, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, vocab_size=VOCAB, num_hidden_layers=LAYERS, intermediate_size=6144,
)  # fmt: skip
EXPERTS = LAYERS * E * 3 * H * I
OTHER = 2 * (LAYERS * (2 * H * QUERY + 2 * H * KEY_VALUE + E * H) + 2 * VOCAB * H)
ADAPTERS = 4 * LAYERS * R * (E * (H + 2 * I + H + I) + 2 * (H + QUERY) + 2 * (H + KEY_VALUE))
PACKED = EXPERTS * 9 // 16  # 4 bits, and a byte for 16


@pytest.mark.parametrize(
    ("experts", "run", "resident", "peak"),
    [(PACKED, Run(4096, compiled="layers"), 18.059, 33.041), (2 * EXPERTS, Run(4096, compiled="off"), 56.872, 71.857)],
    ids=["packed, compiled layers", "dense, eager"],
)
def test_qwen3_30b_on_an_h200(experts: int, run: Run, resident: float, peak: float) -> None:
    """Trainer, AdamW, fp32 adapters of rank 16 on attention and experts, 4096 tokens, checkpointed layers."""
    found = estimate(experts + OTHER, ADAPTERS, Sizes.of(QWEN), run)
    assert found.weights / GIB == pytest.approx(resident, rel=1e-3)
    assert found.peak / GIB == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("compiled", "kept", "peak"), [("layers", 197, 615), ("off", 197, 759)])
def test_a_layers_experts_on_an_h200(compiled: Any, kept: int, peak: int) -> None:
    """The experts alone: a layer without attention keeps, and needs in its backward, what was measured of them."""
    sizes = Sizes(1, H, 0, 0, 8, 2 * I, I, 0, 0)
    found = activations(sizes, Run(8192, compiled=compiled, gradient_checkpointing=False))
    norms = 8192 * 2 * 6 * H  # counted with attention, and not part of the experts
    assert (found.kept - norms) / MIB == pytest.approx(kept, rel=0.05)
    assert (found.kept - norms + found.layer) / MIB == pytest.approx(peak, rel=0.06)


def test_moments_of_a_step() -> None:
    found = Estimate(1000, 10, 10, 20, Activations(kept=300, kept_last=3, layer=50, logits=40))
    assert found.stages == {
        "loss": 340, "first layer of backward": 350, "last layer of backward": 63,
    }  # fmt: skip
    assert found.highest_stage == "first layer of backward" and found.peak == 1000 + 10 + 20 + 350


def test_checkpointing_compiling_and_dtype_change_what_they_should() -> None:
    sizes = Sizes.of(QWEN)
    checkpointed, whole = (activations(sizes, Run(512, gradient_checkpointing=on)) for on in (True, False))
    assert checkpointed.kept == 512 * 2 * H * LAYERS < whole.kept / 10
    assert checkpointed.layer > whole.layer and checkpointed.logits == whole.logits
    logits = {
        how: activations(sizes, Run(1, compiled=how)).logits // VOCAB for how in ("off", "layers", "model", "step")
    }
    assert logits == {"off": 12, "layers": 12, "model": 8, "step": 4}
    assert activations(sizes, Run(1, itemsize=4, compiled="step")).logits == 8 * VOCAB
    assert activations(sizes, Run(2048)).kept == 4 * checkpointed.kept


def test_sizes_of_other_architectures() -> None:
    deepseek = Sizes.of(DeepseekV3Config())
    assert (deepseek.query, deepseek.key_value) == (128 * 192, 128 * 192)
    assert (deepseek.slots, deepseek.pre, deepseek.intermediate, deepseek.shared) == (8, 4096, 2048, 2048)
    nemotron = Sizes.of(NemotronHConfig(moe_intermediate_size=64, num_experts_per_tok=3), gated=False)
    assert (nemotron.pre, nemotron.slots) == (64, 3)
    text = SimpleNamespace(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=9, intermediate_size=32
    )
    bare: Any = SimpleNamespace(get_text_config=lambda: text)
    assert Sizes.of(bare) == Sizes(2, 64, 64, 64, 1, 64, 32, 0, 9)
    assert Sizes.of(AutoConfig.for_model("gpt_oss")).slots == 4
