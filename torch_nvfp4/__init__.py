"""NVFP4 Mixture-of-Experts LoRA as torch.library ops that torch.compile(fullgraph=True) can fuse.

Importing this package registers `torch.ops.nvfp4.*`. It imports neither triton, Inductor nor transformers.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _find_spec("torch_nvfp4.lowering") is None:
    raise ImportError(
        "torch_nvfp4 is not installed (this is its source folder); run `pip install -e .` or `make test` there first"
    )

from .format import MXFP4, NVFP4, Format
from .lora import (
    LoRASummary,
    adapter_state_dict,
    add_lora,
    disable_adapters,
    export_adapter,
    load_adapter,
    remove_adapters,
    save_adapter,
)
from .nn import NVFP4Experts, NVFP4Linear, set_numerics
from .ops import SAVE_OPS
from .qat import convert_qat, prepare_qat

if _TYPE_CHECKING:
    from ._explain.card import Card
    from ._explain.report import Explanation
    from ._explain.run import explain

__version__ = "0.1.0"

__all__ = [
    "MXFP4",
    "NVFP4",
    "SAVE_OPS",
    "Card",
    "Explanation",
    "Format",
    "LoRASummary",
    "NVFP4Experts",
    "NVFP4Linear",
    "adapter_state_dict",
    "add_lora",
    "convert_qat",
    "disable_adapters",
    "export_adapter",
    "explain",
    "load_adapter",
    "prepare_qat",
    "remove_adapters",
    "save_adapter",
    "set_numerics",
]


_LAZY = {"Card": "card", "Explanation": "report", "explain": "run"}


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return getattr(_import_module(f"torch_nvfp4._explain.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
