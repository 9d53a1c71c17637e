"""A whole model's training step: an NVFP4 checkpoint, `from_pretrained`, PEFT and Trainer, with nothing in between.

The checkpoint has random weights in ModelOpt's layout, written by this library's own writer. Adapters go on attention
and experts. The row `dense` is the same model with bf16 experts, transformers' `grouped_mm` and stock PEFT.
A step's time is of the host clock with the card idle at both ends; the first steps, which compile, are left out.

Run: `python benchmarks/train_model.py [--model NAME] [--row NAME] [--folder DIR] [--out FILE.json]`; a row a process.
"""

import argparse
import datetime
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainerCallback, TrainingArguments

SIZES: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": dict(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, num_hidden_layers=48, intermediate_size=6144,
    ),
    "tiny": dict(
        hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=96, num_hidden_layers=3, intermediate_size=64,
    ),
}  # fmt: skip
ROWS = ("layers", "whole", "eager", "dense")
"""Every decoder layer compiled (one graph for all), the model compiled as a whole by Trainer, and not compiled."""
WARM_UP = 3


def config_of(name: str, layers: int | None) -> Qwen3MoeConfig:
    sizes = SIZES[name] | ({"num_hidden_layers": layers} if layers else {})
    return Qwen3MoeConfig(
        **sizes, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=40960, dtype="bfloat16"
    )


def write_checkpoint(config: Qwen3MoeConfig, folder: Path, device: str) -> None:
    """Random NVFP4 experts, an entry each, and everything else in bf16: what ModelOpt would have exported."""
    from torch_nvfp4.checkpoint.write import FolderWriter

    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    experts = range(config.num_experts)

    def random_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator).cpu()

    with FolderWriter(folder) as writer:
        for name, parameter in stock.state_dict().items():
            if ".mlp.experts." not in name:
                value = torch.ones(parameter.shape) if parameter.dim() == 1 else torch.empty(parameter.shape)
                if parameter.dim() > 1:
                    value = torch.randn(parameter.shape, device=device, generator=generator).cpu() * 0.02
                writer.add(name, value.to(torch.bfloat16))
        for layer in range(config.num_hidden_layers):
            sizes = config.moe_intermediate_size, config.hidden_size
            for role, (n, c) in dict(gate_proj=sizes, up_proj=sizes, down_proj=sizes[::-1]).items():
                codes = random_bytes(0, 256, len(experts), n, c // 2)
                scales = random_bytes(48, 72, len(experts), n, c // 16).view(torch.float8_e4m3fn)
                for e in experts:
                    path = f"model.layers.{layer}.mlp.experts.{e}.{role}."
                    # Copies: a shard is written from tensors that own their memory.
                    writer.add(path + "weight", codes[e].clone())
                    writer.add(path + "weight_scale", scales[e].clone())
                    writer.add(path + "weight_scale_2", torch.tensor(0.1 * c**-0.5))
        quantization = dict(
            quant_algo="W4A16_NVFP4", kv_cache_quant_algo=None, group_size=16,
            exclude_modules=["lm_head", "*self_attn*", "*mlp.gate"],
        )  # fmt: skip
        hf_quant_config = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
        inside = config.to_dict() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "quantization_config": quantization | {"quant_method": "modelopt", "ignore": ["lm_head"]},
        }
        plain = json.loads(json.dumps(inside, default=str))
        writer.finish({"config.json": plain, "hf_quant_config.json": hf_quant_config}, None)


def dense_model(config: Qwen3MoeConfig, device: str) -> torch.nn.Module:
    """Random bf16 weights, made on the card."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")


def adapted(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=attention, target_parameters=experts)
    )


class Clock(TrainerCallback):
    """The host time of each step, and what was compiled up to the end of the warm-up and after it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.graphs: list[int] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        _synchronize()
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        _synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        self.graphs.append(counters["stats"]["unique_graphs"])
        print(f"  step {len(self.seconds)}: {self.seconds[-1]:.3f} s", flush=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(model: torch.nn.Module, vocabulary: int, seq_len: int, steps: int, whole: bool) -> dict[str, Any]:
    tokens = torch.randint(vocabulary, (steps, seq_len), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out, max_steps=steps, per_device_train_batch_size=1, learning_rate=1e-4, bf16=True, logging_steps=1,
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, torch_compile=whole,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[clock])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    step = median(clock.seconds[WARM_UP:])
    return dict(
        tokens_per_second=seq_len / step, step_seconds=step, first_steps_seconds=clock.seconds[:WARM_UP],
        first_loss=losses[0], last_loss=losses[-1], graph_breaks=sum(counters["graph_break"].values()),
        graphs=clock.graphs[-1], graphs_after_warm_up=clock.graphs[-1] - clock.graphs[WARM_UP - 1],
    )  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = config_of(options.model, options.layers)
    seconds = {}
    started = time.perf_counter()
    if options.row == "dense":
        model = dense_model(config, device)
        seconds["make"] = time.perf_counter() - started
    else:
        import torch_nvfp4.hf  # noqa: F401

        if not options.folder.exists():
            write_checkpoint(config, options.folder, device)
            seconds["write"] = time.perf_counter() - started
        started = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(options.folder, device_map=device)
        seconds["load"] = time.perf_counter() - started
    print({name: round(value, 1) for name, value in seconds.items()}, flush=True)
    resident = torch.cuda.memory_allocated() if device == "cuda" else 0
    model = adapted(model, options.rank)
    if options.row == "layers":
        for layer in model.base_model.model.model.layers:
            layer.compile(fullgraph=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result = train(model, config.vocab_size, options.seq_len, options.steps, options.row == "whole")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return result | dict(resident_gib=resident / 2**30, peak_gib=peak / 2**30, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=SIZES)
    parser.add_argument("--row", default="layers", choices=ROWS)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint"), help="written first where it is not there")
    parser.add_argument("--layers", type=int, help="fewer than the model's")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} of the warm-up")
    torch.manual_seed(0)
    result = run(options)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    told = dict(
        kind="training", date=str(datetime.date.today()), device=device,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        command=shlex.join(["python", *sys.argv]), model=options.model, row=options.row, seq_len=options.seq_len,
        rank=options.rank, layers=config_of(options.model, options.layers).num_hidden_layers, result=result,
    )  # fmt: skip
    print(json.dumps(told, indent=1))
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
