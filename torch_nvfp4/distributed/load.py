"""Packed checkpoints on sharded models: the model is made without memory, sharded, then each rank reads its part.

model = empty_model(folder)  # packed modules in place, every tensor on the meta device
add_lora(model)  # or get_peft_model
parallelize_experts(model, mesh)  # where experts are to be split
shard_layers(model, mesh)
load_shards(model)
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .. import _hf  # noqa: F401  (first: it says what to install where transformers is missing)

# isort: split
from transformers import PreTrainedModel

from ..checkpoint import Checkpoint, CheckpointError, PackedWeight
from ..format import dequantize
from ..nn import PROJECTIONS, NVFP4Experts, NVFP4Linear
from .adapters import part_of
from .empty import SOURCE, Source, empty_model
from .experts import ParallelExperts, peft_wrappers

__all__ = ["empty_model", "load_shards"]

_LORA_A = re.compile(r"(^|[._])lora_a(\.|$)", re.IGNORECASE)
_LORA_B = re.compile(r"(^|[._])lora_b(\.|$)", re.IGNORECASE)

Read = Callable[[range], Tensor]
"""Rows of the first dim -> the tensor's part there, whole in its other dims."""


def load_shards(model: nn.Module, *, device: torch.device | str | None = None, seed: int = 0) -> None:
    """Give a model of `empty_model` its memory and its weights; each rank reads the parts that it holds, and no more.

    Of split experts (`parallelize_experts`) these are its own.

    Parameters may be DTensors of any placement or plain tensors; those that are not on the meta device stay as they
    are. Adapters on it start as PEFT's do (A Kaiming-uniform, B zero), drawn from `seed` as wholes, so that they are
    the same on any number of ranks.

    device: None for this rank's of the default group's backend, the CPU without a group. With CPU offload: "cpu".

    ValueError for a parameter that neither the checkpoint nor the start of an adapter gives a value.
    """
    target = torch.device(_default_device() if device is None else device)
    _check_adapters(model)
    generator, placed = torch.Generator().manual_seed(seed), _Placed(target)
    shares = _shares(model)
    with torch.no_grad():
        for path, module in model.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                placed.parameter(module, leaf, parameter)
            _fill(path, module, placed, generator, shares.get(id(module)))
        missing = [name for name, p in model.named_parameters() if p.is_meta or id(p) in placed.empty]
        if missing:
            raise ValueError(f"the checkpoint has no tensor for {len(missing)} parameters, first {missing[0]}")
        _fill_buffers(model, target)


def _shares(model: nn.Module) -> dict[int, Any]:
    """By the id of a module whose A stacks experts in dim 0: which of them are this rank's."""
    shares = {id(module): module.share for module in model.modules() if isinstance(module, ParallelExperts)}
    for wrapper in peft_wrappers(model):
        share = shares.get(id(wrapper.get_base_layer()))
        shares |= {id(a): share for a in wrapper.lora_A.values() if share is not None}
    return shares


def _default_device() -> torch.device:
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _check_adapters(model: nn.Module) -> None:
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        start = getattr(config, "init_lora_weights", True)
        if start is not True and any(p.is_meta for n, p in model.named_parameters() if f".{name}." in n):
            raise ValueError(f"adapter {name!r} starts with init_lora_weights={start!r}: only True can start on meta")


class _Placed:
    """Parameters on the meta device, exchanged for empty ones where they belong; one that is shared stays shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.empty: dict[int, nn.Parameter] = {}

    def parameter(self, module: nn.Module, leaf: str, meta: nn.Parameter) -> None:
        if not meta.is_meta:
            return
        if id(meta) not in self._known:
            made = nn.Parameter(self._empty(meta.data), requires_grad=meta.requires_grad)
            self._known[id(meta)] = meta, made
            self.empty[id(made)] = made
        module.register_parameter(leaf, self._known[id(meta)][1])

    def _empty(self, meta: Tensor) -> Tensor:
        if not isinstance(meta, DTensor):
            return torch.empty_like(meta, device=self._device)
        local = torch.empty_like(meta.to_local(), device=self._device)
        return DTensor.from_local(
            local, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )

    def fill(self, parameter: nn.Parameter, read: Read) -> None:
        """Fill a parameter that is still empty."""
        if self.empty.pop(id(parameter), None) is not None:
            part = _part_of(parameter)
            part.local.copy_(part.cut(read(part.rows)))


class _Part(NamedTuple):
    """What this rank holds of a parameter: the rows of its first dim, and of each dim offset and size."""

    local: Tensor
    rows: range
    offset: tuple[int, ...]

    def cut(self, rows: Tensor) -> Tensor:
        for dim in range(1, rows.dim()):
            rows = rows.narrow(dim, self.offset[dim], self.local.shape[dim])
        return rows


def _part_of(parameter: Tensor) -> _Part:
    if not isinstance(parameter.data, DTensor):
        return _Part(parameter.data, range(parameter.shape[0] if parameter.dim() else 1), (0,) * parameter.dim())
    tensor = parameter.data
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if local.shape != shape:
        raise ValueError(f"a rank holds {list(local.shape)} of a tensor of which its placement gives it {list(shape)}")
    return _Part(local, range(offset[0], offset[0] + shape[0]), tuple(offset))


def _fill(path: str, module: nn.Module, placed: _Placed, generator: torch.Generator, share: Any) -> None:
    source: Source | None = module.__dict__.get(SOURCE)
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if source is not None and source.path and isinstance(module, NVFP4Experts):
        _fill_experts(module, source, placed)
    elif source is not None and source.path:
        read = _Linear(source.checkpoint, source.path, module.get_parameter("weight").dtype if source.decoded else None)
        for leaf, parameter in own.items():
            if leaf == "weight" or (isinstance(module, NVFP4Linear) and leaf in _Linear.parts):
                placed.fill(parameter, read.of(leaf))
    for leaf, parameter in own.items():
        name = f"{path}.{leaf}" if path else leaf
        if source is not None and leaf in source.plain:
            placed.fill(parameter, _plain(source.checkpoint, source.plain[leaf], parameter))
        elif _LORA_A.search(name):
            placed.fill(parameter, _kaiming(parameter, generator, share))
        elif _LORA_B.search(name):
            placed.fill(parameter, _zeros(parameter))


def _fill_experts(module: NVFP4Experts, source: Source, placed: _Placed) -> None:
    """All of a layer's packed tensors are cut alike along the experts, which are read once."""
    loaded: dict[range, Any] = {}
    first = module.share.first if isinstance(module, ParallelExperts) else 0

    def read(rows: range, projection: str, part: str) -> Tensor:
        if not len(rows):
            whole = module.get_parameter(f"{projection}_{part}")
            return torch.empty((0, *whole.shape[1:]), dtype=whole.dtype)
        if rows not in loaded:
            loaded[rows] = source.checkpoint.load_experts(source.path, range(first + rows.start, first + rows.stop))
        experts = loaded[rows]
        if part == "bias":
            bias: Tensor = getattr(experts, f"{projection}_bias")
            return bias
        value: Tensor = getattr(getattr(experts, projection), part)
        return value.view(module.get_parameter(f"{projection}_{part}").dtype)

    for projection in PROJECTIONS:
        for part in ("codes", "scales", "global_scale", "bias"):
            parameter = getattr(module, f"{projection}_{part}")
            if parameter is not None:
                placed.fill(parameter, lambda rows, p=projection, t=part: read(rows, p, t))  # type: ignore[misc]


class _Linear:
    """Rows of a packed matrix; `dtype`: decoded to it."""

    parts = ("weight_codes", "weight_scales", "weight_global_scale")

    def __init__(self, checkpoint: Checkpoint, path: str, dtype: torch.dtype | None) -> None:
        self._checkpoint, self._path, self._dtype = checkpoint, path, dtype
        self._loaded: dict[range, PackedWeight] = {}

    def of(self, leaf: str) -> Read:
        return lambda rows: self._read(leaf, rows)

    def _read(self, leaf: str, rows: range) -> Tensor:
        if leaf == "weight_global_scale":  # [1], with whichever row it is read
            return self._weight(range(1)).global_scale.view(torch.int32)[rows.start : rows.stop]
        weight = self._weight(rows)
        if self._dtype is not None:
            return dequantize(*weight, self._dtype)
        return weight.codes if leaf == "weight_codes" else weight.scales.view(torch.uint8)

    def _weight(self, rows: range) -> PackedWeight:
        if rows not in self._loaded:
            self._loaded[rows] = self._checkpoint.load_linear(self._path, rows)
        return self._loaded[rows]


def _plain(checkpoint: Checkpoint, name: str, like: Tensor) -> Read:
    if checkpoint.shape(name) != tuple(like.shape):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name!r} is {list(checkpoint.shape(name))}, the model's {list(like.shape)}"
        )
    if name in checkpoint.fp8:  # decoded as a whole: a scale may be that of rows of two ranks
        return lambda rows: checkpoint.load_plain(name)[rows.start : rows.stop]
    return lambda rows: checkpoint.load_stored(name, rows if like.dim() else None)


def _kaiming(parameter: Tensor, generator: torch.Generator, share: Any) -> Read:
    """Uniform within 1 / sqrt(fan in), PEFT's start of A, drawn as a whole: of split experts, for all of them."""
    bound, ranks = 1 / math.sqrt(parameter.shape[-1]), 1 if share is None else share.ranks
    shape = (ranks * parameter.shape[0], *parameter.shape[1:])
    whole = torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    mine = whole if share is None else part_of(whole, share)
    return lambda rows: mine[rows.start : rows.stop]


def _zeros(parameter: Tensor) -> Read:
    return lambda rows: torch.zeros((len(rows), *parameter.shape[1:]), dtype=parameter.dtype)


def _fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers are small and never sharded: those of the checkpoint are read, the others computed by transformers."""
    for module in model.modules():
        source: Source | None = module.__dict__.get(SOURCE)
        module.__dict__["_is_hf_initialized"] = not any(buffer.is_meta for buffer in module.buffers(recurse=False))
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                if leaf.endswith("input_scale"):  # set while the module had no memory
                    module._buffers[leaf] = buffer.to(device)
                continue
            value = torch.empty_like(buffer, device=device)
            if isinstance(module, ParallelExperts) and leaf == "lost":
                value.zero_()
            if source is not None and leaf in source.plain:
                value.copy_(_plain(source.checkpoint, source.plain[leaf], buffer)(range(len(buffer))))
                value._is_hf_initialized = True  # type: ignore[attr-defined]
            module._buffers[leaf] = value
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for pretrained in _pretrained(model):
        pretrained.initialize_weights()


def _pretrained(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The outermost models of transformers."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside |= {id(m) for m in module.modules()}
            yield module
