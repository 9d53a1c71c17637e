"""The ops `torch.ops.nvfp4.*`. Importing this package registers them; see `schemas.py` for what each takes."""

import torch

# The schemas come first: they define the ops that the others look up.
from . import schemas as schemas  # isort: split

from . import flops as _flops
from . import register as _register

_register.register()
_flops.register()

SAVE_OPS: tuple[torch._ops.OpOverload, ...] = (
    torch.ops.nvfp4.moe_route.default,
    torch.ops.nvfp4.grouped_lora_linear.default,
    torch.ops.nvfp4.glu_grouped_lora_linear.default,
)
"""What a selective activation checkpointing policy should save; `moe_lora` itself is a macro that no policy sees."""
