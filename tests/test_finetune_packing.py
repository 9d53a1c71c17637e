"""Samples in rows: nothing lost, and no sample sees another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hf_models import make_model, quantize_experts, randomize_adapters
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from torch_nvfp4 import lora
from torch_nvfp4.train.chat import Sample
from torch_nvfp4.train.config import FinetuneError
from torch_nvfp4.train.data import IGNORE, Batch, TokenData, eval_batches
from torch_nvfp4.train.packing import Marks, check_separation, group, lay_out, separated
from torch_nvfp4.train.step import token_loss

pytestmark = pytest.mark.usefixtures("one_thread")

SEQ_LEN = 12


def random_samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    """Samples of random tokens, about half of them learnt, the last one always."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for n, length in enumerate(lengths):
        tokens = torch.randint(3, 48, (length,), generator=generator).tolist()
        trained = torch.randint(0, 2, (length,), generator=generator).bool().tolist()
        result.append(Sample(f"line {n + 1}", tokens, [*trained[:-1], True]))
    return result


def sample_lists(longest: int = SEQ_LEN + 1) -> st.SearchStrategy[list[Sample]]:
    return st.lists(st.integers(2, longest), min_size=1, max_size=9).map(random_samples)


def batch_of(samples: list[Sample], pack: bool, seq_len: int = SEQ_LEN) -> Batch:
    """All rows as one batch."""
    tokens_WS, marks = lay_out(samples, seq_len, pack=pack)
    (batch,) = eval_batches(TokenData(tokens_WS, tokens_WS, "", marks, marks), len(tokens_WS))
    return batch


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_rows_hold_every_sample_once_and_are_full(lengths: list[int]) -> None:
    rows = group(lengths, 50)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert max(filled) <= 50 and sum(f <= 25 for f in filled) <= 1
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@given(sample_lists(), st.booleans())
def test_every_learnt_token_is_a_target_once_after_what_precedes_it(samples: list[Sample], pack: bool) -> None:
    """What the model is to say, and all that it may look at then, are the sample's own."""
    inputs, targets, *positions = batch_of(samples, pack)
    found = []
    for row, at in (targets != IGNORE).nonzero().tolist():
        start = at - int(positions[0][row, at]) if pack else 0
        found.append((*inputs[row, start : at + 1].tolist(), int(targets[row, at])))
    expected = [tuple(s.tokens[: n + 1]) for s in samples for n in range(1, len(s.tokens)) if s.trained[n]]
    assert sorted(found) == sorted(expected)
    assert len(positions) == pack


@given(sample_lists())
def test_padding_is_set_apart(samples: list[Sample]) -> None:
    tokens_WS, marks = lay_out(samples, SEQ_LEN, pack=True)
    assert marks.positions_WS is not None
    for row, members in enumerate(group([len(s.tokens) for s in samples], SEQ_LEN + 1)):
        starts = (marks.positions_WS[row] == 0).nonzero().flatten().tolist()
        lengths = [len(samples[n].tokens) for n in members]
        assert starts[: len(members)] == [sum(lengths[:n]) for n in range(len(members))]
        assert not marks.trained_WS[row, starts].any() and not marks.trained_WS[row, sum(lengths) :].any()
        assert not tokens_WS[row, sum(lengths) :].any()
        assert len(starts) == len(members) + (sum(lengths) <= SEQ_LEN)


def adapted(architecture: str, **changes: object) -> PreTrainedModel:
    model = quantize_experts(make_model(architecture, **changes))
    lora.add_lora(model, r=2, targets=("experts", "q_proj"))
    randomize_adapters(model)
    return model


def alone(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor]:
    """(logits, loss) of one sample without a row."""
    tokens = torch.tensor([sample.tokens])
    keep = torch.tensor([sample.trained[1:]])
    loss = token_loss(model, tokens[:, :-1], tokens[:, 1:].masked_fill(~keep, IGNORE))
    return model(input_ids=tokens[:, :-1], use_cache=False).logits[0], loss


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


# full and sliding attention, latent attention, and what runs where SDPA does not
@pytest.mark.parametrize(
    ("architecture", "attention", "pack"),
    [("qwen3_moe", "sdpa", True), ("qwen3_moe", "sdpa", False), ("qwen3_moe", "eager", True),
     ("gpt_oss", "eager", True), ("deepseek_v3", "sdpa", True)],
)  # fmt: skip
def test_a_sample_in_a_row_is_the_sample_alone(architecture: str, attention: str, pack: bool) -> None:
    model = adapted(architecture)
    model.set_attn_implementation(attention)
    samples = random_samples([9, 14, 3, 11, 2, 17])
    seq_len = 24
    rows = group([len(s.tokens) for s in samples], seq_len + 1) if pack else [[n] for n in range(len(samples))]
    assert not pack or max(map(len, rows)) > 1
    batch = batch_of(samples, pack, seq_len)
    inputs, _, *positions = batch
    logits = model(input_ids=inputs, use_cache=False, **(separated(model, positions[0]) if pack else {})).logits
    losses = []
    for row, members in enumerate(rows):
        start = 0
        for n in members:
            expected, loss = alone(model, samples[n])
            torch.testing.assert_close(logits[row, start : start + len(expected)], expected, rtol=1e-4, atol=1e-5)
            start += len(samples[n].tokens)
            losses.append(loss)
    loss = token_loss(model, *batch)
    torch.testing.assert_close(loss, torch.stack(losses).sum(), rtol=1e-5, atol=0)
    packed, each = gradients(model, loss), gradients(model, torch.stack(losses).sum())
    assert packed.keys() == each.keys() and packed
    for name, gradient in each.items():
        torch.testing.assert_close(
            packed[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_packed_step_is_one_graph() -> None:
    model = adapted("qwen3_moe", num_hidden_layers=1)
    batch = batch_of(random_samples([9, 14, 3]), True, 24)
    compiled = torch.compile(lambda *b: token_loss(model, *b), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*batch), token_loss(model, *batch), rtol=1e-5, atol=0)
    other = batch_of(random_samples([20, 2, 11], seed=1), True, 24)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(*other), token_loss(model, *other), rtol=1e-5, atol=0)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_that_keeps_samples_apart_passes(architecture: str) -> None:
    check_separation(make_model(architecture), "model", 2, "cpu")


def test_a_model_that_carries_a_state_on_is_refused() -> None:
    """Its linear attention takes the position ids and does not heed them."""
    config = Qwen3NextConfig(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_value_heads=2, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(FinetuneError, match="^next lets a sample see the one before it in its row, .*: use --no-pack"):
        check_separation(Qwen3NextForCausalLM(config), "next", 1, "cpu")


def test_a_model_that_cannot_be_asked_is_refused() -> None:
    class Takes(nn.Module):
        config = SimpleNamespace(model_type="odd")

        def get_input_embeddings(self) -> nn.Module:
            return nn.Embedding(9, 4)

        def forward(self, input_ids: Tensor) -> None:
            raise AssertionError

    with pytest.raises(FinetuneError, match=r"^odd cannot be asked .*inputs_embeds.*: use --no-pack"):
        check_separation(Takes(), "odd", 1, "cpu")


def test_marks_are_cut_as_rows_are() -> None:
    marks = Marks(torch.eye(3).bool(), None)
    assert marks[[2, 0]].trained_WS.tolist() == [[False, False, True], [True, False, False]]
    assert marks[:1].positions_WS is None
