"""Tiny models of many architectures, packed under the names that their exporters give, with their dense twins."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_files import compressed, modelopt
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_nvfp4.checkpoint import PackedWeight
from torch_nvfp4.format import dequantize, quantize

_COMMON: dict[str, Any] = dict(
    vocab_size=48, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_MOE: dict[str, Any] = dict(moe_intermediate_size=32, num_experts_per_tok=2)
_MLA: dict[str, Any] = dict(
    num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
)
_ROUTED: dict[str, Any] = dict(n_routed_experts=4, n_group=1, topk_group=1, n_shared_experts=1, intermediate_size=96)
_LINEAR_ATTENTION: dict[str, Any] = dict(
    num_experts=4, head_dim=32, shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_NEMOTRON: dict[str, Any] = dict(
    _MOE, **(_ROUTED | {"intermediate_size": 64}), layers_block_type=["moe", "attention"], head_dim=32,
    mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=1, moe_shared_expert_intermediate_size=32,
)  # fmt: skip
_VISION = dict(
    depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16
)
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", dict(
        _MOE, num_experts=4, intermediate_size=96, shared_expert_intermediate_size=32, mlp_only_layers=[1],
    )),
    "qwen3_next": ("Qwen3Next", dict(_MOE, **_LINEAR_ATTENTION, intermediate_size=96)),
    "qwen3_5_moe": ("Qwen3_5Moe", dict(_MOE, **_LINEAR_ATTENTION)),
    "deepseek_v3": ("DeepseekV3", dict(_MOE, **(_MLA | _ROUTED), first_k_dense_replace=1)),
    "glm4_moe": ("Glm4Moe", dict(_MOE, **_ROUTED, first_k_dense_replace=1, head_dim=32)),
    "glm_moe_dsa": ("GlmMoeDsa", dict(
        _MOE, **(_MLA | _ROUTED), index_topk=8, index_n_heads=2, index_head_dim=32, mlp_layer_types=["dense", "sparse"],
    )),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32)),
    "minimax_m2": ("MiniMaxM2", dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, head_dim=32)),
    "nemotron_h": ("NemotronH", dict(_NEMOTRON, moe_latent_size=32)),
    "gpt_oss": ("GptOss", dict(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, head_dim=32, sliding_window=8,
    )),
    "llama4": ("Llama4", dict(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, intermediate_size_mlp=96, head_dim=32,
        interleave_moe_layer_step=2,
    )),
    "deepseek_v4": ("DeepseekV4", dict(
        _MOE, n_routed_experts=4, n_shared_experts=1, head_dim=32, q_lora_rank=32, o_lora_rank=16, o_groups=2,
        index_n_heads=2, index_head_dim=16, index_topk=4, sliding_window=8, num_hash_layers=1,
    )),
    "gemma4": ("Gemma4", dict(
        _MOE, num_experts=4, top_k_experts=2, enable_moe_block=True, intermediate_size=96, head_dim=32,
        global_head_dim=32, hidden_size_per_layer_input=0, vocab_size_per_layer_input=48, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
    )),
}  # fmt: skip


def make_stock(architecture: str) -> PreTrainedModel:
    """A random causal language model in eval mode, fp32; norms and biases are random too."""
    prefix, settings = _CONFIGS[architecture]
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**(_COMMON | settings)))
    return _randomised(model)


def make_stock_with_vision() -> PreTrainedModel:
    """Qwen3.5-MoE whole: a vision tower, and a language model under `model.language_model.`."""
    torch.manual_seed(0)
    text = _COMMON | _CONFIGS["qwen3_5_moe"][1]
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=dict(_VISION), tie_word_embeddings=False)
    return _randomised(transformers.Qwen3_5MoeForConditionalGeneration(config))


def _randomised(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    return model.eval()


@dataclass(frozen=True)
class Style:
    """How an exporter writes: its names for a packed weight, and changes of the model's names (regex, text).

    linears: which dense layers are packed. fused: experts in one tensor, packed along the middle dim.
    """

    write: Callable[[str, PackedWeight], dict[str, Tensor]] = modelopt
    renames: tuple[tuple[str, str], ...] = ()
    linears: str = r"(proj|proj_with_mqa|wq_b|wk|in_proj_\w*[yz]|_proj_qkv)$"
    fused: bool = False
    method: str = "modelopt"
    format: str = "nvfp4"


W123 = ((r"gate_proj", "w1"), (r"up_proj", "w3"), (r"down_proj", "w2"))
COMPRESSED = dict(write=compressed, method="compressed-tensors")


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(getattr(module, "down_proj", None), nn.Parameter):
            yield path, module


def _rows(weight: Tensor, transposed: bool, interleaved: bool) -> Tensor:
    """A stock parameter as `[E, N, C]` with rows gate, then up: a view, so that writing to it writes to the model."""
    rows = weight.mT if transposed else weight
    return rows.unflatten(1, (-1, 2)).transpose(1, 2) if interleaved else rows.unflatten(1, (1, -1))


def export(model: PreTrainedModel, folder: Path, style: Style) -> int:
    """Write the model packed, and give the model itself the packed weights' values; how many layers are packed.

    Every half of every expert has a global scale of its own, but where all are one tensor.
    """
    tensors: dict[str, Tensor] = {}
    taken: set[str] = set()
    with torch.no_grad():
        for path, experts in _experts(model):
            taken |= {f"{path}.{name}" for name, _ in experts.named_parameters()}
            tensors |= _export_experts(path, experts, style)
        linears = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and re.search(style.linears, name) and "visual" not in name
        ]
        for name, linear in linears:
            packed = _pack(linear.weight, style)
            linear.weight.copy_(dequantize(*packed, torch.float32))
            tensors |= style.write(name, packed)
            taken.add(f"{name}.weight")
    plain = {name: t.clone() for name, t in model.state_dict().items() if name not in taken}
    tensors |= {name: t.bfloat16() if t.is_floating_point() else t for name, t in plain.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"quantization_config": {"quant_method": style.method, "ignore": ["\0"]}}
    config["architectures"] = [type(model).__name__]
    if style.method == "compressed-tensors":
        config["quantization_config"]["format"] = f"{style.format}-pack-quantized"
    (folder / "config.json").write_text(json.dumps(config))
    named = {_renamed(name, style.renames): t.contiguous() for name, t in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return len(linears)


def _pack(weight: Tensor, style: Style) -> PackedWeight:
    packed = PackedWeight(*quantize(weight, format=style.format))
    # As quantisers of bf16 models have it: a divisor in bf16, which both conventions can keep.
    return packed._replace(global_scale=1 / (1 / packed.global_scale).bfloat16().float())


def _renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for pattern, text in renames:
        name = re.sub(pattern, text, name)
    return name


def _export_experts(path: str, experts: Any, style: Style) -> dict[str, Tensor]:
    llama4 = not hasattr(experts, "has_gate")
    gated = llama4 or experts.has_gate
    transposed = llama4 or experts.is_transposed
    interleaved = gated and not llama4 and not experts.is_concatenated
    tensors: dict[str, Tensor] = {}
    halves = (("gate_proj", "up_proj") if gated else ("up_proj",), ("down_proj",))
    for name, roles in zip(("gate_up_proj" if gated else "up_proj", "down_proj"), halves, strict=True):
        weight = getattr(experts, name)
        rows = _rows(weight, transposed, interleaved and len(roles) == 2)  # [E, halves or 1, N, C]
        rows = rows if rows.shape[1] == len(roles) else rows.squeeze(1).unflatten(1, (len(roles), -1))
        bias = getattr(experts, f"{name}_bias", None)
        if style.fused:
            codes, scales, global_scale = quantize(weight.mT.contiguous(), format=style.format)
            tensors |= {
                f"{path}.{name}": codes.mT,
                f"{path}.{name}_weight_scale": scales.view(torch.uint8).mT.contiguous().view(scales.dtype),
                f"{path}.{name}_weight_scale_2": global_scale.reshape(()),
            } | ({} if bias is None else {f"{path}.{name}_bias": bias.bfloat16()})
            weight.copy_(dequantize(codes, scales, global_scale, torch.float32).mT)
            continue
        for e in range(len(rows)):
            for half, role in enumerate(roles):
                packed = _pack(rows[e, half].contiguous(), style)
                rows[e, half] = dequantize(*packed, torch.float32)
                tensors |= style.write(f"{path}.{e}.{role}", packed)
                if bias is not None:
                    part = bias[e, half :: len(roles)] if interleaved else bias[e].chunk(len(roles))[half]
                    tensors[f"{path}.{e}.{role}.bias"] = part.bfloat16()
    return tensors
