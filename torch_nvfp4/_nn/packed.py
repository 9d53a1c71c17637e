"""Packed tensors as a module holds them.

They are parameters that never require a gradient, kept as integers (codes and scales uint8, the fp32 global scales as
the int32 of the same bits) and viewed as what they are at the op call, so that `.half()`, `.to(dtype)`, a broadcast or
a sharded all-gather leaves them bit-identical.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..format import get_format


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Packed(nn.Module):
    """Loads packed tensors as the bits that they are, in whichever of their two dtypes a state dict has them.

    `nn.Module` would copy value by value: a global scale of 0.01 into an integer 0.
    """

    format: str

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
        strict: bool, missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        wrong = []
        for name, held in self.named_parameters(recurse=False):
            tensor = state_dict.get(prefix + name)
            if tensor is None or held.is_floating_point() or tensor.dtype == held.dtype:
                continue
            meaning = torch.float32 if held.dtype == torch.int32 else get_format(self.format).scale_dtype
            if tensor.dtype == meaning and not name.endswith("codes"):
                state_dict[prefix + name] = tensor.view(held.dtype)
            else:
                wrong.append(f"{prefix}{name}: the state dict has {tensor.dtype}, and packed bits are {held.dtype}")
        if wrong:
            error_msgs += wrong
        else:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
