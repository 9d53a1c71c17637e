"""Packed checkpoints under `device_map`: what its planner believes of their sizes, and what may be put elsewhere."""

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from golden_models import CHECKPOINTS, GOLDEN, QWEN, load, logits
from hf_models import make_model
from packed_models import Style, export, make_stock
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, modeling_utils
from transformers.integrations.accelerate import compute_module_sizes

from torch_nvfp4.format import quantize
from torch_nvfp4.hf import quantize_experts
from torch_nvfp4.nn import NVFP4Linear

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = torch.device("cpu")  # the device that runs; the string "cpu" in a map beside it is where others are offloaded


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Filled by a `from_pretrained` with a device_map: module and tensor name -> bytes, as the planner has them."""
    sizes: dict[str, float] = {}
    plan = modeling_utils._get_device_map

    def spy(model: PreTrainedModel, device_map: Any, max_memory: Any, quantizer: Any) -> Any:
        sizes.update(compute_module_sizes(model, quantizer)[0])
        allocated = modeling_utils.get_total_byte_count(
            model, {n: HERE for n, _ in model.named_parameters()}, quantizer
        )
        sizes["allocated at once"] = allocated[HERE]
        return plan(model, device_map, max_memory, quantizer)

    monkeypatch.setattr(modeling_utils, "_get_device_map", spy)
    return sizes


def held(model: PreTrainedModel) -> dict[str, int]:
    """Module name -> bytes."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = {name for name, _ in model.named_modules()}
    inside = {
        name: [t.nbytes for full, t in tensors if full.startswith(f"{name}." if name else "")] for name in modules
    }
    return {name: sum(sizes) for name, sizes in inside.items() if sizes}


def packed_embedding(folder: Path) -> Path:
    """A checkpoint whose embedding is packed, which is decoded here, as is the indexer's `weights_proj`."""
    export(make_stock("glm_moe_dsa"), folder, Style())
    tensors, name = load_file(folder / "model.safetensors"), "model.embed_tokens.weight"
    codes, scales, global_scale = quantize(tensors.pop(name))
    tensors |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": global_scale.reshape(())}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


BF16 = ("ckpt_modelopt_gpt_oss-NVFP4_DEFAULT_CFG", "decoded")  # beside fp32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in (*CHECKPOINTS, "decoded")), *((name, torch.bfloat16) for name in BF16)],
)
def test_every_module_is_planned_with_its_bytes(
    name: str, dtype: torch.dtype, planned: dict[str, float], tmp_path: Path
) -> None:
    folder = packed_embedding(tmp_path) if name == "decoded" else GOLDEN / name
    model = load(folder, dtype=dtype, device_map="auto")
    assert planned.pop("allocated at once") == sum(p.nbytes for p in model.parameters())
    modules = {name for name, _ in model.named_modules()}  # what is decoded has other tensors than were planned
    assert {name: size for name, size in planned.items() if name in modules} == held(model)


def test_memory_for_exactly_the_packed_bytes() -> None:
    size = held(load(GOLDEN / QWEN))[""]
    model = load(GOLDEN / QWEN, device_map="auto", max_memory={"cpu": size})
    assert held(model)[""] == size
    with pytest.raises(ValueError, match="device_map offloads to disk: packed weights must lie on the device"):
        load(GOLDEN / QWEN, device_map="auto", max_memory={"cpu": size - 1})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_accelerate_itself_counts_packed_tensors_as_bytes(dtype: torch.dtype | None) -> None:
    """Whatever dtype it is told to plan for (`accelerate.infer_auto_device_map`), and on the meta device too."""
    model = quantize_experts(make_model("gpt_oss"))
    expected = held(model if dtype is None else copy.deepcopy(model).to(dtype))[""]
    for device in ("cpu", "meta"):
        sizes = accelerate.utils.compute_module_sizes(model.to(device), dtype=dtype)
        assert sizes[""] == expected


def spread(**elsewhere: str) -> dict[str, Any]:
    modules = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
    return {name: elsewhere.get(name.rpartition(".")[2], HERE) for name in modules}


@pytest.mark.filterwarnings("ignore:.*offloaded to the cpu")
def test_plain_weights_may_be_offloaded_and_packed_ones_not() -> None:
    expected = logits(load(GOLDEN / QWEN))
    for part in ("embed_tokens", "lm_head"):
        model = load(GOLDEN / QWEN, device_map=spread(**{part: "cpu"}))
        assert [name for name, p in model.named_parameters() if p.is_meta and part in name]
        assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match="experts is offloaded by device_map: packed weights must lie on the device"):
        load(GOLDEN / QWEN, device_map=spread(layers="cpu"))


def test_what_is_decoded_stays_on_its_device_of_a_spread_model(tmp_path: Path) -> None:
    """The hooks that move a module's inputs to it are those of the packed one, which it replaces."""
    folder = packed_embedding(tmp_path)
    whole, model = load(folder), load(folder, device_map=spread(lm_head="cpu"))
    assert not isinstance(model.model.embed_tokens, NVFP4Linear)
    assert model.model.embed_tokens._hf_hook.execution_device == HERE
    assert torch.equal(logits(model), logits(whole))
