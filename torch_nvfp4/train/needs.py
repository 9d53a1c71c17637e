"""What a run needs on this machine, asked before a hub is and before anything trains."""

from __future__ import annotations

from importlib.util import find_spec

from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, flag
from torch_nvfp4.train.config_file import load_yaml
from torch_nvfp4.train.sources import check_file


def check_needs(config: FinetuneConfig) -> None:
    """Raise FinetuneError for a file that is not there, and for a package that is missed when the run is over."""
    for name in ("text", "eval_text"):
        for path in getattr(config, name):
            check_file(path, flag(name))
    if config.chat_template is not None:
        check_file(config.chat_template, flag("chat_template"))
    load_yaml()  # for config.yaml
    if config.plot and find_spec("matplotlib") is None:
        raise FinetuneError(
            "matplotlib, which draws loss.png, is not installed: pip install 'torch-nvfp4[demo]', or give --no-plot"
        )
