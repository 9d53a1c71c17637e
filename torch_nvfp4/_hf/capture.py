"""Router logits in a compiled model: transformers' recording hooks, installed before the first forward."""

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, maybe_install_capturing_hooks


def install_capturing(model: nn.Module) -> None:
    """Install what records `output_router_logits`, where the model can record them.

    transformers does so in the first forward that asks for them, under a lock that torch.compile(fullgraph=True) cannot
    trace. The hooks do nothing in a forward that asks for nothing.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and "router_logits" in (_CAN_RECORD_REGISTRY.get(module) or {}):
            maybe_install_capturing_hooks(module)
