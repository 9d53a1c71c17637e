"""Checkpoints that other tools exported, read and compared with what those tools decode."""

from pathlib import Path

import pytest
import torch
from format_bits import same_bits
from safetensors.torch import load_file
from torch import Tensor

from torch_nvfp4.checkpoint import Checkpoint, PackedWeight, open_checkpoint
from torch_nvfp4.format import decode, dequantize

GOLDEN = Path(__file__).parent / "golden"
MODELOPT = sorted(path.name for path in GOLDEN.glob("ckpt_modelopt_*"))
COMPRESSED = "ckpt_ct_qwen3_moe-NVFP4A16"
HALVES = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1}
DOWN = ("down_proj", "w2")


def open_golden(name: str) -> tuple[Checkpoint, dict[str, Tensor], dict[str, Tensor]]:
    """The checkpoint, its tensors as stored, and the weights that its exporter decodes (fp32)."""
    folder = GOLDEN / name
    return (
        open_checkpoint(folder),
        load_file(folder / "model.safetensors"),
        load_file(folder / "expected_dequant_f32.safetensors"),
    )


def values(packed: PackedWeight) -> Tensor:
    return dequantize(*packed, torch.float32)


def expected_experts(checkpoint: Checkpoint, path: str, expected: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """gate_up and down in the canonical layout, from weights decoded under the checkpoint's own names."""
    if f"{path}.gate_up_proj" in expected:  # fused: [E, C, N], gate and up alternate
        gate_up, down = (expected[f"{path}.{role}"].transpose(1, 2) for role in ("gate_up_proj", "down_proj"))
        return torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1), down
    gate_ups, downs = [], []
    for e in range(checkpoint.experts[path].num_experts):
        names = [name for name in expected if name.startswith(f"{path}.{e}.")]
        roles = {name.split(".")[-2]: expected[name] for name in names}
        gate_ups.append(torch.cat([roles[role] for role in HALVES if role in roles]))
        downs.append(next(roles[role] for role in DOWN if role in roles))
    return torch.stack(gate_ups), torch.stack(downs)


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_exports_decode_to_the_same_bits(name: str) -> None:
    checkpoint, _, expected = open_golden(name)
    seen = 0
    for path in checkpoint.experts:
        gate_up, down = expected_experts(checkpoint, path, expected)
        experts = checkpoint.load_experts(path)
        assert torch.equal(values(experts.gate_up), gate_up) and torch.equal(values(experts.down), down)
        seen += gate_up.numel() + down.numel()
    for path in checkpoint.linears:
        assert torch.equal(values(checkpoint.load_linear(path)), expected[f"{path}.weight"])
        seen += expected[f"{path}.weight"].numel()
    assert seen == sum(weight.numel() for weight in expected.values())


def test_compressed_tensors_keeps_its_bytes_and_turns_its_divisor_round() -> None:
    """Their decoding divides by the divisor; no fp32 multiplier does the same, so the last bit may differ."""
    checkpoint, stored, expected = open_golden(COMPRESSED)

    def check(packed: PackedWeight, stem: str) -> None:
        divisor = stored[f"{stem}.weight_global_scale"]
        assert same_bits((packed.codes, stored[f"{stem}.weight_packed"]))
        assert same_bits((packed.scales, stored[f"{stem}.weight_scale"]))
        assert torch.equal(packed.global_scale.double(), (1 / divisor.double()).float().double())
        theirs = decode(packed.codes, torch.ones_like(packed.scales.float()).to(torch.float8_e4m3fn))
        factors = (packed.scales.float() / divisor).repeat_interleave(16, dim=-1)
        assert torch.equal(theirs * factors, expected[f"{stem}.weight"])
        # two roundings of the factor for one, and one more of each product
        torch.testing.assert_close(values(packed), expected[f"{stem}.weight"], rtol=5 * 2.0**-24, atol=0)

    for path, entry in checkpoint.experts.items():
        experts = checkpoint.load_experts(path)
        for e in range(entry.num_experts):
            for role, half in (("gate_proj", 0), ("up_proj", 1)):
                rows = slice(half * entry.intermediate, (half + 1) * entry.intermediate)
                codes, scales, global_scale = experts.gate_up
                part = PackedWeight(codes[e, rows], scales[e, rows], global_scale[e, half : half + 1])
                check(part, f"{path}.{e}.{role}")
            check(PackedWeight(*(t[e] for t in experts.down)), f"{path}.{e}.down_proj")
    for path in checkpoint.linears:
        check(checkpoint.load_linear(path), path)


@pytest.mark.parametrize("name", [*MODELOPT, COMPRESSED])
def test_every_tensor_is_in_one_place_and_plain_ones_are_as_stored(name: str) -> None:
    checkpoint, stored, _ = open_golden(name)
    entries = [*checkpoint.experts.values(), *checkpoint.linears.values()]
    names = [*checkpoint.plain, *(tensor for entry in entries for tensor in entry.tensors)]
    assert sorted(names) == sorted(stored) and not checkpoint.fp8
    for name in checkpoint.plain:
        tensor = checkpoint.load_plain(name)
        assert tensor.dtype == stored[name].dtype and same_bits((tensor, stored[name]))
