"""Fine-tuning of LoRA adapters on NVFP4 experts: what `torch-nvfp4 finetune` runs."""
