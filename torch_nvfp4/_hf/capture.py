"""Router logits in a compiled model: transformers' recording hooks, installed before the first forward."""

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks


def install_capturing(model: nn.Module) -> None:
    """Install what records `output_router_logits`, where the model can record them.

    transformers does so in the first forward that asks for them, under a lock that torch.compile(fullgraph=True) cannot
    trace. The hooks do nothing in a forward that asks for nothing.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    can_record = any("router_logits" in (module._can_record_outputs or {}) for module in models)
    if can_record and not any(_is_installed(module) for module in models):
        for module in models:
            if not _is_installed(module):  # the outer model's installation is that of the models in it, too
                maybe_install_capturing_hooks(module)


def _is_installed(module: PreTrainedModel) -> bool:
    return getattr(module, "_output_capturing_hooks_installed", False)
