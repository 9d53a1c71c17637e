"""Private parts of `torch_nvfp4.hf`: recognise (what an experts module is), convert (packing and back), load and
quantizer (packed checkpoints through `from_pretrained`), peft_dispatch and peft_layers (PEFT on packed modules)."""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ModuleNotFoundError("transformers is not installed: pip install 'torch-nvfp4[hf]'", name="transformers")
