"""FSDP2 on a packed model: `fully_shard` on each layer, then on the model, with what packed weights need."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ..nn import NVFP4Experts, NVFP4Linear


def shard_layers(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> list[str]:
    """Apply FSDP2 to every layer of a packed model and to the rest of it, in place; returns the layers' names.

    Adapters belong on the model before, because FSDP2 does not see parameters that come later.

    Args:
        mesh: 1-D (shards), or 2-D (replicas, shards); None for all ranks of the default group.
        reshard_after_forward: free a layer's gathered weights after forward and gather them again in backward. They
            are 4-bit, so False costs little: a layer's codes and scales stay. A number that divides the ranks: keep
            them over so many (a node's), from which backward gathers.
        mp_policy: casts parameters that are floating: adapters, biases, plain weights. Codes, scales and global scales
            are integers and stay as they are, and so do buffers (a router's correction bias). Its `output_dtype` is the
            model's, not that of what layers hand on.

    Layers are the modules of the classes that transformers does not split, else the elements of the outermost
    `ModuleList`s. ValueError for a model without packed modules, and for one without layers.
    """
    if not any(isinstance(module, NVFP4Experts | NVFP4Linear) for module in model.modules()):
        raise ValueError("the model has no packed module (NVFP4Experts, NVFP4Linear): pack it before it is sharded")
    layers = dict(_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers to shard one by one: call fully_shard on its parts")
    mp_policy, offload_policy = mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy()
    for layer in layers.values():
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=replace(mp_policy, output_dtype=None),
            offload_policy=offload_policy,
        )
    fully_shard(model, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    return list(layers)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    found = [(path, m) for path, m in model.named_modules() if type(m).__name__ in names]
    if not found:
        lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        found = [(f"{path}.{name}", m) for path, modules in lists for name, m in modules.named_children()]
    outer = ""
    for path, module in found:  # in the order of named_modules, so what is inside a layer follows it
        if not outer or not path.startswith(outer):
            outer = f"{path}."
            yield path, module
