"""Private parts of `torch_nvfp4.merge`: names (which weight an adapter means), merged (the weights with the adapter in
them), report (how much of each delta is there)."""
