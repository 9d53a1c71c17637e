"""What an adapter file must be, whatever its layout: every key wanted and known, every tensor floating."""

from collections.abc import Collection, Mapping

from torch import Tensor


def check_keys(state: Mapping[str, Tensor], expected: Collection[str]) -> None:
    """ValueError names keys that the file lacks, or has beyond those expected."""
    wanted = set(expected)
    for keys, text in ((wanted - state.keys(), "lacks"), (state.keys() - wanted, "has the unexpected")):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ValueError(f"adapter_model.safetensors {text} {', '.join(sorted(keys)[:3])}{more}")


def check_tensor(key: str, tensor: Tensor, shape: tuple[int, ...], sizes: str) -> None:
    """ValueError for another shape, which `sizes` explains, or a dtype that is not floating."""
    if tensor.shape != shape:
        raise ValueError(f"{key}: expected shape {list(shape)} for {sizes}, got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{key}: expected a floating dtype, got {tensor.dtype}")
