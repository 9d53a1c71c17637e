"""Which base an adapter was trained on: a digest of the packed weights that it adapts, whatever their names and layout.

Of a layer's experts the first and the last count, of a matrix the whole: all block scales, and the codes of the first
rows. Neither names nor the order of layers matter, nor global scales, which a layout may round; so a folder, the same
one converted, and either in memory give the same. The bytes read are a bounded share of each layer.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import PROJECTIONS, NVFP4Experts, NVFP4Linear

ROWS = 16
"""Of these many rows of a matrix the codes count."""


def fingerprint(modules: Iterable[nn.Module]) -> str | None:
    """Of these packed modules in memory; None where a part of one is elsewhere (sharded, split, on "meta")."""
    packed = {id(module): module for module in modules if isinstance(module, NVFP4Experts | NVFP4Linear)}
    if not packed or not all(map(_is_whole, packed.values())):
        return None
    return combined(_digest(_parts(module)) for module in packed.values())


def fingerprint_of_folder(checkpoint: Any, experts: Iterable[str], linears: Iterable[str]) -> str:
    """Of the packed modules at these paths of an opened checkpoint."""

    def digests() -> Iterator[str]:
        for path in experts:
            last = checkpoint.experts[path].num_experts - 1
            ends = [checkpoint.load_experts(path, range(e, e + 1)) for e in dict.fromkeys((0, last))]
            yield _digest((w.codes[0], w.scales[0]) for p in PROJECTIONS for end in ends for w in [getattr(end, p)])
        for path in linears:
            weight = checkpoint.load_linear(path)
            yield _digest([(weight.codes, weight.scales)])

    return combined(digests())


def combined(digests: Iterable[str]) -> str:
    """One for several layers, in whatever order."""
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:32]


def _is_whole(module: nn.Module) -> bool:
    parts = list(module.parameters(recurse=False))
    return "share" not in module.__dict__ and not any(p.is_meta or hasattr(p, "full_tensor") for p in parts)


def _parts(module: NVFP4Experts | NVFP4Linear) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(module, NVFP4Linear):
        yield module.packed()[:2]
        return
    for projection in PROJECTIONS:
        codes, scales, _ = module.packed(projection)
        for e in dict.fromkeys((0, module.num_experts - 1)):
            yield codes[e], scales[e]


def _digest(weights: Iterable[tuple[Tensor, Tensor]]) -> str:
    digest = hashlib.sha256()
    for codes, scales in weights:
        digest.update(f"{[*codes.shape]} {scales.dtype}\n".encode())
        for part in (codes[:ROWS], scales):
            digest.update(part.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
