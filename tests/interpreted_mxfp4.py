"""Runs the CUDA products under Triton's interpreter with MXFP4's outermost block scales (bytes 0, 1, 254 and 255), and,
for rows in fp16, with every one that it has.

A program of its own, like `interpreted_kernels.py`, whose mended interpreter it uses; `test_mxfp4.py` runs it.
"""

from interpreted_kernels import BF16, F16, F32, use_cpu_tensors  # isort: skip  (it chooses the interpreter)

import warnings

import torch
from mxfp4_bytes import EDGES, check_every_scale, check_products

from torch_nvfp4.lowering import eager

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    use_cpu_tensors()
    for dtype in (F32, BF16):
        check_products(eager, dtype)
        print(f"{dtype}: {len(EDGES)} experts ok", flush=True)
    check_every_scale(eager, F16)
    print("every scale under fp16 ok", flush=True)
    print("all agree")
