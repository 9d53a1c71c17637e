"""A whole fine-tune on a tiny model: what it trains, reports, saves, and by which path."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
from finetune_tiny import COMPILED, make_folder, tiny_config
from rich.console import Console
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from torch_nvfp4 import hf, lora
from torch_nvfp4.checkpoint import quantize_folder
from torch_nvfp4.train.config import FinetuneError
from torch_nvfp4.train.data import eval_batches, load_data
from torch_nvfp4.train.loop import finetune
from torch_nvfp4.train.memory import expert_bytes
from torch_nvfp4.train.model import load_description
from torch_nvfp4.train.report import FinetuneResult
from torch_nvfp4.train.step import mean_loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


def run(folder: Path, output: Path, **changes: Any) -> tuple[FinetuneResult, str]:
    """The result, and what was printed."""
    console = Console(file=io.StringIO(), width=400, color_system=None)
    result = finetune(tiny_config(folder, output, **changes), console=console)
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[FinetuneResult, str]:
    return run(folder, folder / "trained", plot=True)


def test_the_result_is_what_the_saved_adapter_gives(folder: Path, trained: tuple[FinetuneResult, str]) -> None:
    result, _ = trained
    config = tiny_config(folder, result.adapter_dir)
    _, tokenizer = load_description(config)
    batches = eval_batches(load_data(config, tokenizer, 300), config.batch)
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    assert mean_loss(model, batches, "cpu") == result.base_loss
    assert expert_bytes(model) == 0
    hf.quantize_experts(model)
    assert mean_loss(model, batches, "cpu") == result.quantized_loss
    assert expert_bytes(model) == result.experts_bytes_after
    lora.load_adapter(model, result.adapter_dir)
    assert mean_loss(model, batches, "cpu") == result.final_loss
    with lora.disable_adapters(model, "experts"):
        assert mean_loss(model, batches, "cpu") == result.expert_adapters_zeroed_loss
    assert result.final_loss < min(result.quantized_loss, result.expert_adapters_zeroed_loss) - 0.01


def test_a_packed_checkpoint_trains_like_the_dense_one(folder: Path, trained: tuple[FinetuneResult, str]) -> None:
    dense, _ = trained
    quantize_folder(folder / "base", folder / "packed", share_gate_up=False)  # as quantising in memory does it
    packed, printed = run(folder, folder / "trained_packed", model=str(folder / "packed"))
    assert "held-out loss of the base, whose experts are packed" in printed
    assert "held-out loss: base, experts packed" in printed and "experts quantised" not in printed
    assert packed.base_loss == packed.quantized_loss == dense.quantized_loss
    assert packed.experts_bytes_after == dense.experts_bytes_after
    assert packed.final_loss == dense.final_loss
    for name, tensor in adapter(packed.adapter_dir).items():
        assert torch.equal(tensor, adapter(dense.adapter_dir)[name]), name


def test_the_result_in_figures(trained: tuple[FinetuneResult, str]) -> None:
    result, _ = trained
    assert result.steps == 12 and [step for step, _ in result.loss_history] == list(range(1, 13))
    assert [step for step, _ in result.eval_history] == [5, 10, 12]
    assert result.eval_history[-1][1] == result.final_loss
    assert result.experts_bytes_before == 2 * 4 * (3 * 32 * 32) * 4  # layers, experts, weights, fp32
    codes_and_scales = 2 * 4 * (3 * 32 * 32) * (1 / 2 + 1 / 16)
    assert result.experts_bytes_after == codes_and_scales + 2 * 4 * 3 * 4  # three fp32 global scales an expert
    assert result.tokens_per_second > 0 and result.path == "eager"
    assert 0.8 < result.predicted_peak_bytes / result.peak_memory_bytes < 1.2
    assert result.plot_path is not None and result.plot_path.read_bytes().startswith(b"\x89PNG")
    names = {p.name for p in result.adapter_dir.iterdir()}
    peft = json.loads((result.adapter_dir / "adapter_config.json").read_text())
    assert (peft["peft_type"], Path(peft["base_model_name_or_path"]).name) == ("LORA", "base")
    assert names == {
        "adapter_model.safetensors", "adapter_config.json", "config.yaml", "loss.png",
        "checkpoint-00000009", "checkpoint-00000012",
    }  # fmt: skip


def test_what_is_printed(folder: Path, trained: tuple[FinetuneResult, str]) -> None:
    text = trained[1].replace(str(folder), "FOLDER")
    text = text.replace("k_proj 192, v_proj 192, o_proj 256", "...")
    text = re.sub(r"\d+\.\d+ [MG]iB", "# MiB", text)  # of the process, which other tests may have filled
    text = re.sub(r"[\d,]+ tokens/s", "# tokens/s", text)
    text = re.sub(r"(?<=[ +(-])\d\.\d{3,4}\b", "#", text)  # losses
    text = "\n".join(line.rstrip() for line in text.splitlines() if not line.startswith("step ")) + "\n"
    expecttest.TestCase().assertExpectedInline(
        text,
        """\
text: 173 sequences of 16 tokens to train on, 128 tokens held out
held-out loss of the base: #
held-out loss with quantised experts: #
LoRA trains 4,736 of 45,536 parameters (10.40 %): experts 3,840, q_proj 256, ...
memory                          bytes
experts, packed                 13.6 KiB (dense: 96.0 KiB)
other weights                   63.4 KiB
adapters                        18.5 KiB
their gradients                 18.5 KiB
AdamW moments                   37.0 KiB
adapters in all                 74.0 KiB (5.4x packed experts)
kept by all layers (estimate)   121.5 KiB
backward of a layer (estimate)  32.0 KiB
logits and loss (estimate)      112.5 KiB
held now                        # MiB (at most so far: # MiB)
predicted peak                  # MiB (process)
result
held-out loss: base                             # nat per token
held-out loss: base, experts quantised          # nat per token (+#)
held-out loss: fine-tuned                       # nat per token (-#)
held-out loss: fine-tuned, expert adapters off  # nat per token (+#)
expert weights                                  96.0 KiB -> 13.6 KiB
speed                                           # tokens/s
peak memory                                     # MiB (predicted: # MiB)
ran                                             eager
adapter                                         FOLDER/trained
plot                                            FOLDER/trained/loss.png
""",
    )


def test_twice_is_the_same_bits(folder: Path, tmp_path: Path, trained: tuple[FinetuneResult, str]) -> None:
    result, _ = run(folder, tmp_path / "out", save_every=0, eval_every=0)
    first, second = adapter(trained[0].adapter_dir), adapter(tmp_path / "out")
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert result.eval_history == ((12, result.final_loss),)


def test_accumulated_micro_batches_are_one_batch(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 3, "eval_every": 0, "warmup": 1, "optim": "sgd"}
    one, _ = run(folder, tmp_path / "one", batch=4, **settings)
    four, _ = run(folder, tmp_path / "four", batch=1, grad_accum=4, **settings)
    for (_, a), (_, b) in zip(one.loss_history, four.loss_history, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    second = adapter(tmp_path / "four")
    for key, tensor in adapter(tmp_path / "one").items():
        torch.testing.assert_close(tensor, second[key], rtol=0, atol=1e-5)


def test_gradient_checkpointing_changes_no_number(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 3, "eval_every": 0, "warmup": 1}
    run(folder, tmp_path / "kept", **settings)
    run(folder, tmp_path / "recomputed", gradient_checkpointing=True, **settings)
    second = adapter(tmp_path / "recomputed")
    assert all(torch.equal(tensor, second[key]) for key, tensor in adapter(tmp_path / "kept").items())


def test_bfloat16(folder: Path, tmp_path: Path) -> None:
    result, _ = run(folder, tmp_path / "out", dtype="bfloat16", lora_dtype="bfloat16", steps=4)
    assert result.final_loss < result.quantized_loss
    assert {t.dtype for t in adapter(tmp_path / "out").values()} == {torch.bfloat16}
    assert result.experts_bytes_before == 2 * 4 * (3 * 32 * 32) * 2


def test_a_finished_run_is_not_trained_again(folder: Path, trained: tuple[FinetuneResult, str]) -> None:
    first = trained[0]
    again, printed = run(folder, first.adapter_dir)
    assert "checkpoint-00000012: 12 of 12 steps are done" in printed
    assert (again.final_loss, again.base_loss, again.loss_history) == (
        first.final_loss, first.base_loss, first.loss_history,
    )  # fmt: skip
    assert again.tokens_per_second == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rank": 3}, "rank=2, this run has 3"),
        ({"text": "b.txt"}, "another text"),
        ({"model": "other"}, "another model"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    folder: Path, tmp_path: Path, trained: tuple[FinetuneResult, str], change: dict[str, Any], reason: str
) -> None:
    if "text" in change:
        change = {"text": (folder / "a.txt",)}
    if "model" in change:
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        with torch.no_grad():
            model.model.norm.weight[0] += 1
        model.save_pretrained(tmp_path / "other")
        load_description(tiny_config(folder, tmp_path))[1].save_pretrained(tmp_path / "other")
        change = {"model": str(tmp_path / "other")}
    with pytest.raises(FinetuneError, match=f"checkpoint-00000012 was made with {reason}: use the same settings"):
        run(folder, trained[0].adapter_dir, **change)


def test_a_moved_model_and_renamed_text_resume(
    folder: Path, tmp_path: Path, trained: tuple[FinetuneResult, str]
) -> None:
    moved = make_folder(tmp_path)
    (moved / "a.txt").rename(moved / "first.txt")
    _, printed = run(moved, trained[0].adapter_dir, text=(moved / "first.txt", moved / "b.txt"))
    assert "12 of 12 steps are done" in printed


def test_a_loss_that_is_not_finite_is_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=r"the loss is nan at step \d+: lower --lr, or raise --warmup"):
        run(folder, tmp_path / "out", lr=1e30, clip=0.0, optim="sgd")


def test_compiled_is_one_graph_for_training_and_evaluation(folder: Path, tmp_path: Path) -> None:
    counters.clear()
    settings = COMPILED | {"model": str(folder / "one_layer")}
    result, printed = run(folder, tmp_path / "compiled", **settings)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert result.path == "compiled (inductor, C++)" and re.search(r"compiled in \d+ s", printed)
    eager, _ = run(folder, tmp_path / "eager", **settings | {"compile": "off"})
    for (_, a), (_, b) in zip(result.loss_history, eager.loss_history, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_without_a_compiler(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result, printed = run(folder, tmp_path / "out", compile="auto", steps=3, eval_every=0)
    assert result.path == "eager"
    assert re.match(
        r"torch.compile has no working C\+\+ compiler here, so this runs eager; to compile: (run|install) ",
        printed,
    )
    with pytest.raises(FinetuneError, match=r"--compile on: torch.compile has no working C\+\+ compiler here: "):
        run(folder, tmp_path / "other", compile="on")


def test_a_step_that_cannot_be_compiled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_nvfp4.train import step

    original = step.token_loss

    def breaking(*args: Any) -> torch.Tensor:
        torch._dynamo.graph_break()
        return original(*args)

    monkeypatch.setattr(step, "token_loss", breaking)
    result, printed = run(folder, tmp_path / "out", compile="auto", steps=3, eval_every=0)
    assert result.path == "eager" and "torch.compile failed (" in printed
    with pytest.raises(FinetuneError, match=r"--compile on: torch.compile failed \(.*\): use --compile off"):
        run(folder, tmp_path / "other", compile="on")
