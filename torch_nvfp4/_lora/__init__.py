"""Private parts of `torch_nvfp4.lora`: sites (where adapters sit), targets (names), peft (layout), files."""
