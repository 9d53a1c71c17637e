"""The transformers and PEFT seam: importing this module is the one line that registers everything.

    import torch_nvfp4.hf
    model = AutoModelForCausalLM.from_pretrained(folder)  # NVFP4 experts and dense layers stay packed
    model = get_peft_model(model, LoraConfig(target_modules=[...], target_parameters=[...]))

- `from_pretrained` loads checkpoints with `quant_method` "modelopt", NVFP4 ones of "compressed-tensors" and, after
  `pack_on_load("mxfp4")`, gpt-oss's "mxfp4", into packed modules.
- PEFT adapts packed experts and packed linear layers.
- `quantize_experts` packs the experts of a model that was loaded dense.
- `prepare_qat` trains dense experts and linear layers towards their packed forms.
- `save_pretrained` writes a packed model in the layout that it came from, `save_packed` in any.
- The experts implementation "nvfp4" refuses to run experts that are still dense.
"""

import importlib.util

from torch import Tensor, nn

from . import _hf  # noqa: F401  (first: it says what to install where transformers is missing)

# isort: split
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ._hf.convert import dequantize_experts, quantize_experts
from ._hf.qat import prepare_qat
from ._hf.quantizer import PackedConfig, pack_on_load
from ._hf.save import save_packed
from ._hf.skeleton import skeletons
from .nn import NVFP4Experts

__all__ = [
    "PackedConfig",
    "dequantize_experts",
    "nvfp4_experts_forward",
    "pack_on_load",
    "prepare_qat",
    "quantize_experts",
    "save_packed",
    "skeletons",
]


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

if importlib.util.find_spec("peft"):
    from ._hf import peft_dispatch, peft_stamp, peft_wrapped

    peft_dispatch.install()
    peft_stamp.install()
    peft_wrapped.install()
