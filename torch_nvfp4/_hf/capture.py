"""Router logits in a compiled model: transformers' recording hooks, installed before the first forward."""

import threading
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing
from transformers.utils.import_utils import is_torchdynamo_compiling


def install_capturing(model: nn.Module) -> None:
    """Install what records `output_router_logits`, where the model can record them.

    transformers does so in the first forward that asks for them, under a lock that torch.compile(fullgraph=True) cannot
    trace. The hooks do nothing in a forward that asks for nothing, and then do not break the graph of a layer that is
    compiled by itself.
    """
    if _stock_install is not None:
        setattr(output_capturing, _INSTALL, _install)
    if not isinstance(output_capturing._active_collector, _Collector):
        output_capturing._active_collector = _Collector("output_collector")
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    can_record = any("router_logits" in (module._can_record_outputs or {}) for module in models)
    if can_record and not any(_is_installed(module) for module in models):
        for module in models:
            if not _is_installed(module):  # the outer model's installation is that of the models in it, too
                output_capturing.maybe_install_capturing_hooks(module)


def _is_installed(module: PreTrainedModel) -> bool:
    return getattr(module, "_output_capturing_hooks_installed", False)


# Its name is spelt so.
_INSTALL = "install_output_capuring_hook"
_stock_install: Any = getattr(output_capturing, _INSTALL, None)


class _Hook:
    """One of transformers' hooks, a closure, as an object that pickles: by what it is made of."""

    def __init__(self, *made_of: Any) -> None:
        module = nn.Module()
        _stock_install(module, *made_of)
        self._made_of, (self._run,) = made_of, module._forward_hooks.values()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._run(module, args, output)

    def __reduce__(self) -> Any:
        return _Hook, self._made_of


def _install(module: nn.Module, *made_of: Any) -> None:
    module.register_forward_hook(_Hook(*made_of))


class _Collector(output_capturing.CompileableContextVar):
    """Where the hooks find what a forward records, with a plain attribute beside the context variable.

    Dynamo cannot trace `ContextVar.get`, which each hook of a layer calls where the model around it runs eagerly. It
    can guard on an attribute, which says that no forward of any thread records.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.recording = False
        self._of_recording: dict[int, Any] = {}  # tokens, which cannot be hashed
        self._lock = threading.Lock()

    def get(self) -> Any:
        if not self.compiling and not self.recording and is_torchdynamo_compiling():
            return None
        return super().get()

    def set(self, value: Any) -> Any:
        token = super().set(value)
        if token is not None and value:
            with self._lock:
                self._of_recording[id(token)] = token
                self.recording = True
        return token

    def reset(self, token: Any) -> None:
        super().reset(token)
        if token is not None and id(token) in self._of_recording:
            with self._lock:
                del self._of_recording[id(token)]
                self.recording = bool(self._of_recording)
