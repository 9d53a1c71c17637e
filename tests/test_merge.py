"""Adapters merged into packed checkpoints of every layout: the op's numbers, and nothing else changed."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from checkpoint_files import LAYOUTS, NVFP4_LAYOUTS, Made, digest, make
from hypothesis import given
from hypothesis import strategies as st
from merge_models import adapt, merged_by_hand, model_of, packed_of, raw, stored
from safetensors.torch import load_file, save_file
from torch import nn

from torch_nvfp4._lora.fingerprint import fingerprint
from torch_nvfp4._lora.sites import adapted_sites
from torch_nvfp4._lora.stamp import Stamp
from torch_nvfp4._merge.merged import MergedCheckpoint
from torch_nvfp4.checkpoint import CheckpointError, convert_folder, open_checkpoint
from torch_nvfp4.checkpoint.patch import write_patched
from torch_nvfp4.format import dequantize
from torch_nvfp4.lora import export_adapter, load_adapter, save_adapter
from torch_nvfp4.merge import MergeError, merge_folder
from torch_nvfp4.nn import NVFP4Experts, set_numerics

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = ("experts", "q_proj")


def realistic(layout: str, seed: int = 0) -> Made:
    """Weights as quantisers leave them, of about 1: random bytes span too many magnitudes for a delta to show."""
    made = make(layout, seed)
    torch.manual_seed(seed)
    for name in list(made.tensors):
        info = made.tensors[name]
        if name.endswith(("weight_scale", "_scales")) or name.endswith("proj_weight_scale"):
            byte = 127 if "mxfp4" in layout else 0x50  # 1 in e8m0; 8 in e4m3
            made.tensors[name] = torch.full_like(info.view(torch.uint8), byte).view(info.dtype)
        elif name.endswith("weight_scale_2"):
            made.tensors[name] = torch.full_like(info, 2.0**-5)
        elif name.endswith("weight_global_scale"):
            made.tensors[name] = torch.full_like(info, 2.0**5)
        elif info.dtype == torch.uint8 and info.dim() == 2 and "scale" not in name:
            info[:, :: 16 if "mxfp4" in layout else 8] |= 7  # a 6 in every block, whose fresh scale is then its own
    return made


def targets_of(layout: str) -> tuple[str, ...]:
    return ("experts",) if layout == "mxfp4" else BOTH


def folders(tmp_path: Path, layout: str, shards: int = 1, **options: object) -> tuple[Path, Path, nn.Module]:
    base = realistic(layout).write(tmp_path / "base", shards)
    (base / "tokenizer.json").write_text("{}")
    (base / "old.bin").write_bytes(b"the base's own")
    model = adapt(model_of(base), targets_of(layout), **options)
    save_adapter(model, tmp_path / "adapter")
    return base, tmp_path / "adapter", model


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_zero_delta_gives_the_base_byte_for_byte(layout: str, shards: int, tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, layout, shards, size=0.0)
    report = merge_folder(base, adapter, tmp_path / "out")
    assert digest(tmp_path / "out") == digest(without(base, "old.bin"))
    assert report.tensors and all(t.survived is None and t.applied_norm == 0 for t in report.tensors)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["total"]["survived"] is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merging_writes_the_ops_numbers_and_nothing_else(layout: str, tmp_path: Path) -> None:
    base, adapter, model = folders(tmp_path, layout, shards=2, size=0.3)
    report = merge_folder(base, adapter, tmp_path / "out")
    wanted, got = merged_by_hand(model), packed_of(open_checkpoint(tmp_path / "out"))
    assert wanted.keys() == got.keys()
    for name, parts in wanted.items():
        assert all(torch.equal(raw(x), raw(y)) for x, y in zip(parts, got[name], strict=True)), name
    before, after = stored(base), stored(tmp_path / "out")
    checkpoint = open_checkpoint(base)
    codes = {"weight", "weight_packed", "gate_up_proj", "down_proj", "weight_scale"}
    ends = ("_blocks", "_scales", "proj_weight_scale")
    packed = {n for e in (*checkpoint.experts.values(), *checkpoint.linears.values()) for n in e.tensors}
    changing = {n for n in packed if n.rpartition(".")[2] in codes or n.endswith(ends)}
    assert before.keys() == after.keys()
    assert {n for n in before if not torch.equal(raw(before[n]), raw(after[n]))} <= changing
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in base.iterdir()} - {"old.bin"}
    for tensor in report.tensors:
        assert tensor.survived is not None and 0.5 < tensor.survived < 2 and tensor.clipped == 0
        assert tensor.direction is not None and 0.5 < tensor.direction < 1.5


def test_the_report_is_that_of_float64(tmp_path: Path) -> None:
    base, adapter, model = folders(tmp_path, "qwen3")
    report = merge_folder(base, adapter, tmp_path / "out")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert isinstance(experts, NVFP4Experts)
    merged = open_checkpoint(tmp_path / "out").load_experts("model.layers.0.mlp.experts")
    a, b, scaling = experts._factors("down")
    assert a is not None and b is not None
    delta = (scaling * b.double() @ a.double()).detach()
    applied = dequantize(*merged.down, torch.float64) - dequantize(*experts.packed("down"), torch.float64)
    (found,) = (t for t in report.tensors if t.name.endswith("down_proj"))
    assert found.delta_norm == pytest.approx(float(delta.norm()), rel=1e-5)
    assert found.applied_norm == pytest.approx(float(applied.norm()), rel=1e-5)
    assert found.direction == pytest.approx(float((applied * delta).sum() / delta.square().sum()), rel=1e-5)
    total = report.total
    assert total.delta_norm == pytest.approx(math.hypot(*(t.delta_norm for t in report.tensors)))
    lines = report.lines()
    assert len(lines) == 2 + len(report.tensors) and lines[-1].startswith("all")


def test_a_delta_that_rounding_eats_is_said_in_words_fault_c19(tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3", size=1e-5)
    report = merge_folder(base, adapter, tmp_path / "out")
    assert report.total.survived is not None and report.total.survived < 0.1
    (text,) = report.warnings()
    assert "3 of 3 weights keep less than 10% of their delta" in text and "rounding to nvfp4 ate it" in text
    assert report.total.direction is not None and abs(report.total.direction) < 0.1
    dense = merge_folder(base, adapter, tmp_path / "dense", dense=True)
    assert dense.total.delta_norm == pytest.approx(report.total.delta_norm)


def test_a_base_with_other_block_scales_changes_by_noise_which_is_said(tmp_path: Path) -> None:
    """As quantisers leave them that search for scales: a block's largest code need not be 6."""
    base = realistic("gpt_oss").write(tmp_path / "base")
    save_adapter(adapt(model_of(base), ("experts",), size=1e-3), tmp_path / "adapter")
    report = merge_folder(base, tmp_path / "adapter", tmp_path / "out")
    assert report.total.survived is not None and report.total.survived > 2
    assert any("2 of 2 weights changed by more than 2 times their delta" in text for text in report.warnings())


def test_values_that_the_global_scale_cannot_hold_are_counted(tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "compressed", size=1e4)
    report = merge_folder(base, adapter, tmp_path / "out")
    assert report.total.clipped > 0
    assert any("were clipped" in text for text in report.warnings())


@pytest.mark.parametrize("layout", ["qwen3", "mixtral", "nemotron", "compressed", "ct_mxfp4"])
def test_an_adapter_with_keys_for_each_expert(layout: str, tmp_path: Path) -> None:
    base, adapter, model = folders(tmp_path, layout)
    merge_folder(base, adapter, tmp_path / "stacked")
    export_adapter(model, tmp_path / "2d", layout="2d")
    merge_folder(base, tmp_path / "2d", tmp_path / "numbered")
    assert digest(tmp_path / "stacked") == digest(tmp_path / "numbered")


def test_an_adapter_of_unsloth(tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")
    merge_folder(base, adapter, tmp_path / "wanted")
    state = load_file(adapter / "adapter_model.safetensors")
    for key, tensor in state.items():
        if "experts" in key and key.endswith("lora_B.weight"):
            state[key] = tensor.unflatten(1, (-1, 3)).transpose(1, 2).flatten(1).contiguous()
    save_file(state, adapter / "adapter_model.safetensors")
    merge_folder(base, adapter, tmp_path / "told", lora_b_layout="grouped_by_expert")
    data = json.loads((adapter / "adapter_config.json").read_text()) | {"lora_B_layout": "grouped_by_expert"}
    (adapter / "adapter_config.json").write_text(json.dumps(data))
    merge_folder(base, adapter, tmp_path / "stamped")
    assert digest(tmp_path / "wanted") == digest(tmp_path / "told") == digest(tmp_path / "stamped")


def test_ranks_alphas_and_rslora_are_those_of_the_config(tmp_path: Path) -> None:
    base = realistic("qwen3").write(tmp_path / "base")
    model = adapt(model_of(base), r=2, expert_r=5, alpha=3.0, rslora=True)
    save_adapter(model, tmp_path / "adapter")
    data = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert data["rank_pattern"] and data["use_rslora"]
    data["alpha_pattern"] = {"mlp.experts.down_proj": 12.0}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(data))
    merge_folder(base, tmp_path / "adapter", tmp_path / "out")
    model.get_submodule("model.layers.0.mlp.experts").down_scaling = 12.0 / math.sqrt(5)
    wanted, got = merged_by_hand(model), packed_of(open_checkpoint(tmp_path / "out"))
    assert all(torch.equal(raw(x), raw(y)) for n in wanted for x, y in zip(wanted[n], got[n], strict=True))


def mixed(folder: Path) -> Path:
    """qwen3's packed layer beside a dense o_proj, an FP8 k_proj, and scales of activations and of the cache."""
    made = realistic("qwen3")
    torch.manual_seed(3)
    made.tensors |= {
        "model.layers.0.self_attn.o_proj.weight": torch.randn(64, 96).bfloat16(),
        "model.layers.0.self_attn.k_proj.weight": torch.randn(32, 64).to(torch.float8_e4m3fn),
        "model.layers.0.self_attn.k_proj.weight_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.k_proj.input_scale": torch.tensor(0.25),
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.125),
        "model.layers.0.mlp.experts.0.up_proj.input_scale": torch.tensor(0.125),
    }
    return made.write(folder)


@pytest.mark.parametrize("dense", [False, True])
def test_a_dense_layer_gets_the_sum_rounded_once(dense: bool, tmp_path: Path) -> None:
    base = mixed(tmp_path / "base")
    model = adapt(model_of(base), ("o_proj",), size=0.01)
    save_adapter(model, tmp_path / "adapter")
    report = merge_folder(base, tmp_path / "adapter", tmp_path / "out", dense=dense)
    layer = model.get_submodule("model.layers.0.self_attn.o_proj")
    with torch.no_grad():
        delta = (layer.lora_b @ layer.lora_a).mul_(layer.scaling)
    before, after = stored(base), stored(tmp_path / "out")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(after[name], (before[name].float() + delta).bfloat16())
    if not dense:
        assert {n for n in before if not torch.equal(raw(before[n]), raw(after[n]))} == {name}
    assert [t.format for t in report.tensors] == ["bf16"]


def test_a_dense_layer_keeps_its_zeros(tmp_path: Path) -> None:
    base = mixed(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][:] = -0.0
    save_file(tensors, base / "model.safetensors")
    save_adapter(adapt(model_of(base), ("o_proj",), size=0.0), tmp_path / "adapter")
    merge_folder(base, tmp_path / "adapter", tmp_path / "out")
    assert digest(base) == digest(tmp_path / "out")


def dense_names(made: Made, layout: str) -> set[str]:
    (path,) = made.experts
    if layout in ("gpt_oss", "llama4", "mxfp4"):
        return {f"{path}.gate_up_proj", f"{path}.down_proj"}
    roles = {"mixtral": ("w1", "w3", "w2"), "nemotron": ("up_proj", "down_proj")}.get(layout)
    return {f"{path}.{e}.{role}.weight" for e in range(3) for role in roles or ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_model_is_the_sum_rounded_once(layout: str, tmp_path: Path) -> None:
    base, adapter, model = folders(tmp_path, layout)
    merge_folder(base, adapter, tmp_path / "out", dense=True)
    made, after = realistic(layout), stored(tmp_path / "out")
    (path,) = made.experts
    names = dense_names(made, layout)
    assert names <= after.keys() and all(t.dtype == torch.bfloat16 for t in after.values())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    experts = model.get_submodule(path)
    for projection in ("gate_up", "down"):
        a, b, scaling = experts._factors(projection)
        with torch.no_grad():
            wanted = experts.dequantize(projection, torch.float32) + (b @ a).mul_(scaling)
        wanted = wanted.bfloat16()
        if layout in ("gpt_oss", "llama4", "mxfp4"):
            got = after[f"{path}.{projection}_proj"].mT
            if projection == "gate_up" and layout != "llama4":
                got = torch.cat([got[:, 0::2], got[:, 1::2]], 1)
        else:
            here = [n for n in sorted(names) if n.rsplit(".", 2)[1] in (("down_proj", "w2"), ("gate_proj", "up_proj", "w1", "w3"))[projection == "gate_up"]]  # fmt: skip # noqa: E501
            got = torch.stack(
                [torch.cat([after[n] for n in here if f".{e}." in n.removeprefix(path)]) for e in range(3)]
            )
        assert torch.equal(got, wanted)
    if layout != "mxfp4":
        q_proj = model.get_submodule("model.layers.0.self_attn.q_proj")
        with torch.no_grad():
            wanted = (
                q_proj.dequantize(torch.float32) + (q_proj.lora_b @ q_proj.lora_a).mul_(q_proj.scaling)
            ).bfloat16()
        assert torch.equal(after["model.layers.0.self_attn.q_proj.weight"], wanted)


def test_a_dense_model_of_a_mixed_checkpoint_has_no_scales_left(tmp_path: Path) -> None:
    base = mixed(tmp_path / "base")
    save_adapter(adapt(model_of(base), ("k_proj",)), tmp_path / "adapter")
    with pytest.raises(MergeError, match=r"k_proj: the checkpoint has this layer in FP8.*--dense"):
        merge_folder(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_folder(base, tmp_path / "adapter", tmp_path / "out", dense=True)
    after = stored(tmp_path / "out")
    assert not [name for name in after if "scale" in name] and {t.dtype for t in after.values()} == {torch.bfloat16}
    assert not torch.equal(
        after["model.layers.0.self_attn.k_proj.weight"],
        open_checkpoint(base).load_plain("model.layers.0.self_attn.k_proj.weight"),
    )


@pytest.mark.parametrize("layout", [x for x in NVFP4_LAYOUTS if x != "compressed"])
def test_another_layout_holds_the_same_numbers(layout: str, tmp_path: Path) -> None:
    base, adapter, model = folders(tmp_path, layout)
    report = merge_folder(base, adapter, tmp_path / "out", layout="compressed-tensors", shard_bytes=4000)
    out = open_checkpoint(tmp_path / "out")
    assert out.layout == "compressed-tensors" and report.inexact == 0
    wanted, got = merged_by_hand(model), packed_of(out)
    assert all(torch.equal(raw(x), raw(y)) for n in wanted for x, y in zip(wanted[n], got[n], strict=True))


def test_a_scale_for_two_blocks_cannot_hold_the_result(tmp_path: Path) -> None:
    made = realistic("qwen3")
    for name in [n for n in made.tensors if n.endswith(".weight_scale")]:
        made.tensors[name] = made.tensors[name].view(torch.uint8)[:, ::2].contiguous().view(torch.float8_e4m3fn)
    made.config["quantization_config"]["config_groups"] = {"group_0": {"weights": {"group_size": 32}}}
    base = made.write(tmp_path / "base")
    model = adapt(model_of(base), ("experts.down_proj",))
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(MergeError, match="one scale for 2 blocks, merging gives each its own: --layout compressed"):
        merge_folder(base, tmp_path / "adapter", tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []
    merge_folder(base, tmp_path / "adapter", tmp_path / "out", layout="compressed-tensors")
    wanted, got = merged_by_hand(model), packed_of(open_checkpoint(tmp_path / "out"))
    assert all(torch.equal(raw(x), raw(y)) for n in wanted for x, y in zip(wanted[n], got[n], strict=True))


def change_config(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def poison(adapter: Path, value: float = math.nan) -> None:
    state = load_file(adapter / "adapter_model.safetensors")
    state[min(k for k in state if "lora_B" in k)][0, 0] = value
    save_file(state, adapter / "adapter_model.safetensors")


REFUSED = {
    "dora": (lambda a: change_config(a, use_dora=True), {}, "use_dora=True is not supported"),
    "target": (lambda a: change_config(a, target_modules=["w_proj"]), {}, "target 'w_proj' matches no linear layer"),
    "rank": (lambda a: change_config(a, r=7), {}, r"expected shape .* got"),
    "keys": (lambda a: change_config(a, target_modules=[]), {}, "has the unexpected .*q_proj"),
    "nan": (poison, {}, "lora_B holds NaN or infinity"),
    "gone": (lambda a: (a / "adapter_model.safetensors").unlink(), {}, r"^\S*adapter has no adapter_model.safetensors"),
    "stamped": (
        lambda a: change_config(a, torch_nvfp4=Stamp("nvfp4").to_json()),
        {"lora_b_layout": "grouped_by_expert"},
        r"lora_b_layout='grouped_by_expert' contradicts .*this library wrote the adapter, and that is rank_major",
    ),
    "layout": (lambda a: None, {"layout": "gguf"}, "layout must be one of modelopt"),
    "both": (lambda a: None, {"layout": "modelopt", "dense": True}, "a dense model has none"),
    "gpt-oss": (lambda a: None, {"layout": "mxfp4"}, "layout mxfp4 is that of gpt-oss"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words_before_anything_is_written(case: str, tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")
    change, options, message = REFUSED[case]
    change(adapter)
    with pytest.raises((MergeError, CheckpointError), match=message):
        merge_folder(base, adapter, tmp_path / "out", **options)
    assert list(tmp_path.glob("out*")) == []


def test_a_model_that_is_not_packed_and_a_folder_that_exists(tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")
    with pytest.raises(CheckpointError, match="wants a name of its own"):
        merge_folder(base, adapter, base)
    (tmp_path / "dense").mkdir()
    save_file({"x.weight": torch.ones(2, 2)}, tmp_path / "dense" / "model.safetensors")
    with pytest.raises(MergeError, match="holds no packed weights"):
        merge_folder(tmp_path / "dense", adapter, tmp_path / "out")


def test_a_target_that_two_layers_lack_a_weight_for(tmp_path: Path) -> None:
    """An adapter of a model with one layer more."""
    base, adapter, _ = folders(tmp_path, "qwen3")
    state = load_file(adapter / "adapter_model.safetensors")
    state |= {key.replace("layers.0", "layers.1"): tensor.clone() for key, tensor in state.items()}
    save_file(state, adapter / "adapter_model.safetensors")
    with pytest.raises(MergeError, match=r"has the unexpected .*layers\.1"):
        merge_folder(base, adapter, tmp_path / "out")


def test_an_interrupted_merge_leaves_nothing_behind(tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")

    def stop(path: str) -> None:
        assert (tmp_path / "out.partial").exists()
        raise KeyboardInterrupt

    for options in ({}, {"dense": True}, {"layout": "compressed-tensors"}):
        with pytest.raises(KeyboardInterrupt):
            merge_folder(base, adapter, tmp_path / "out", progress=stop, **options)
        assert list(tmp_path.glob("out*")) == []


def test_a_killed_merge_is_never_taken_for_a_model(tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")
    code = (
        "import os, signal, sys; from torch_nvfp4.merge import merge_folder\n"
        "merge_folder(*sys.argv[1:], progress=lambda _: os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run([sys.executable, "-c", code, base, adapter, tmp_path / "out"], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob("out*")] == ["out.partial"]
    merge_folder(base, adapter, tmp_path / "out")
    assert [p.name for p in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize("options", [{}, {"dense": True}])
def test_one_expert_is_in_memory_at_a_time(options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make("qwen3", e=12).write(tmp_path / "base")
    save_adapter(adapt(model_of(base), ("experts",)), tmp_path / "adapter")
    name = "_dense" if options else "_merge"
    compute, alive, most = getattr(MergedCheckpoint, name), [], []

    def counting(self: MergedCheckpoint, *args: object) -> object:
        made = compute(self, *args)
        alive.append(weakref.ref(made if options else made.codes))
        most.append(sum(reference() is not None for reference in alive))
        return made

    monkeypatch.setattr(MergedCheckpoint, name, counting)
    merge_folder(base, tmp_path / "adapter", tmp_path / "out", shard_bytes=1, **options)
    assert len(most) >= 24 and max(most) <= 4  # two projections of the expert that is written, and of the next


def test_what_a_patch_must_be(tmp_path: Path) -> None:
    base = realistic("qwen3").write(tmp_path / "base")
    infos, name = list(open_checkpoint(base)._tensors.values()), "model.norm.weight"
    value = torch.ones(64).bfloat16()
    for entries, message in (
        ([], "1 tensors are missing, 'model.norm.weight' for one"),
        ([(name, value), (name, value)], "was not to be replaced, or is there twice"),
        ([("model.x", value)], "was not to be replaced"),
        ([(name, value.float())], "would have 256 bytes, it has 128"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_patched(base, infos, tmp_path / "out", {name}, entries)
        assert list(tmp_path.glob("out*")) == []


# -- merge-aware adapters ------------------------------------------------------------------------------------


def aware(tmp_path: Path, layout: str = "qwen3") -> tuple[Path, Path, nn.Module]:
    base = realistic(layout).write(tmp_path / "base")
    model = adapt(model_of(base), targets_of(layout))
    set_numerics(model, merge_aware=True)
    save_adapter(model, tmp_path / "adapter")
    return base, tmp_path / "adapter", model


@pytest.mark.parametrize("layout", ["qwen3", "ct_mxfp4"])
def test_a_merge_aware_adapter_is_stamped_and_merges_as_trained(layout: str, tmp_path: Path) -> None:
    base, adapter, model = aware(tmp_path, layout)
    stamp = json.loads((adapter / "adapter_config.json").read_text())["torch_nvfp4"]
    format = "mxfp4" if "mxfp4" in layout else "nvfp4"
    assert re.fullmatch("[0-9a-f]{32}", stamp.pop("base"))
    assert stamp == {"merge_aware": True, "quantizer": "nvfp4-merge-1", "format": format}
    assert merge_folder(base, adapter, tmp_path / "out").merge_aware
    with pytest.raises(MergeError, match="trained merge-aware, for its sum .* --force"):
        merge_folder(base, adapter, tmp_path / "dense", dense=True)
    forced = merge_folder(base, adapter, tmp_path / "dense", dense=True, force=True)
    assert forced.dense and not forced.merge_aware


@pytest.mark.parametrize(
    ("stamp", "message"),
    [
        (
            {"merge_aware": True, "quantizer": "nvfp4-merge-2", "format": "nvfp4"},
            "through the quantiser 'nvfp4-merge-2'",
        ),
        (
            {"merge_aware": True, "quantizer": "nvfp4-merge-1", "format": "mxfp4"},
            "trained through mxfp4, and the weights",
        ),
    ],
)
def test_another_quantiser_is_an_error_unless_forced(stamp: dict, message: str, tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")
    change_config(adapter, torch_nvfp4=stamp)
    with pytest.raises(MergeError, match=message):
        merge_folder(base, adapter, tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []
    assert not merge_folder(base, adapter, tmp_path / "out", force=True).merge_aware


@pytest.mark.parametrize("layout", ["qwen3", "ct_mxfp4", "nemotron", "mxfp4", "compressed"])
def test_a_folder_and_its_model_have_one_fingerprint(layout: str, tmp_path: Path) -> None:
    """So has the folder in another layout; another base has another."""
    base, adapter, model = aware(tmp_path, layout)
    stamp = Stamp.from_json(json.loads((adapter / "adapter_config.json").read_text()))
    assert stamp is not None and stamp.base == fingerprint(s.module for s in adapted_sites(model))
    merge_folder(base, adapter, tmp_path / "out")
    if layout in ("qwen3", "compressed"):
        other = "modelopt" if layout == "compressed" else "compressed-tensors"
        convert_folder(base, tmp_path / "converted", layout=other)
        merge_folder(tmp_path / "converted", adapter, tmp_path / "merged")


def test_another_base_is_an_error_unless_forced(tmp_path: Path) -> None:
    _, adapter, _ = aware(tmp_path)
    other = realistic("qwen3", 1).write(tmp_path / "other")
    with pytest.raises(MergeError, match="trained merge-aware on other 4-bit weights than those of .*other.* --force"):
        merge_folder(other, adapter, tmp_path / "out")
    assert list(tmp_path.glob("out*")) == []
    assert not merge_folder(other, adapter, tmp_path / "out", force=True).merge_aware
    model = model_of(other)
    set_numerics(model, merge_aware=True)
    with pytest.raises(ValueError, match="other 4-bit weights than this model's"):
        load_adapter(model, adapter)
    assert adapted_sites(model) == []
    data = json.loads((adapter / "adapter_config.json").read_text())
    del data["torch_nvfp4"]["base"]
    change_config(adapter, torch_nvfp4=data["torch_nvfp4"])
    load_adapter(model, adapter)


def test_weights_that_are_not_all_here_have_no_fingerprint() -> None:
    whole, meta = NVFP4Experts(4, 32, 32), NVFP4Experts(4, 32, 32, device="meta")
    assert fingerprint([]) is None and fingerprint([whole]) is not None
    assert fingerprint([whole, meta]) is None and fingerprint([meta]) is None
    split = NVFP4Experts(2, 32, 32)
    split.__dict__["share"] = object()
    assert fingerprint([split]) is None


@pytest.mark.parametrize(
    "stamp",
    [
        True,
        {"merge_aware": "yes"},
        {"merge_aware": True},
        {"merge_aware": True, "format": 4},
        {"merge_aware": True, "quantizer": "q", "format": "nvfp4", "base": 4},
    ],
)
def test_a_broken_stamp_is_refused(stamp: object, tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")
    change_config(adapter, torch_nvfp4=stamp)
    with pytest.raises(MergeError, match="adapter_config.json: torch_nvfp4 is"):
        merge_folder(base, adapter, tmp_path / "out")
    with pytest.raises(ValueError, match="adapter_config.json: torch_nvfp4 is"):
        load_adapter(model_of(base), adapter)


def test_a_stamp_that_says_no_is_none(tmp_path: Path) -> None:
    base, adapter, _ = folders(tmp_path, "qwen3")
    change_config(adapter, torch_nvfp4={"merge_aware": False})
    assert not merge_folder(base, adapter, tmp_path / "out").merge_aware


def test_loading_a_stamped_adapter_into_another_model_warns(tmp_path: Path) -> None:
    base, adapter, _ = aware(tmp_path)
    model = model_of(base)
    with pytest.warns(UserWarning, match="trained merge-aware: .* may be worse than the base alone"):
        load_adapter(model, adapter)
    save_adapter(model, tmp_path / "again")  # not lost on the way
    assert "torch_nvfp4" in json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match="trained merge-aware: .*force=True"):
        export_adapter(model, tmp_path / "2d")
    export_adapter(model, tmp_path / "2d", force=True)
    assert "torch_nvfp4" in json.loads((tmp_path / "2d" / "adapter_config.json").read_text())
    other = model_of(base)
    set_numerics(other, merge_aware=True)
    load_adapter(other, adapter)  # warnings are errors here


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from((torch.bfloat16, torch.float32)))
def test_the_merged_weights_are_what_the_merge_aware_forward_used(
    seed: int, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Same bits out of the layer: that with the adapter, merge-aware, and that of the merged folder without one."""
    tmp_path = tmp_path_factory.mktemp("aware")
    layout = ("qwen3", "ct_mxfp4", "nemotron", "mxfp4")[seed % 4]
    base = realistic(layout, seed % 7).write(tmp_path / "base")
    model = adapt(model_of(base), targets_of(layout), seed=seed, size=0.03, dtype=dtype)
    set_numerics(model, merge_aware=True)
    save_adapter(model, tmp_path / "adapter")
    merge_folder(base, tmp_path / "adapter", tmp_path / "out")
    merged = model_of(tmp_path / "out")
    generator = torch.Generator().manual_seed(seed)
    (path,) = open_checkpoint(base).experts
    x = torch.randn(9, 64, generator=generator).to(dtype)
    weights, ids = torch.rand(9, 3, generator=generator).topk(2)
    used, written = (m.get_submodule(path)(x, ids, weights.to(dtype)) for m in (model, merged))
    assert torch.equal(used, written)
    if layout != "mxfp4":
        used, written = (m.get_submodule("model.layers.0.self_attn.q_proj")(x) for m in (model, merged))
        assert torch.equal(used, written)
