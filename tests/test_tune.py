"""`torch-nvfp4 tune` and `explain`: few kernel variants over all T, all met beforehand; sizes from a model's config."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_nvfp4 import cli
from torch_nvfp4._explain.keys import MOST_TOKENS, LayerSizes, dry_launches, key, representative_tokens
from torch_nvfp4._explain.model_config import read_sizes
from torch_nvfp4.lowering import configs

QWEN = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "hidden_act": "silu"}  # fmt: skip
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
           "num_experts_per_tok": 4, "hidden_act": "silu", "swiglu_limit": 7.0}  # fmt: skip
TINY = QWEN | {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are chosen as for an H200."""
    monkeypatch.setattr(configs, "device_limits", lambda device: (227 * 1024, True))
    monkeypatch.setattr(configs, "processors", lambda device: 132)
    monkeypatch.setattr(configs, "family", lambda device: 9)


FEW_EXPERTS = LayerSizes(256, 128, 8, 2)  # where the factor gradients are split over rows


@pytest.mark.parametrize(
    "sizes",
    [LayerSizes(2048, 768, 128, 8), LayerSizes(2880, 2880, 32, 4, activation="swiglu_oai", limit=7.0, bias=True),
     LayerSizes(2048, 768, 128, 8, r=32), FEW_EXPERTS],
    ids=["qwen3-30b-a3b", "gpt-oss-20b", "rank 32", "few experts"],
)  # fmt: skip
def test_a_few_tokens_meet_every_kernel_of_all_tokens(hopper: None, sizes: LayerSizes) -> None:
    chosen = representative_tokens(sizes)
    assert len(chosen) < 60 and chosen[0] == 1 and chosen[-1] == MOST_TOKENS
    met = {key(launch) for launch in dry_launches(sizes, chosen)}
    others = random.Random(0).sample(range(1, MOST_TOKENS), 150) + list(range(1, 65))
    assert {key(launch) for launch in dry_launches(sizes, others)} <= met

    kernels = [kernel for kernel, _ in met]
    # Every tile of the warp-specialised product, linear and dgrad, for both projections, by what these sum over.
    depths = (sizes.h, sizes.i, 2 * sizes.i, sizes.h)
    tiles = [config for config in configs.HOPPER_CONFIGS for depth in depths if config.least_depth <= depth]
    assert kernels.count("grouped_product") == len(tiles)
    assert not {"grouped_dense", "grouped_linear"} & {*kernels}
    assert {"shrink", "shrink_row", "wgrad", "glu_forward", "glu_backward", "combine"} <= {*kernels}
    assert ("sum_chunks" in kernels) == (sizes is not FEW_EXPERTS)  # their columns are one chunk, without a bias
    assert {"route_at_once", "route_count", "route_scan", "route_place"} <= {*kernels}
    assert len(met) <= 48


def test_integers_add_few_variants(hopper: None) -> None:
    sizes = LayerSizes(2048, 768, 128, 8)
    launches = dry_launches(sizes, representative_tokens(sizes))
    assert len(launches) <= 1.5 * len({key(launch) for launch in launches})


def test_without_adapters_there_is_less_to_compile(hopper: None) -> None:
    plain, adapted = (dry_launches(LayerSizes(64, 32, 4, 2, r), (1, 512)) for r in (0, 16))
    assert "wgrad" not in {launch.kernel for launch in plain}
    assert "wgrad" in {launch.kernel for launch in adapted}


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sizes_of(path: Path) -> LayerSizes:
    return read_sizes(path, rank=16, format="nvfp4", dtype=torch.bfloat16)


def test_sizes_of_models(tmp_path: Path) -> None:
    assert sizes_of(write(tmp_path, QWEN)) == LayerSizes(2048, 768, 128, 8)
    assert sizes_of(write(tmp_path, {"text_config": QWEN}) / "config.json") == LayerSizes(2048, 768, 128, 8)
    expected = LayerSizes(2880, 2880, 32, 4, activation="swiglu_oai", limit=7.0, bias=True)
    assert sizes_of(write(tmp_path, GPT_OSS)) == expected


def run(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(command.split())
    return code, *capsys.readouterr()


@pytest.mark.parametrize("command", ["tune", "explain"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 64}, "does not give I (moe_intermediate_size or intermediate_size)"),
        (TINY | {"num_experts": None}, "does not give E (num_experts or n_routed_experts or num_local_experts)"),
        (TINY | {"num_experts_per_tok": 5}, "chooses K = 5 of E = 4 experts"),
        (TINY | {"hidden_size": 70}, "H = 70 and I = 32 must be multiples of B = 16 (nvfp4)"),
        (TINY | {"hidden_act": "tanh"}, "activation 'tanh' is none of silu,"),
        ([], "holds no JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configs_that_say_too_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, config: Any, words: str
) -> None:
    code, _, error = run(f"{command} --model-config {write(tmp_path, config)}", capsys)
    assert code == 2 and error.count("\n") == 1 and words in error, error


def test_commands_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = write(tmp_path, TINY)
    code, _, error = run(f"tune --model-config {folder}", capsys)
    assert code == 2
    assert error == "torch-nvfp4: tune compiles kernels for a GPU, and torch finds none here that it can use\n"
    code, _, error = run(f"explain --model-config {folder} --device cuda", capsys)
    assert code == 2 and error == "torch-nvfp4: --device cuda: torch finds none here that it can use\n"
    code, _, error = run(f"tune --model-config {folder} --tokens 1,x", capsys)
    assert code == 2 and "--tokens is '1,x': give whole numbers above 0" in error
    code, _, error = run(f"tune --model-config {folder / 'no'}", capsys)
    assert code == 2 and "no does not exist" in error

    code, out, _ = run(f"explain --model-config {folder} --tokens 3 --rank 4", capsys)
    assert code == 0 and out.startswith("CPU, eager, forward + backward, 1 layer\n")
    assert "glu_grouped_lora_linear  CPU kernel" in out


@pytest.mark.gpu
def test_tune_meets_every_kernel_that_training_then_uses() -> None:
    from torch_nvfp4._explain.warm import launches_of, warm

    sizes = FEW_EXPERTS
    said: list[str] = []
    seen = warm(sizes, representative_tokens(sizes, 4096), said.append)
    assert said[-1] == f"{len(seen)} kernel variants"
    experts = sizes.experts("cuda")
    for t in (1, 5, 37, 640, 2000, 3333):
        launches = launches_of(experts, sizes, t)
        assert launches is not None and {key(launch) for launch in launches} <= seen
