"""MXFP4 where it differs from NVFP4: its outermost block scales in every op, and the commands with --format mxfp4."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from finetune_tiny import make_folder, tiny_config
from mxfp4_bytes import EDGES, check_products, edge_weights
from rich.console import Console
from torch import Tensor

import torch_nvfp4
from torch_nvfp4 import NVFP4Experts
from torch_nvfp4._explain.keys import dry_launches
from torch_nvfp4._explain.model_config import read_sizes
from torch_nvfp4.format import decode
from torch_nvfp4.lowering import configs
from torch_nvfp4.train.config import FinetuneError
from torch_nvfp4.train.loop import finetune

HERE = Path(__file__).parent
OPS = torch.ops.nvfp4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outermost_scales_in_the_products(dtype: torch.dtype) -> None:
    check_products(OPS, dtype)


def test_outermost_scales_in_the_compiled_products() -> None:
    compiled = SimpleNamespace(
        grouped_lora_linear=torch.compile(lambda *args: OPS.grouped_lora_linear(*args), fullgraph=True),
        grouped_lora_dgrad=torch.compile(lambda *args: OPS.grouped_lora_dgrad(*args), fullgraph=True),
    )
    check_products(compiled, torch.float32)


def test_outermost_scales_in_the_cuda_products() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "interpreted_mxfp4.py"]
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "all agree"


def test_outermost_scales_in_merging() -> None:
    """A block without a delta keeps its bytes, whatever they are; one that has a delta gets a fresh scale."""
    codes, scales, ones = edge_weights()
    e, n, c = len(EDGES), codes.shape[1], 2 * codes.shape[2]
    a, b = torch.zeros(e, 1, c), torch.full((e, n, 1), 2.0**-60)
    a[:, :, :32] = 2.0**-60
    merged, fresh = OPS.merge_lora(codes, scales, ones, a, b, 1.0)
    before, after = scales.view(torch.uint8), fresh.view(torch.uint8)
    assert torch.equal(after[..., 1], before[..., 1]) and torch.equal(merged[..., 16:], codes[..., 16:])
    assert (after[:2, :, 0] == 127 - 120 - 2).all()  # 2^-120 + at most 6 · 2^-126
    assert (after[2, :, 0] == 127 + 127 - 2).all() and (after[3, :, 0] == 255).all()
    values = decode(merged, fresh, torch.float64)[:2, :, :32]
    assert ((values - 2.0**-120).abs() <= 2.0**-122).all()


def test_outermost_scales_round_trip() -> None:
    """What 2^-127 and 2^127 scale, quantised again, is the same; `fake_quantize` leaves it alone."""
    codes, scales, _ = edge_weights()
    for e in (1, 2):
        codes[e].view(-1, 16)[:, 0] = 0x17 if e == 1 else 0x13  # a largest magnitude of 6, of 1.5
        values = decode(codes[e], scales[e])
        assert torch.equal(OPS.fake_quantize(values, format="mxfp4"), values)
    tiny = decode(codes[0], scales[0]).abs()
    assert float(tiny.max()) == 6 * 2.0**-127 and float(tiny[tiny > 0].min()) == 2.0**-128


def layer() -> tuple[NVFP4Experts, tuple[Tensor, Tensor, Tensor]]:
    experts = NVFP4Experts.from_dense(torch.randn(4, 64, 64) / 8, torch.randn(4, 64, 32) / 8, format="mxfp4")
    experts.add_lora(4, scaling=2.0)
    weights, ids = torch.randn(16, 4).softmax(-1).topk(2)
    return experts, (torch.randn(16, 64), ids, weights)


def test_explain() -> None:
    experts, inputs = layer()
    told = torch_nvfp4.explain(experts, *inputs, card=torch_nvfp4.Card("made-up card", flops=1e12, bandwidth=1e12))
    down = {op.op: op for op in told.ops}["glu_grouped_lora_linear"]
    packed = sum(t.nbytes for t in experts.packed("down"))
    assert packed == 4 * 64 * (16 + 1) + 4 * 4  # 4.25 bits a weight
    factors = experts.down_lora_a.nbytes + experts.down_lora_b.nbytes
    assert down.nbytes == 4 * 32 * 64 + inputs[2].nbytes + 4 * (32 + 4) + packed + factors + 4 * 32 * (64 + 4)


def test_finetune(tmp_path: Path) -> None:
    """Trains on MXFP4 experts; what merging needs names the format."""
    folder = make_folder(tmp_path)
    printed = Console(file=open(tmp_path / "told", "w"), width=400)  # noqa: SIM115
    result = finetune(tiny_config(folder, tmp_path / "out", format="mxfp4", merge_aware=True), console=printed)
    printed.file.close()
    assert result.experts_bytes_after < 0.14 * result.experts_bytes_before  # 4.25 of 32 bits, and global scales
    assert "--no-share-gate-up --format mxfp4" in (tmp_path / "told").read_text()
    assert result.final_loss < result.base_loss


def test_finetune_refuses_another_format(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="--format is 'int4': give one of nvfp4, mxfp4"):
        tiny_config(tmp_path, tmp_path / "out", format="int4").validate()


def test_sizes_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "device_limits", lambda device: (227 * 1024, True))
    monkeypatch.setattr(configs, "processors", lambda device: 132)
    monkeypatch.setattr(configs, "family", lambda device: 9)
    config = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
    sizes = read_sizes(tmp_path, rank=4, format="mxfp4", dtype=torch.bfloat16)
    assert sizes.format == "mxfp4" and dry_launches(sizes, (1, 512))
