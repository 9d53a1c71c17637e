"""A tiny Qwen3-MoE model with its own tokenizer, texts, and a small fine-tune: what the tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from torch_nvfp4 import hf
from torch_nvfp4.train.config import FinetuneConfig

WORDS = "the expert routes a token to four small matrices and each of them adds its own low rank answer".split()


def make_text(seed: int, words: int = 1200) -> str:
    """Reproducible prose of sorts."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (words,), generator=generator).tolist()
    return " ".join(WORDS[i] + (".\n" if n % 9 == 8 else "") for n, i in enumerate(picks))


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 300 tokens, trained on `make_text(0)`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([make_text(0)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(folder)
    return fast


def save_model(folder: Path, **changes: Any) -> None:
    """Two layers of four experts, hidden size 32, random weights, in safetensors."""
    settings: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))).save_pretrained(folder)


# Compiling takes far longer than training here: those tests share one small graph, and so Inductor's cache.
COMPILED: dict[str, Any] = {
    "targets": ("experts",),
    "compile": "on",
    "steps": 4,
    "warmup": 1,
    "eval_every": 1,
    "save_every": 2,
}


def make_folder(folder: Path) -> Path:
    """A folder with `base/` (model and tokenizer), `one_layer/` (the same, smaller), `a.txt` and `b.txt`."""
    for name, layers in (("base", 2), ("one_layer", 1)):
        save_model(folder / name, num_hidden_layers=layers)
        save_tokenizer(folder / name)
    (folder / "a.txt").write_text(make_text(1))
    (folder / "b.txt").write_text(make_text(2, words=300))
    return folder


def save_packed_base(folder: Path) -> None:
    """Beside `base` of `make_folder`, the same with packed experts: `packed`."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    hf.save_packed(hf.quantize_experts(model), folder / "packed")
    save_tokenizer(folder / "packed")


def tiny_config(folder: Path, output: Path, **changes: Any) -> FinetuneConfig:
    """Twelve eager steps on the tiny model of `make_folder`, a checkpoint every three."""
    settings: dict[str, Any] = {
        "model": str(folder / "base"),
        "text": (folder / "a.txt", folder / "b.txt"),
        "output": output,
        "rank": 2,
        "expert_rank": 3,
        "lr": 1e-2,
        "steps": 12,
        "batch": 2,
        "seq_len": 16,
        "warmup": 2,
        "dtype": "float32",
        "compile": "off",
        "device": "cpu",
        "eval_every": 5,
        "eval_batches": 4,
        "save_every": 3,
        "plot": False,
    }
    return FinetuneConfig(**(settings | changes))
