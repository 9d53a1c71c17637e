"""Packed modules written as checkpoints: the producer's own bytes, other layouts, and what is refused."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import LAYOUTS, Made, make, quantiser_of, same_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_checkpoint_golden import COMPRESSED, GOLDEN, MODELOPT
from torch import Tensor, nn

from torch_nvfp4.checkpoint import Checkpoint, CheckpointError, Written, open_checkpoint, save_packed
from torch_nvfp4.checkpoint.save import FORM
from torch_nvfp4.checkpoint.write import FolderWriter
from torch_nvfp4.format import E2M1_VALUES
from torch_nvfp4.nn import PROJECTIONS, NVFP4Experts, NVFP4Linear

LIMIT = 2**32
SUFFIXES = {"modelopt": ("", "_2", False), "compressed-tensors": ("_packed", "_global_scale", True)}


def stored_as(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        if path.name.startswith("model"):
            tensors |= load_file(path)
    return tensors


def differing(folder: Path, tensors: dict[str, Tensor]) -> set[str]:
    """Names of tensors that are not byte for byte the same, in dtype and shape too."""
    found = stored_as(folder)
    both = found.keys() & tensors.keys()
    return (found.keys() ^ tensors.keys()) | {name for name in both if not _same(found[name], tensors[name])}


def _same(a: Tensor, b: Tensor) -> bool:
    as_bytes = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(leaf, module)


def model_of(checkpoint: Checkpoint, sourced: bool = True) -> nn.Module:
    """Modules with a checkpoint's weights at its paths; `sourced`: as a loader leaves them, which knows their form."""
    root = nn.Module()
    for path, entry in checkpoint.experts.items():
        experts = checkpoint.load_experts(path)
        sizes, activation = (entry.num_experts, entry.hidden, entry.intermediate), "silu" if entry.gated else "relu2"
        module = NVFP4Experts(*sizes, activation=activation, bias=entry.has_bias, format=entry.format)
        module._set_packed("gate_up", *experts.gate_up)
        module._set_packed("down", *experts.down)
        for name in ("gate_up_bias", "down_bias"):
            if (bias := getattr(experts, name)) is not None:
                module.register_parameter(name, nn.Parameter(bias, requires_grad=False))
        put(root, path, module)
    for path, linear in checkpoint.linears.items():
        dense = NVFP4Linear(linear.in_features, linear.out_features, format=linear.format)
        dense._set_packed(*checkpoint.load_linear(path))
        put(root, path, dense)
    for path in (*checkpoint.experts, *checkpoint.linears) if sourced else ():
        root.get_submodule(path).__dict__[FORM] = checkpoint.form(path)
    for name in checkpoint.plain:
        path, _, leaf = name.rpartition(".")
        owner = dict(root.named_modules()).get(path)
        if owner is None:
            put(root, path, owner := nn.Module())
        owner.register_parameter(leaf, nn.Parameter(checkpoint.load_plain(name), requires_grad=False))
    return root


def decode(tensors: dict[str, Tensor], stem: str, layout: str) -> Tensor:
    """A weight [N, C] as the layout's tool decodes it, written from the description of its files alone."""
    codes_end, global_end, divides = SUFFIXES[layout]
    codes, scales = tensors[f"{stem}.weight{codes_end}"], tensors[f"{stem}.weight_scale"].float()
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
    scale = tensors[f"{stem}.weight{'_scale' if not divides else ''}{global_end}"]
    factors = scales / scale if divides else scales * scale
    return torch.tensor(E2M1_VALUES)[nibbles] * factors.repeat_interleave(16, dim=1)


@pytest.mark.parametrize("name", (*MODELOPT, COMPRESSED))
def test_a_golden_checkpoint_is_written_as_its_producer_wrote_it(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    done = save_packed(model_of(checkpoint), tmp_path / "out", config=checkpoint.config)
    assert done.inexact == 0 and differing(tmp_path / "out", load_file(GOLDEN / name / "model.safetensors")) == set()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == checkpoint.config
    theirs = GOLDEN / name / "hf_quant_config.json"
    if theirs.exists():
        assert json.loads((tmp_path / "out" / theirs.name).read_text()) == json.loads(theirs.read_text())


@pytest.mark.parametrize("layout", SUFFIXES)
@pytest.mark.parametrize("name", [name for name in (*MODELOPT, COMPRESSED) if "gpt_oss" not in name])
def test_each_layout_decodes_to_what_the_producer_says(name: str, layout: str, tmp_path: Path) -> None:
    """The two differ in whether they multiply or divide: in the last bits of fp32, and not within one layout."""
    checkpoint = open_checkpoint(GOLDEN / name)
    save_packed(model_of(checkpoint), tmp_path / "out", config=checkpoint.config, layout=layout)
    written, expected = stored_as(tmp_path / "out"), load_file(GOLDEN / name / "expected_dequant_f32.safetensors")
    for key, weight in expected.items():
        found = decode(written, key.removesuffix(".weight"), layout)
        if checkpoint.layout == layout:
            assert torch.equal(found, weight), key
        else:
            torch.testing.assert_close(found, weight, rtol=5 * 2.0**-24, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shards", [LIMIT, 4000])
def test_every_layout_comes_back(name: str, shards: int, tmp_path: Path) -> None:
    made = make(name)
    checkpoint = open_checkpoint(made.write(tmp_path / "in"))
    save_packed(model_of(checkpoint), tmp_path / "out", config=checkpoint.config, shard_bytes=shards)
    assert differing(tmp_path / "out", made.tensors) == set()
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (shards != LIMIT)
    again = open_checkpoint(tmp_path / "out")
    assert again.layout == quantiser_of(name)
    for path, experts in made.experts.items():
        assert same_experts(again.load_experts(path), experts)


TARGETS = [
    (name, layout)
    for name in LAYOUTS
    for layout in ("modelopt", "compressed-tensors", "mxfp4")
    if layout != "mxfp4" or name == "mxfp4"
]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize(("name", "layout"), TARGETS)
def test_what_is_in_memory_is_read_again_from_any_layout(
    name: str, layout: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Codes, scales and biases always; global scales but for those that are counted, which differ in the last bit."""
    folder = tmp_path_factory.mktemp("save")
    made = make(name, seed=seed)
    for key, tensor in made.tensors.items():
        if key.endswith("weight_scale_2"):  # what quantisers of bf16 weights write: amax / 2688
            made.tensors[key] = (tensor * 2688).bfloat16().float() / 2688
    checkpoint = open_checkpoint(made.write(folder / "in"))
    model = model_of(checkpoint, sourced=seed % 2 == 0)
    done = save_packed(model, folder / "out", config=checkpoint.config, layout=layout)
    again, differences = open_checkpoint(folder / "out"), 0
    assert again.layout == layout and again.experts.keys() == checkpoint.experts.keys()
    for path in checkpoint.experts:
        wanted, found = checkpoint.load_experts(path), again.load_experts(path)
        for half in ("gate_up", "down"):
            w, f = getattr(wanted, half), getattr(found, half)
            differences += int((w.global_scale != f.global_scale).sum())
            torch.testing.assert_close(f.global_scale, w.global_scale, rtol=2.0**-22, atol=0)
            found = found._replace(**{half: f._replace(global_scale=w.global_scale)})
        assert same_experts(found, wanted)
    for path in checkpoint.linears:
        w, f = checkpoint.load_linear(path), again.load_linear(path)
        differences += int((w.global_scale != f.global_scale).sum())
        assert _same(w.codes, f.codes) and _same(w.scales, f.scales)
    assert done.inexact == differences
    if layout != "compressed-tensors" or quantiser_of(name) == layout:
        assert differences == 0


def with_scales(made: Made, role: str, value: float, suffix: str = ".weight_scale_2") -> Made:
    """A checkpoint (ModelOpt's, by the suffix) with this global scale in a projection of every expert."""
    for key, tensor in made.tensors.items():
        if key.endswith(f".{role}{suffix}"):
            tensor.fill_(value)
    return made


def test_what_has_no_divisor_is_counted(tmp_path: Path) -> None:
    made = with_scales(make("qwen3"), "up_proj", (1 - 2**-24) * 2**-13)  # 1 / d steps over it
    checkpoint = open_checkpoint(made.write(tmp_path / "in"))
    done = save_packed(model_of(checkpoint), tmp_path / "out", config=checkpoint.config, layout="compressed-tensors")
    assert done == Written(weights=10, inexact=3)


def test_what_is_in_memory_counts_and_not_where_it_came_from(tmp_path: Path) -> None:
    """A divisor that ModelOpt's multiplier was turned into is read as a neighbour: that is what the model runs with."""
    made = with_scales(make("compressed"), "down_proj", float(2688 / torch.tensor(1.0234375)), ".weight_global_scale")
    checkpoint = open_checkpoint(made.write(tmp_path / "in"))
    (path,) = checkpoint.experts
    read = checkpoint.load_experts(path).down.global_scale
    assert (read != torch.tensor(1.0234375) / 2688).all()
    assert save_packed(model_of(checkpoint), tmp_path / "out", config=checkpoint.config, layout="modelopt").inexact == 0
    assert torch.equal(open_checkpoint(tmp_path / "out").load_experts(path).down.global_scale, read)


def test_gate_and_up_keep_their_own_global_scales(tmp_path: Path) -> None:
    made = with_scales(with_scales(make("qwen3"), "up_proj", 2**-9), "gate_proj", 2**-12)
    checkpoint = open_checkpoint(made.write(tmp_path / "in"))
    save_packed(model_of(checkpoint), tmp_path / "out", config=checkpoint.config, layout="compressed-tensors")
    (experts,) = (open_checkpoint(tmp_path / "out").load_experts(path) for path in checkpoint.experts)
    assert experts.gate_up.global_scale.tolist() == [[2**-12, 2**-9]] * 3


def refusal(model: nn.Module, folder: Path, config: dict[str, Any], **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        save_packed(model, folder, config=config, **options)
    assert not folder.exists() and not folder.with_name(f"{folder.name}.partial").exists()
    return str(error.value)


def test_what_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    made = make("gpt_oss")
    checkpoint, out = open_checkpoint(made.write(tmp_path / "in")), tmp_path / "out"
    (path,) = checkpoint.experts
    model = model_of(checkpoint)
    save = functools.partial(refusal, model, out, checkpoint.config)
    assert "layout 'gguf' cannot be written; known: modelopt, compressed-tensors, mxfp4" in save(layout="gguf")
    assert "layout mxfp4 is that of gpt-oss's MXFP4 experts" in save(layout="mxfp4")
    assert refusal(nn.Linear(2, 2), out, {}) == "Linear has no packed modules"

    experts: Any = model.get_submodule(path)
    experts.gate_up_global_scale.view(torch.float32)[1, 0] *= 2
    assert f"'{path}.gate_up_proj': this layout has one global scale for all experts, and the experts have 2" in save()
    experts.gate_up_global_scale.view(torch.float32).fill_(1.5)
    assert f"'{path}.gate_up_proj_weight_scale_2' would be 1.5: a multiplier must be above 0 and at most 1" in save()
    assert ".weight_global_scale' would be 0.66" in save(layout="compressed-tensors")
    experts.gate_up_global_scale.view(torch.float32).fill_(1e-40)
    assert ".weight_global_scale' would be inf" in save(layout="compressed-tensors")

    experts.add_lora(2, scaling=1.0)
    assert f"{path}.gate_up_lora_a belongs to an adapter" in save()
    for projection in PROJECTIONS:
        for factor in ("a", "b"):
            experts.register_parameter(f"{projection}_lora_{factor}", None)
    experts.register_parameter("extra", sharded := nn.Parameter(torch.ones(1)))
    sharded.full_tensor = lambda: None  # type: ignore[attr-defined]  # as a DTensor has
    assert save() == f"{path} is sharded over devices: gather the model on one first"
    del experts.extra
    put(model, "another", NVFP4Linear(32, 16, format="mxfp4"))
    assert "holds mxfp4 and nvfp4; no layout declares both" in save()


def test_weights_from_two_layouts_want_one_named(tmp_path: Path) -> None:
    one, other = (open_checkpoint(make(name).write(tmp_path / name)) for name in ("qwen3", "compressed"))
    model = model_of(one)
    put(model, "more", model_of(other))
    text = refusal(model, tmp_path / "out", {})
    assert text == "its weights come from checkpoints of compressed-tensors and modelopt: name the layout"


def test_weights_with_32_to_a_scale_stay_so_in_their_own_layout(tmp_path: Path) -> None:
    made = make("qwen3")
    for key, tensor in made.tensors.items():
        if key.endswith("weight_scale"):
            made.tensors[key] = tensor.view(torch.uint8)[:, ::2].contiguous().view(tensor.dtype)
    made.config["quantization_config"]["config_groups"] = {"group_0": {"weights": {"group_size": 32}}}
    checkpoint = open_checkpoint(made.write(tmp_path / "in"))
    model = model_of(checkpoint)
    save_packed(model, tmp_path / "same", config=checkpoint.config)
    assert differing(tmp_path / "same", made.tensors) == set()
    save_packed(model, tmp_path / "other", config=checkpoint.config, layout="compressed-tensors")
    for path in checkpoint.experts:
        found, wanted = (c.load_experts(path) for c in (open_checkpoint(tmp_path / "other"), checkpoint))
        assert same_experts(found, wanted)
    model.get_submodule(path).get_parameter("down_scales")[0, 0, 1] += 1
    text = refusal(model, tmp_path / "x", checkpoint.config)
    assert "the layout has one scale for 2 blocks, and theirs differ" in text


def test_an_interrupted_run_leaves_nothing_and_no_folder_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = open_checkpoint(make("qwen3").write(tmp_path / "in")), tmp_path / "out"
    model = model_of(checkpoint)
    flush, seen = FolderWriter._flush, []

    def failing(self: FolderWriter) -> None:
        flush(self)
        seen.append(out.exists())
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FolderWriter, "_flush", failing)
        save_packed(model, out, config=checkpoint.config, shard_bytes=4000)
    assert seen == [False] * 3 and [path.name for path in tmp_path.iterdir()] == ["in"]
    (tmp_path / "out.partial").mkdir()  # of a run that was killed
    (tmp_path / "out.partial" / "model.safetensors").write_bytes(b"half")
    save_packed(model, out, config=checkpoint.config)
    with pytest.raises(CheckpointError, match="a name of its own"):
        save_packed(model, out, config=checkpoint.config)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
