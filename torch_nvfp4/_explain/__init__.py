"""What `torch_nvfp4.explain` and `torch-nvfp4 tune` are made of."""
