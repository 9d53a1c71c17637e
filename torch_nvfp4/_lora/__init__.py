"""Private parts of `torch_nvfp4.lora`: sites (where adapters sit), peft (names, config and layout), stacked and
per_expert (files with one A and B for all experts, or keys for each), strict (what files must be), files,
read (all of these, for given sites), stamp (merge-aware adapters)."""
