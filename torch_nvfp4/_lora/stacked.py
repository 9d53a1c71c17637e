"""Adapter files with one A and one B for all experts of a projection: PEFT's layout, and what others made of it."""

import re
from collections.abc import Mapping

from torch import Tensor

from .peft import PeftConfig, is_interleaved, keys_of, peft_shapes, split_experts
from .sites import LoRASpec, Site, stock_layout_of
from .strict import check_keys, check_tensor

_FIRST_UPRIGHT = (0, 19, 1)  # before it, PEFT read a parameter [E, out, in] as [E, in, out]


def factors_of(
    state: Mapping[str, Tensor], config: PeftConfig, specs: Mapping[Site, LoRASpec]
) -> dict[Site, tuple[Tensor, Tensor]]:
    """(A, B) of each site as its module holds them; ValueError for keys, shapes or dtypes that do not fit."""
    keys = keys_of(list(specs))
    check_keys(state, [key for pair in keys.values() for key in pair])
    old = _is_old(state, config, {site: pair[0] for site, pair in keys.items() if site.is_experts}, specs)
    values = {}
    for site, pair in keys.items():
        r, transposed = specs[site].r, site.is_experts and old != stock_layout_of(site.module).untold
        sizes = f"E = {site.num_experts} experts and R = {r}" if site.is_experts else f"R = {r}"
        for key, shape in zip(pair, _shapes(site, r, transposed), strict=True):
            check_tensor(key, state[key], shape, sizes)
        a, b = (state[key] for key in pair)
        if site.is_experts:
            grouped = config.grouped_by_expert
            a, b = split_experts(a, b, site.num_experts, is_interleaved(site), grouped=grouped, transposed=transposed)
        values[site] = a, b
    return values


def _is_old(
    state: Mapping[str, Tensor], config: PeftConfig, keys: Mapping[Site, str], specs: Mapping[Site, LoRASpec]
) -> bool:
    """Whether the file's orientation is PEFT's old one. A square weight tells nothing, the file's other weights do."""
    telling = [site for site in keys if site.out_in[0] != site.out_in[1]]
    if telling:
        olds = {site: _shapes(site, specs[site].r, not stock_layout_of(site.module).untold)[0] for site in telling}
        return all(state[keys[site]].shape == shape for site, shape in olds.items())
    if keys and config.peft_version is not None and _version(config.peft_version) < _FIRST_UPRIGHT:
        key = next(iter(keys.values()))
        raise ValueError(
            f"{key}: PEFT {config.peft_version} adapted the transposed weight of most models, and no shape tells where "
            "the weight is square; without peft_version in adapter_config.json it is read as a later PEFT writes it"
        )
    return False


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _shapes(site: Site, r: int, transposed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and of B as the file holds them."""
    (rows_a, c), (n, columns_b) = peft_shapes(site, r)
    return ((rows_a, n), (c, columns_b)) if transposed and site.is_experts else ((rows_a, c), (n, columns_b))
