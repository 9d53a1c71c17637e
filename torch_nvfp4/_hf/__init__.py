"""Private parts of `torch_nvfp4.hf`: recognise (what an experts module is), convert (packing and back)."""
