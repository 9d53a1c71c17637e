"""Tensors and configs corrupted in named ways: each is refused in words, none is loaded, and no file is touched."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    EXAMPLES,
    LAYOUTS,
    NUMBERED,
    NVFP4_LAYOUTS,
    Draw,
    Made,
    check_refused,
    fresh,
    load_everything,
    make,
    refusal_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nvfp4.checkpoint import CheckpointError, open_checkpoint

SCALES = ("weight_scale", "_scales")
GLOBALS = ("weight_scale_2", "weight_global_scale")
CODES = ("weight_packed", "_blocks", "gate_up_proj", "down_proj")


def pick(draw: Draw, made: Made, keep: Callable[[str, torch.Tensor], bool]) -> str:
    return draw(st.sampled_from([name for name, tensor in made.tensors.items() if keep(name, tensor)]))


def is_codes(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.uint8 and not name.endswith(SCALES)


def is_scales(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(SCALES)


def is_global(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(GLOBALS)


def is_packed(name: str, tensor: torch.Tensor) -> bool:
    return is_codes(name, tensor) or is_scales(name, tensor) or is_global(name, tensor)


# A change before the checkpoint is written: it returns the tensor that the refusal must name ("" for none).


def missing_companion(draw: Draw, made: Made) -> str:
    name = pick(draw, made, is_packed)
    del made.tensors[name]
    return ""


def renamed_tensor(draw: Draw, made: Made) -> str:
    name = pick(draw, made, is_packed)
    at = draw(st.integers(max(0, name.rfind(".")) + 1, len(name) - 1))
    made.tensors[name[:at] + "~" + name[at + 1 :]] = made.tensors.pop(name)
    return ""


def wrong_dtype(draw: Draw, made: Made) -> str:
    name = pick(draw, made, is_packed)
    others = {
        torch.uint8: [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.int32],
        torch.float8_e4m3fn: [torch.uint8, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.float32],
        torch.float32: [torch.bfloat16, torch.float16, torch.float64, torch.int32],
    }[made.tensors[name].dtype]
    tensor = made.tensors[name]
    made.tensors[name] = tensor.float().to(draw(st.sampled_from(others)))
    return ""


def wrong_shape(draw: Draw, made: Made) -> str:
    name = pick(draw, made, lambda name, tensor: is_codes(name, tensor) or is_scales(name, tensor))
    tensor = made.tensors[name].view(torch.uint8)
    dim = draw(st.integers(0, tensor.dim() - 1))
    changed = draw(
        st.sampled_from(
            [
                tensor.narrow(dim, 0, tensor.shape[dim] - 1),
                tensor.narrow(dim, 0, 0),
                torch.cat([tensor, tensor], dim=dim),
                tensor.flatten(),
                tensor.unsqueeze(dim),
                tensor.flatten(0, 1),
            ]
        )
    )
    made.tensors[name] = changed.contiguous().view(made.tensors[name].dtype)
    return ""


def transposed(draw: Draw, made: Made) -> str:
    name = pick(draw, made, lambda name, t: is_packed(name, t) and t.dim() > 1 and t.shape[-1] != t.shape[-2])
    made.tensors[name] = made.tensors[name].view(torch.uint8).mT.contiguous().view(made.tensors[name].dtype)
    return ""


def swizzled_scales(draw: Draw, made: Made) -> str:
    name = pick(draw, made, lambda name, tensor: is_scales(name, tensor) and tensor.dim() == 2)
    rows, columns = made.tensors[name].shape
    made.tensors[name] = torch.zeros(32 * -(-rows // 128), 16 * -(-columns // 4)).to(torch.float8_e4m3fn)
    return name


def global_scale_of(*values: float) -> Callable[[Draw, Made], str]:
    def change(draw: Draw, made: Made) -> str:
        name = pick(draw, made, is_global)
        made.tensors[name] = torch.full_like(made.tensors[name], draw(st.sampled_from(values)))
        return name

    return change


def global_scale_the_wrong_way_round(draw: Draw, made: Made) -> str:
    name = pick(draw, made, is_global)
    made.tensors[name] = 1 / made.tensors[name]
    return name


def global_scale_of_many(draw: Draw, made: Made) -> str:
    name = pick(draw, made, is_global)
    made.tensors[name] = made.tensors[name].reshape(1).repeat(draw(st.integers(2, 4)))
    return name


def nan_scale_byte(draw: Draw, made: Made) -> str:
    name = pick(draw, made, is_scales)
    data = made.tensors[name].view(torch.uint8).flatten()
    e4m3 = made.tensors[name].dtype == torch.float8_e4m3fn
    data[draw(st.integers(0, len(data) - 1))] = draw(st.sampled_from([0x7F, 0xFF])) if e4m3 else 0xFF
    return name


def in_the_experts(made: Made) -> list[str]:
    return [name for name in made.tensors if ".experts." in name]


def missing_expert(draw: Draw, made: Made) -> str:
    e = draw(st.integers(0, 2))
    for name in in_the_experts(made):
        if f".experts.{e}." in name:
            del made.tensors[name]
    return ""


def missing_projection(draw: Draw, made: Made) -> str:
    stem = pick(draw, made, lambda name, t: is_codes(name, t) and ".experts." in name).rpartition(".")[0]
    for name in list(made.tensors):
        if name.startswith(stem + "."):
            del made.tensors[name]
    return ""


def duplicate_expert(draw: Draw, made: Made) -> str:
    """Expert 01 beside expert 1."""
    e = draw(st.integers(0, 2))
    for name in in_the_experts(made):
        if f".experts.{e}." in name:
            made.tensors[name.replace(f".experts.{e}.", f".experts.0{e}.")] = made.tensors[name].clone()
    return ""


def one_expert_more(draw: Draw, made: Made) -> str:
    for name in in_the_experts(made):
        if ".experts.2." in name:
            made.tensors[name.replace(".experts.2.", ".experts.3.")] = made.tensors[name].clone()
    return ""


def mixed_formats(draw: Draw, made: Made) -> str:
    """One projection of one expert (of all, where they are fused) in bf16, or in FP8 with its scale."""
    name = pick(draw, made, lambda name, t: is_codes(name, t) and ".experts." in name)
    fused = made.tensors[name].dim() > 2
    stem = name.removesuffix("_blocks") if fused else name.rpartition(".")[0]
    for other in list(made.tensors):
        if other.startswith(stem) and not other.endswith("bias"):
            del made.tensors[other]
    dense = torch.randn(2, 2) if not fused else torch.randn(3, 2, 2)
    if not fused and draw(st.booleans()):
        made.tensors |= {f"{stem}.weight": dense.to(torch.float8_e4m3fn), f"{stem}.weight_scale": torch.ones(())}
    else:
        made.tensors[stem if fused else f"{stem}.weight"] = dense.bfloat16()
    return ""


def dense_weight_beside_a_packed_one(draw: Draw, made: Made) -> str:
    path = next(iter(made.experts))
    extra = draw(st.sampled_from(["0.extra_proj.weight", "7.up_proj.weight", "gate_up_proj_extra"]))
    made.tensors[f"{path}.{extra}"] = torch.zeros(2, 2, dtype=torch.bfloat16)
    return f"{path}.{extra}"


def packed_twice(draw: Draw, made: Made) -> str:
    """Under the names of two conventions, or with its experts both fused and one by one."""
    names = [name for name in made.tensors if name.endswith((".weight", ".weight_packed", "_proj", "_blocks"))]
    name = draw(st.sampled_from([name for name in names if is_codes(name, made.tensors[name])]))
    stem, _, leaf = name.rpartition(".")
    codes = made.tensors[name].clone()
    if leaf in ("weight", "weight_packed"):
        made.tensors[f"{stem}.weight" if leaf == "weight_packed" else f"{stem}.weight_packed"] = codes
    elif leaf.endswith("_blocks"):
        made.tensors[name.removesuffix("_blocks")] = codes
    else:
        made.tensors[f"{name}_blocks"] = codes
    return ""


def missing_bias(draw: Draw, made: Made) -> str:
    name = pick(draw, made, lambda name, _: name.endswith("proj_bias"))
    del made.tensors[name]
    return name.rpartition(".")[2]


def unknown_quantiser(draw: Draw, made: Made) -> str:
    method = draw(st.sampled_from(["fp_quant", "bitsandbytes", "nvfp4", "gptq", "", None, 7]))
    made.config["quantization_config"] = {"quant_method": method}
    return ""


def no_quantiser(draw: Draw, made: Made) -> str:
    del made.config["quantization_config"]
    return ""


def another_quantiser(draw: Draw, made: Made) -> str:
    declared = made.config["quantization_config"]
    methods = ("modelopt", "compressed-tensors", "mxfp4")
    declared["quant_method"] = draw(st.sampled_from([m for m in methods if m != declared["quant_method"]]))
    return ""


def rotated_weights(draw: Draw, made: Made) -> str:
    made.config["quantization_config"]["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}
    return "transform_config"


def companion_of_another_quantiser(draw: Draw, made: Made) -> str:
    stem = pick(draw, made, is_codes).rpartition(".")[0]
    leaf = draw(st.sampled_from(["forward_hadamard_matrix", "pre_quant_scale", "weight_zero_point", "weight_g_idx"]))
    made.tensors[f"{stem}.{leaf}"] = torch.zeros(4)
    return f"{stem}.{leaf}"


def fused_rows_of_unknown_order(draw: Draw, made: Made) -> str:
    made.config["model_type"] = draw(st.sampled_from(["mixtral", "", None, "aria"]))
    return ""


def wrong_expert_count_in_the_config(draw: Draw, made: Made) -> str:
    key = draw(st.sampled_from(["num_local_experts", "num_experts", "n_routed_experts"]))
    place = draw(st.sampled_from([made.config, made.config.setdefault("text_config", {})]))
    place[key] = draw(st.sampled_from([1, 2, 4, 128]))
    return ""


def scale_of_no_weight(draw: Draw, made: Made) -> str:
    """input_scale beside a dense weight is allowed; any other scale would be left out in silence."""
    leaf = draw(st.sampled_from(["weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "absmax"]))
    stem = "model.norm" if leaf != "input_scale" else "model.nothing"
    made.tensors[f"{stem}.{leaf}"] = torch.ones(4, dtype=torch.uint8 if leaf == "absmax" else torch.float32)
    return f"{stem}.{leaf}"


def fp8_without_scale(draw: Draw, made: Made) -> str:
    made.tensors["a.weight"] = torch.ones(4, 4).to(torch.float8_e4m3fn)
    block = draw(st.booleans())
    made.tensors |= {"a.weight_scale_inv": torch.ones(2, 2)} if block else {}  # blocks of 2, where they have 128
    return "a.weight"


def fp8_scale_or_weight_without_meaning(draw: Draw, made: Made) -> str:
    scale = draw(st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1.0]))
    weight = torch.full((4, 4), float("nan") if scale == 1 else 1.0)
    made.tensors |= {"a.weight": weight.to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(scale)}
    return "a.weight"


CHANGES: dict[Callable[[Draw, Made], str], tuple[str, ...]] = {
    missing_companion: LAYOUTS,
    renamed_tensor: LAYOUTS,
    wrong_dtype: LAYOUTS,
    wrong_shape: LAYOUTS,
    transposed: LAYOUTS,
    swizzled_scales: NUMBERED,
    global_scale_of(0.0, -0.0, -1e-4, float("-inf")): NVFP4_LAYOUTS,
    global_scale_of(float("nan"), float("inf")): NVFP4_LAYOUTS,
    global_scale_the_wrong_way_round: NVFP4_LAYOUTS,
    global_scale_of_many: NVFP4_LAYOUTS,
    nan_scale_byte: LAYOUTS,
    missing_expert: NUMBERED,
    missing_projection: NUMBERED,
    duplicate_expert: NUMBERED,
    one_expert_more: NUMBERED,
    mixed_formats: LAYOUTS,
    dense_weight_beside_a_packed_one: LAYOUTS,
    packed_twice: LAYOUTS,
    missing_bias: ("gpt_oss", "mxfp4"),
    unknown_quantiser: LAYOUTS,
    no_quantiser: LAYOUTS,
    another_quantiser: LAYOUTS,
    rotated_weights: LAYOUTS,
    companion_of_another_quantiser: LAYOUTS,
    fused_rows_of_unknown_order: ("gpt_oss", "llama4", "mxfp4"),
    wrong_expert_count_in_the_config: LAYOUTS,
    scale_of_no_weight: LAYOUTS,
    fp8_without_scale: LAYOUTS,
    fp8_scale_or_weight_without_meaning: LAYOUTS,
}


ONLY_WHEN_LOADING = (nan_scale_byte, fp8_scale_or_weight_without_meaning)


def test_there_are_more_than_300_corrupted_checkpoints() -> None:
    assert len(CHANGES) * EXAMPLES >= 300


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_corrupted_below_loads_as_it_is(tmp_path: Path, layout: str, shards: int) -> None:
    load_everything(make(layout).write(tmp_path, shards))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__qualname__.partition(".")[0])
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_changed_tensors_and_configs_are_refused(
    tmp_path: Path, change: Callable[[Draw, Made], str], data: st.DataObject
) -> None:
    made = make(data.draw(st.sampled_from(CHANGES[change])), data.draw(st.integers(0, 2**32)))
    named = change(data.draw, made)
    folder = made.write(fresh(tmp_path), shards=data.draw(st.integers(1, 3)))
    check_refused(folder, named, at_open=change not in ONLY_WHEN_LOADING)


def test_infinity_in_a_config_is_read(tmp_path: Path) -> None:
    made = make("nemotron")
    made.config["time_step_limit"] = [0.0, float("inf")]
    load_everything(made.write(tmp_path))


# The texts, one by one


def test_texts(tmp_path: Path) -> None:
    def text(change: Callable[[Made], object], layout: str = "qwen3") -> str:
        made = make(layout)
        change(made)
        return refusal_of(made.write(fresh(tmp_path)))

    up = "model.layers.0.mlp.experts.1.up_proj"
    found = {
        "scale missing": text(lambda made: made.tensors.pop(f"{up}.weight_scale")),
        "expert missing": text(lambda made: [made.tensors.pop(n) for n in list(made.tensors) if ".experts.1." in n]),
        "a divisor": text(lambda made: made.tensors.update({f"{up}.weight_scale_2": torch.tensor(26880.0)})),
        "a multiplier": text(
            lambda made: made.tensors.update({f"{up}.weight_global_scale": torch.tensor([0.5])}), "compressed"
        ),
        "fp-quant": text(lambda made: made.config.update(quantization_config={"quant_method": "fp_quant"})),
        "other names": text(
            lambda made: made.config.update(quantization_config={"quant_method": "compressed-tensors"})
        ),
    }
    where = r"DIR/model\.safetensors: tensor '" + re.escape(up)
    for key, pattern in {
        "scale missing": where + r"\.weight' .* has no companion '" + re.escape(up) + r"\.weight_scale'",
        "expert missing": r"DIR/model\.safetensors: model\.layers\.0\.mlp\.experts: expert 1 is missing, 2 is there",
        "a divisor": where + r"\.weight_scale_2' .* is 26880\.0, a divisor; ModelOpt keeps a multiplier there",
        "a multiplier": where + r"\.weight_global_scale' .* is 0\.5, a multiplier; compressed-tensors keeps a divisor",
        "fp-quant": r"DIR/config\.json: quant_method is 'fp_quant'; the packed tensors .* can be read for modelopt, ",
        "other names": r"DIR/model\.safetensors: tensor .* is named as modelopt does it, DIR/config\.json declares ",
    }.items():
        assert re.match(pattern, found[key]), found[key]


def test_an_empty_weight(tmp_path: Path) -> None:
    made = make("qwen3")
    stem = "model.layers.0.self_attn.q_proj"
    for leaf in ("weight", "weight_scale"):
        made.tensors[f"{stem}.{leaf}"] = made.tensors[f"{stem}.{leaf}"][:0].clone()
    assert "must be [N, C/2], C a multiple of 16 (nvfp4), none empty" in refusal_of(made.write(tmp_path))


@pytest.mark.parametrize("number", ["01", "9" * 5000, "-1", "1_0", "\u0661"])
def test_an_expert_index_that_is_no_plain_number(tmp_path: Path, number: str) -> None:
    made = make("qwen3")
    for name in in_the_experts(made):
        if ".experts.2." in name:
            made.tensors[name.replace(".experts.2.", f".experts.{number}.")] = made.tensors.pop(name)
    folder = made.write(tmp_path)
    checkpoint = None
    with pytest.raises(CheckpointError):
        checkpoint = open_checkpoint(folder)
    assert checkpoint is None


def test_unknown_paths(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make("qwen3").write(tmp_path))
    for load in (checkpoint.load_experts, checkpoint.load_linear, checkpoint.load_plain, checkpoint.input_scale):
        with pytest.raises(CheckpointError, match="'no.such' is not among"):
            load("no.such")
    first, *others = checkpoint.experts
    with pytest.raises(CheckpointError, match=rf"among `experts` \({1 + len(others)}, the first is '{first}'\)"):
        checkpoint.load_experts("no.such")


def mixed(layout: str, pattern: str, other_layout: str = "", **sizes: int) -> Made:
    """A checkpoint whose tensors under `pattern` are those of one with other sizes: whole, and not of this stack."""
    made, other = make(layout), make(other_layout or layout, **sizes)
    chosen = {name: tensor for name, tensor in other.tensors.items() if pattern in name}
    assert chosen
    made.tensors |= chosen
    return made


@pytest.mark.parametrize(
    ("layout", "pattern", "sizes", "text"),
    [
        ("qwen3", "down_proj", {"i": 64}, r"must be the packed form of \[H, I\] = \[64, 32\]"),
        ("mixtral", ".w2.", {"h": 96}, r"must be the packed form of \[H, I\] = \[64, 32\]"),
        ("llama4", "down_proj", {"h": 96}, r"must be the packed form of \[H, I\] = \[64, 32\]"),
        ("gpt_oss", "down_proj", {"e": 4}, r"must hold 3 experts"),
        ("mxfp4", "gate_up_proj", {"e": 4}, r"must hold 4 experts"),
        ("qwen3", "up_proj", {"i": 64}, r"must have the shape of 'model\.layers\.0\.mlp\.experts\.0\.gate_proj"),
        ("compressed", ".1.gate_proj", {"i": 64}, r"must be like 'model\.layers\.0\.mlp\.experts\.0\.gate_proj"),
    ],
)
def test_weights_of_other_sizes(tmp_path: Path, layout: str, pattern: str, sizes: dict, text: str) -> None:
    assert re.search(text, refusal_of(mixed(layout, pattern, **sizes).write(tmp_path)))


def test_stacks_that_are_mixed_otherwise(tmp_path: Path) -> None:
    def text(made: Made) -> str:
        return refusal_of(made.write(fresh(tmp_path)))

    assert "fused and one by one" in text(mixed("llama4", ".experts.", "qwen3"))
    made = make("qwen3")
    for leaf in ("weight_scale_2", "weight"):
        for e in range(3):
            made.tensors.pop(f"model.layers.0.mlp.experts.{e}.down_proj.{leaf}")
    made.tensors |= {name: tensor for name, tensor in make("modelopt_mxfp4").tensors.items() if "down_proj" in name}
    assert re.search(r"down_proj\.weight' .* is mxfp4, .* is not", text(made))

    made = make("llama4", i=32)
    for name in ("gate_up_proj", "gate_up_proj_weight_scale"):
        tensor = made.tensors[f"model.layers.0.mlp.experts.{name}"]
        narrowed = tensor.view(torch.uint8)[..., :-1].contiguous()
        made.tensors[f"model.layers.0.mlp.experts.{name}"] = narrowed.view(tensor.dtype)
    assert "must have an even N: gate and up" in text(made)

    made = make("mxfp4")
    made.tensors["model.layers.0.mlp.experts.down_proj_bias"] = torch.zeros(3, 64)
    loaded = open_checkpoint(made.write(fresh(tmp_path))).load_experts("model.layers.0.mlp.experts")
    assert loaded.down_bias is not None and loaded.down_bias.dtype == torch.float32  # as stored
    made = make("qwen3")
    biases = {
        f"{e}.{role}.bias": 64 if role == "down_proj" else 32
        for e in range(3)
        for role in ("gate_proj", "up_proj", "down_proj")
    }
    made.tensors |= {f"model.layers.0.mlp.experts.{name}": torch.zeros(size) for name, size in biases.items()}
    made.tensors["model.layers.0.mlp.experts.1.up_proj.bias"] = torch.zeros(32).bfloat16()
    assert re.search(r"1\.up_proj\.bias' .* must have the dtype of the other biases", text(made))
    del made.tensors["model.layers.0.mlp.experts.1.up_proj.bias"]
    assert "some biases are there, model.layers.0.mlp.experts.1.up_proj.bias is missing" in text(made)

    made = make("mxfp4")
    made.config["model_type"] = "llama4"
    assert "whether gate and up rows alternate is not known for model_type 'llama4'" in text(made)

    made, stem = make("qwen3"), "model.layers.0.self_attn.q_proj"
    made.tensors[f"{stem}.weight"] = made.tensors[f"{stem}.weight"][:, :12].contiguous()
    made.tensors[f"{stem}.weight_scale"] = made.tensors[f"{stem}.weight_scale"][:, :1].contiguous()
    assert "C a multiple of 16" in text(made)
