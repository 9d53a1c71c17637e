"""NVFP4 and MXFP4 checkpoints of Mixture-of-Experts models, read into the canonical packed layout bit for bit.

checkpoint = open_checkpoint(folder)
for path in checkpoint.experts:
    experts = checkpoint.load_experts(path)
"""

from .activations import use_input_scales
from .checkpoint import Checkpoint, open_checkpoint
from .convert import convert_folder
from .entries import ExpertsEntry, Fp8Entry, LinearEntry, PackedExperts, PackedWeight
from .errors import CheckpointError
from .quantize import Quantised, quantize_folder
from .save import save_packed
from .write import Written

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpertsEntry",
    "Fp8Entry",
    "LinearEntry",
    "PackedExperts",
    "PackedWeight",
    "Quantised",
    "Written",
    "convert_folder",
    "open_checkpoint",
    "quantize_folder",
    "save_packed",
    "use_input_scales",
]
