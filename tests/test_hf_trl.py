"""TRL's trainers on a packed model: a step each, with the losses and weights of the same step on the dense model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from golden_models import GOLDEN, QWEN, load, write_dense
from hf_models import randomize_adapters
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from torch_nvfp4.nn import NVFP4Experts

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
]


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(13))]
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def sft(common: dict[str, Any]) -> tuple[type[Trainer], list[dict[str, str]], dict[str, Any]]:
    rows = [{"text": "w1 w2 w3 w4 w5"}, {"text": "w6 w1 w7"}]
    return SFTTrainer, rows, {"args": SFTConfig(**common, max_length=16)}


def dpo(common: dict[str, Any]) -> tuple[type[Trainer], list[dict[str, str]], dict[str, Any]]:
    rows = [
        {"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5"},
        {"prompt": "w7", "chosen": " w8", "rejected": " w9 w1"},
    ]
    return DPOTrainer, rows, {"args": DPOConfig(**common, max_length=16)}


def grpo(common: dict[str, Any]) -> tuple[type[Trainer], list[dict[str, str]], dict[str, Any]]:
    config = GRPOConfig(**common, max_completion_length=4, num_generations=2, beta=0.1)
    return GRPOTrainer, [{"prompt": "w1 w2"}, {"prompt": "w3"}], {"args": config, "reward_funcs": different_words}


def step(recipe: Callable[..., Any], model: nn.Module, folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What the trainer logged of one step of SGD, and the adapters after it."""
    common = dict(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=2, learning_rate=0.5, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer_class, rows, options = recipe(common)
    set_seed(3)
    data = datasets.Dataset.from_list(rows)
    trainer = trainer_class(model=model, train_dataset=data, processing_class=tokenizer(), **options)
    trainer.train()
    logged = {key: value for row in trainer.state.log_history for key, value in row.items() if "loss" in key}
    adapters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
    return logged | {
        key: row[key] for row in trainer.state.log_history for key in ("kl", "reward") if key in row
    }, adapters


def adapted(folder: Path) -> PeftModel:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=targets, task_type="CAUSAL_LM")
    model = get_peft_model(load(folder), config)
    randomize_adapters(model)
    return model


@pytest.mark.parametrize("recipe", [sft, dpo, grpo])
def test_a_step_is_that_of_the_dense_model(recipe: Callable[..., Any], tmp_path: Path) -> None:
    """DPO and GRPO keep a reference adapter, a copy of the one that they train; TRL checkpoints activations."""
    packed, dense = adapted(GOLDEN / QWEN), adapted(write_dense(QWEN, tmp_path / "dense"))
    assert any(isinstance(module, NVFP4Experts) for module in packed.modules())
    before = {name: p.detach().clone() for name, p in packed.named_parameters() if "lora_" in name}
    logged, found = step(recipe, packed, tmp_path / "out")
    stock_logged, expected = step(recipe, dense, tmp_path / "out")
    assert logged.keys() == stock_logged.keys() >= {"train_loss"}
    for key, value in stock_logged.items():
        assert logged[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
    assert found.keys() == expected.keys()
    for name, factor in expected.items():
        torch.testing.assert_close(found[name], factor, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    moved = {name for name, factor in before.items() if not torch.equal(found[name], factor)}
    assert moved == before.keys()
    if recipe is not sft:
        reference = {name: factor for name, factor in found.items() if ".ref." in name}
        assert reference and all(
            torch.equal(factor, before[name.replace(".ref.", ".default.")]) for name, factor in reference.items()
        )
