"""The golden checkpoints as transformers loads them: packed, and dense with the weights their makers say they have."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINTS = sorted(path.name for path in GOLDEN.glob("ckpt_*"))
QWEN = "ckpt_modelopt_qwen3_moe-NVFP4_DEFAULT_CFG"
COMPRESSED_TENSORS = "ckpt_ct_qwen3_moe-NVFP4A16"


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """In fp32 unless told otherwise; whatever transformers reports about keys fails the test."""
    options = {"dtype": torch.float32} | options
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def write_dense(name: str, folder: Path) -> Path:
    """The checkpoint with its maker's own dequantised weights, and without a word of quantisation."""
    source = GOLDEN / name
    stored = load_file(source / "model.safetensors")
    plain = {key: tensor.float() for key, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    write(folder, plain | load_file(source / "expected_dequant_f32.safetensors"), read_config(source), None)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], quantization: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def token_ids() -> Tensor:
    return torch.randint(3, 16, (2, 12), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    return model(input_ids=token_ids(), use_cache=False).logits


def grads(model: Any, run: Any = None) -> dict[str, Tensor]:
    """Gradients of a language-model loss, of everything that trains; `run` is the compiled model, if there is one."""
    model.zero_grad()
    (model if run is None else run)(input_ids=token_ids(), labels=token_ids(), use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
