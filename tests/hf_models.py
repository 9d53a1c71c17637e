"""Tiny random models of every architecture that the transformers seam names, and what tests do to them."""

import copy
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_nvfp4.hf import dequantize_experts, quantize_experts

_COMMON = dict(
    vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_MOE = dict(moe_intermediate_size=16, num_experts_per_tok=2)

# E = 5, K = 2, H = 32, I = 16 (2I = H: no shape tells the two apart), unless an architecture asks for more.
_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2_moe": ("Qwen2Moe", dict(
        _MOE, num_experts=5, intermediate_size=48, shared_expert_intermediate_size=16,
    )),
    "qwen3_moe": ("Qwen3Moe", dict(_MOE, num_experts=5, intermediate_size=48, head_dim=16)),
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2, intermediate_size=16)),
    "olmoe": ("Olmoe", dict(num_experts=5, num_experts_per_tok=2, intermediate_size=16)),
    "deepseek_v3": ("DeepseekV3", dict(
        _MOE, n_routed_experts=6, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
        intermediate_size=48, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16,
    )),
    "gpt_oss": ("GptOss", dict(
        num_local_experts=5, num_experts_per_tok=2, intermediate_size=16, head_dim=16, sliding_window=8,
    )),
}  # fmt: skip

ARCHITECTURES = tuple(_CONFIGS)
ONE_LAYER = {
    name: {"num_hidden_layers": 1} | ({"first_k_dense_replace": 0} if name == "deepseek_v3" else {})
    for name in ARCHITECTURES
}
TARGETS = {name: ("experts", "q_proj", "o_proj") for name in ARCHITECTURES}


def make_model(
    architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A random causal language model in eval mode; biases and norms are random too, not 0 and 1."""
    prefix, settings = _CONFIGS[architecture]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**(_COMMON | settings | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def quantized_and_dense(architecture: str, **changes: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(the packed model, the stock dense model with the same, dequantised, expert weights)."""
    packed = quantize_experts(make_model(architecture, **changes))
    return packed, dequantize_experts(copy.deepcopy(packed))


def token_ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, 48, (batch, length), generator=torch.Generator().manual_seed(1))


def logits(model: Callable[..., object], **kwargs: object) -> Tensor:
    return model(input_ids=token_ids(), use_cache=False, **kwargs).logits


def randomize_adapters(model: nn.Module, std: float = 0.1) -> None:
    """Factors as after training: neither A nor B is zero."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def train_step(model: nn.Module, run: Callable[..., object] | None = None) -> dict[str, Tensor]:
    """The adapters' gradients of a language-model loss; `run` is the compiled model where there is one."""
    model.zero_grad()
    (model if run is None else run)(input_ids=token_ids(), labels=token_ids(), use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def assert_same_grads(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
