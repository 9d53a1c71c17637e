"""The modules of `torch_nvfp4.nn`, a role a file."""
