"""What `torch-nvfp4 plan` is made of."""
