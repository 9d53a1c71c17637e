"""`torch-nvfp4 inspect` and `quantize`: what they print, and one line for whatever is wrong."""

from pathlib import Path

import pytest
import torch
from checkpoint_files import make
from expecttest import assert_expected_inline
from test_checkpoint_golden import GOLDEN
from test_checkpoint_quantize import dense, write
from test_checkpoint_save import with_scales

from torch_nvfp4.checkpoint import open_checkpoint
from torch_nvfp4.cli import run


def test_inspect_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    folder = GOLDEN / "ckpt_modelopt_qwen3_moe-NVFP4_DEFAULT_CFG"
    assert run(["inspect", str(folder), "--seq-len", "524288", "--batch", "2", "--rank", "8"]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
kind     layers                               format  sizes                  weights   bits  MiB
experts  1 x model.layers.*.mlp.experts       nvfp4   E = 3, H = 32, I = 16    4,608   4.62  0.0
linear   1 x model.layers.*.self_attn.k_proj  nvfp4   16 x 32                    512   4.62  0.0
linear   1 x model.layers.*.self_attn.o_proj  nvfp4   32 x 32                  1,024   4.56  0.0
linear   1 x model.layers.*.self_attn.q_proj  nvfp4   32 x 32                  1,024   4.56  0.0
linear   1 x model.layers.*.self_attn.v_proj  nvfp4   16 x 32                    512   4.62  0.0
other    8 tensors                            bf16                             1,248  16.00  0.0

0.0 MiB in all
global scales of gate and up differ by a factor of at most 1
training on one GPU: 2 x 524288 tokens, bf16, compiled, with gradient checkpointing, LoRA rank 8: experts, q_proj, \
k_proj, v_proj, o_proj
part                  GiB
weights              0.00
adapters, fp32       0.00
their gradients      0.00
AdamW moments        0.00
kept by all layers   0.06
backward of a layer  1.09
logits and loss      0.12
expected peak        1.15
The peak is in the last layer of backward, where not all of the last three are there.
Not counted: the CUDA context, memory that the allocator keeps unused, autotuning, loading.
""",
    )


def test_quantize_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path / "dense", dense()), tmp_path / "packed"
    assert run(["quantize", str(source), str(out), "--format", "mxfp4", "--layout", "compressed-tensors"]) == 0
    assert capsys.readouterr().out == f"{out}: 9 expert weights, 0.0 -> 0.0 MiB\n"
    (entry,) = open_checkpoint(out).experts.values()
    assert (entry.format, entry.num_experts, entry.hidden, entry.intermediate) == ("mxfp4", 3, 64, 32)
    assert run(["inspect", str(out)]) == 0
    told = capsys.readouterr().out
    assert "experts  1 x model.layers.*.mlp.experts  mxfp4" in told and "4.25" in told
    assert "no estimate of training memory" in told or "training on one GPU" in told
    options = ["--no-gradient-checkpointing", "--compile", "layers"]
    assert run(["inspect", str(GOLDEN / "ckpt_modelopt_nemotron_h-NVFP4_DEFAULT_CFG"), *options]) == 0
    told = capsys.readouterr().out
    assert "compiled layers, without gradient checkpointing" in told and "gate and up" not in told

    assert run(["quantize", str(source), str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"torch-nvfp4: {out}: exists") and error.count("\n") == 1
    tensors = dense()
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"][0, 0] = torch.inf
    assert run(["quantize", str(write(tmp_path / "inf", tensors)), str(tmp_path / "never")]) == 2
    assert "up_proj.weight" in capsys.readouterr().err and not (tmp_path / "never").exists()
    assert run(["inspect", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"torch-nvfp4: {tmp_path / 'nothing'}: no such folder\n"


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = GOLDEN / "ckpt_modelopt_mixtral-NVFP4_DEFAULT_CFG", tmp_path / "out"
    assert run(["convert", str(source), str(out), "--layout", "compressed-tensors"]) == 0
    assert (
        capsys.readouterr().out == f"{out}: 13 packed weights in the layout of compressed-tensors, all scales exact\n"
    )
    assert open_checkpoint(out).layout == "compressed-tensors"
    assert run(["convert", str(source), str(out), "--layout", "compressed-tensors"]) == 2
    assert capsys.readouterr().err.startswith(f"torch-nvfp4: {out}: exists")
    assert run(["convert", str(source), str(tmp_path / "same"), "--layout", "modelopt"]) == 2
    assert capsys.readouterr().err == f"torch-nvfp4: {source}: has the layout modelopt already\n"

    with_scales(make("qwen3"), "up_proj", (1 - 2**-24) * 2**-13).write(tmp_path / "in")
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "a"), "--layout", "compressed-tensors"]
    assert run([*arguments, "--exact"]) == 2
    assert "3 of its scales have no exact divisor" in capsys.readouterr().err
    assert run(arguments) == 0
    assert capsys.readouterr().out.endswith(", 3 of their scales off by the last bit\n")
