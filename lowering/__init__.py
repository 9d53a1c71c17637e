"""How Inductor compiles the `nvfp4` ops. Importing this imports neither Inductor nor triton.

`ensure_registered` is the whole interface: the fake kernels call it while a graph is traced for compilation.
The table of lowerings is in `table.py`; an op that is not in it stays a call of its eager kernel.
"""

import hashlib
import threading
from functools import cache
from pathlib import Path

import torch

_LOCK = threading.Lock()
_registered = False


def source_hash(directory: Path) -> str:
    """Hash of the Python files and templates in `directory`, which decide what the lowerings generate."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.suffix in (".py", ".jinja"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(directory).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


@cache
def cache_tag() -> str:
    """What `torch.compiler.config.cache_key_tag` must hold for caches to know these lowerings from others."""
    return f"torch_nvfp4.lowering={source_hash(Path(__file__).parent)}"


def ensure_registered() -> None:
    """Make Inductor lower the ops of this library, in this and in later compilations. Cheap when done.

    The caches of Inductor and AOTAutograd know nothing of lowerings from outside torch: without a tag in
    their keys, code compiled by an earlier version of these sources would be served.
    """
    global _registered
    with _LOCK:
        if not _registered:
            from .table import register_all

            register_all()
            _registered = True
    _tag_caches()


def _tag_caches() -> None:
    # Asked each time, not once: from torch 2.13 on a config value belongs to the thread that set it, and a
    # user may set another tag, or leave a `config.patch`, at any time.
    tags = torch.compiler.config.cache_key_tag
    if cache_tag() not in tags.split(";"):
        torch.compiler.config.cache_key_tag = f"{tags};{cache_tag()}" if tags else cache_tag()
