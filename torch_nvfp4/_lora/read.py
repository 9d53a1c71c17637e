"""An adapter's files, read strictly for given sites, in whatever layout they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from . import files, peft, per_expert, stacked
from .sites import LoRASpec, Site
from .stamp import Stamp


@dataclass(frozen=True)
class AdapterFile:
    """What a directory adapts: each site's rank and strength; whether it is stamped as merge-aware."""

    specs: dict[Site, LoRASpec]
    stamp: Stamp | None
    _state: dict[str, Tensor]
    _config: peft.PeftConfig

    def values(self) -> dict[Site, tuple[Tensor, Tensor]]:
        """A and B of each site as `Site.factors` has them; ValueError for shapes or dtypes that do not fit."""
        layout = per_expert if per_expert.is_per_expert(self._state) else stacked
        return layout.factors_of(self._state, self._config, self.specs)


def read_for(directory: Path, sites: Sequence[Site], lora_b_layout: peft.BLayout | None = None) -> AdapterFile:
    """ValueError, naming the key, for whatever `torch_nvfp4.lora.load_adapter` does not read; sites may be on meta."""
    state, data = files.read_adapter(directory)
    config = peft.config_from_json(data, lora_b_layout)
    is_per_expert = per_expert.is_per_expert(state)
    specs = per_expert.specs_of(state, config, sites) if is_per_expert else config.targeted(sites)
    return AdapterFile(specs, Stamp.from_json(data), state, config)
