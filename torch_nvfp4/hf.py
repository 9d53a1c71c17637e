"""The transformers seam: importing this module registers the experts implementation "nvfp4".

    import torch_nvfp4.hf
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch_nvfp4.hf.quantize_experts(model)

`from_pretrained(..., experts_implementation="nvfp4")` states the intent earlier: until the experts are
packed, such a model refuses to run instead of running dense.
"""

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ._hf.convert import dequantize_experts, quantize_experts
from .nn import NVFP4Experts

__all__ = ["dequantize_experts", "nvfp4_experts_forward", "quantize_experts"]


def nvfp4_experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts function: `[T, H]`, `[T, K]`, `[T, K]` -> `[T, H]`.

    An index outside `[0, E)` (-1, or the sentinels of expert parallelism) is a slot that is not routed.
    RuntimeError for experts that are still dense.
    """
    if not isinstance(experts, NVFP4Experts):
        raise RuntimeError(
            f'experts_implementation="nvfp4" runs packed experts, but {type(experts).__name__} holds dense '
            "weights: call torch_nvfp4.hf.quantize_experts(model) first"
        )
    return experts(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register("nvfp4", nvfp4_experts_forward)
