"""The mark of merge-aware adapters in PEFT's files: written and read with its configs, which drop unknown keys.

Without this library PEFT reads such a file with a warning of an unexpected keyword.
"""

import functools
import json
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.config import PeftConfigMixin
from peft.tuners.lora import LoraModel
from torch import nn

from .._lora.files import CONFIG
from .._lora.sharded import refuse_share
from .._lora.stamp import KEY, Stamp, heed, stamp_of
from .peft_layers import Linear, ParamWrapper

# What `check_kwargs` took out of the file that `from_pretrained` reads.
_read: ContextVar[Any] = ContextVar("stamp_read", default=None)


def install() -> None:
    """Make PEFT's configs keep the mark, its models write it, and loading warn where the model is not merge-aware."""
    mixin: Any = PeftConfigMixin
    check, load, save = mixin.check_kwargs.__func__, mixin.from_pretrained.__func__, mixin.save_pretrained
    inject, save_model = LoraModel.inject_adapter, PeftModel.save_pretrained

    @functools.wraps(check)
    def check_kwargs(cls: Any, **kwargs: Any) -> Any:
        _read.set(kwargs.pop(KEY, None))
        return check(cls, **kwargs)

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        token = _read.set(None)
        try:
            config = load(cls, *args, **kwargs)
            _keep(config, _read.get())
            return config
        finally:
            _read.reset(token)

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: str, **kwargs: Any) -> None:
        save(self, save_directory, **kwargs)
        if KEY in self.__dict__:
            path = Path(save_directory) / CONFIG
            data = json.loads(path.read_text()) | {KEY: self.__dict__[KEY]}
            path.write_text(json.dumps(data, indent=2, sort_keys=True))

    @functools.wraps(save_model)
    def save_peft_model(self: PeftModel, *args: Any, **kwargs: Any) -> Any:
        refuse_share(self)
        before = {name: config.__dict__.get(KEY) for name, config in self.peft_config.items()}
        try:
            for name, config in self.peft_config.items():
                if stamp := stamp_of(_adapted(self, name)):
                    _keep(config, stamp.to_json())
            return save_model(self, *args, **kwargs)
        finally:  # the caller's config, which may serve another model
            for name, stamp in before.items():
                self.peft_config[name].__dict__.pop(KEY, None)
                _keep(self.peft_config[name], stamp)

    @functools.wraps(inject)
    def inject_adapter(self: LoraModel, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        inject(self, model, adapter_name, *args, **kwargs)
        stamp = Stamp.from_json({KEY: self.peft_config[adapter_name].__dict__.get(KEY)})
        heed(stamp, _adapted(model, adapter_name), stacklevel=2)

    mixin.check_kwargs, mixin.from_pretrained = classmethod(check_kwargs), classmethod(from_pretrained)
    mixin.save_pretrained = save_pretrained
    patched: Any = PeftModel
    patched.save_pretrained = save_peft_model
    lora: Any = LoraModel
    lora.inject_adapter = inject_adapter


def _keep(config: Any, stamp: Any) -> None:
    if stamp is not None:
        config.__dict__[KEY] = stamp


def _adapted(model: nn.Module, adapter_name: str) -> Iterator[nn.Module]:
    """The packed modules that an adapter of PEFT is on."""
    for module in model.modules():
        if isinstance(module, Linear | ParamWrapper) and adapter_name in module.lora_A:
            yield module.get_base_layer()
