"""The demo's base: a mixture-of-experts model of a million parameters, trained on Python's documentation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from torch_nvfp4.train.data import windows
from torch_nvfp4.train.demo_text import documentation, hold_out, unigram_entropy
from torch_nvfp4.train.schedule import learning_rate
from torch_nvfp4.train.step import mean_loss

END = "<|end|>"


@dataclass(frozen=True)
class BaseRecipe:
    """AdamW, warm-up and cosine over `steps` batches of `batch` windows of `seq_len` tokens."""

    steps: int = 500
    batch: int = 8
    seq_len: int = 128
    lr: float = 6e-3
    warmup: int = 30
    weight_decay: float = 0.1


@dataclass(frozen=True)
class BaseReport:
    """What became of it. Loss and entropy are in nat per token of the documentation held out.

    Attributes:
        parameters: of the model.
        held_out_loss: mean cross-entropy per token.
        unigram_entropy: of the same tokens' frequencies.
        seconds: wall time of tokenizer and training.
    """

    parameters: int
    held_out_loss: float
    unigram_entropy: float
    seconds: float


def make_base(folder: Path, *, recipe: BaseRecipe, seed: int, console: Console) -> BaseReport:
    """Train tokenizer and model on the documentation and save them as a transformers folder (safetensors).

    Raises FinetuneError if this Python has no documentation texts.
    """
    start = time.perf_counter()
    texts, held_out_texts = hold_out(documentation())
    tokenizer = train_tokenizer(texts)
    train, held_out = (
        [tokenizer(text, verbose=False)["input_ids"] for text in part] for part in (texts, held_out_texts)
    )
    train_tokens = torch.cat([torch.tensor([*tokens, tokenizer.eos_token_id]) for tokens in train])
    held_out_WS = windows(held_out, recipe.seq_len, tokenizer.eos_token_id)
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(model_config(tokenizer))
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"base: {parameters:,} parameters; {len(texts)} documentation topics to learn from "
        f"({len(train_tokens):,} tokens), {len(held_out_texts)} held out ({held_out_WS.numel():,} tokens)"
    )
    train_model(model, train_tokens, recipe, seed, console)
    inputs_BS, targets_BS = held_out_WS[:, :-1], held_out_WS[:, 1:]
    loss = mean_loss(model.eval(), [(inputs_BS, targets_BS)], "cpu")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    entropy = unigram_entropy(targets_BS.flatten().tolist())
    return BaseReport(parameters, loss, entropy, time.perf_counter() - start)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,024 tokens: any text can be encoded, whatever it was trained on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Two layers of eight experts, two of them per token; three quarters of the parameters are experts'."""
    settings: dict[str, Any] = dict(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
        initializer_range=0.06,  # at the usual 0.02 a model this narrow takes twice the steps
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return Qwen3MoeConfig(**settings)


def train_model(model: nn.Module, tokens: Tensor, recipe: BaseRecipe, seed: int, console: Console) -> None:
    """Train on windows that start anywhere in `tokens` (int64, 1-D).

    The loss includes the router's load-balancing loss, so that every expert learns.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
    )
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(recipe.steps):
        starts = torch.randint(len(tokens) - recipe.seq_len + 1, (recipe.batch,), generator=generator)
        batch_BS = torch.stack([tokens[start : start + recipe.seq_len] for start in starts.tolist()])
        output = model(input_ids=batch_BS, labels=batch_BS, output_router_logits=True, use_cache=False)
        output.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.lr, recipe.warmup, recipe.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            console.print(f"base: step {step + 1}/{recipe.steps}, training loss {output.loss.item():.3f}")
