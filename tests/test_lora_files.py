"""Adapter files: what is written, what is refused, and what a kill leaves behind."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lora_toy import HIDDEN, INTER, Toy, trained
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_nvfp4.lora import (
    adapter_state_dict,
    add_lora,
    load_adapter,
    remove_adapters,
    save_adapter,
)
from torch_nvfp4.nn import NVFP4Experts

pytestmark = pytest.mark.usefixtures("one_thread")


def rewrite(directory: Path, change: Callable[[dict[str, Tensor], dict[str, object]], None]) -> None:
    weights, config_file = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    state, config = load_file(weights), json.loads(config_file.read_text())
    change(state, config)
    save_file(state, weights)
    config_file.write_text(json.dumps(config))


KEY = "base_model.model.layers.1.mlp.experts.base_layer.lora_B.weight"
BROKEN: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "missing": (lambda s, c: s.pop(KEY), f"adapter_model.safetensors lacks {KEY}"),
    "unexpected": (
        lambda s, c: s.update({"x.lora_A.weight": torch.ones(1)}),
        "has the unexpected x.lora_A.weight",
    ),
    "experts": (
        lambda s, c: s.update({KEY: s[KEY][:, :8].clone()}),
        rf"{KEY}: expected shape \[32, 12\] for E = 3 experts and R = 4, got \[32, 8\]",
    ),
    "rank": (lambda s, c: c.update(r=3), r"lora_A.weight: expected shape \[3, 32\] for R = 3, got \[4, 32\]"),
    "dtype": (
        lambda s, c: s.update({KEY: s[KEY].int()}),
        f"{KEY}: expected a floating dtype, got torch.int32",
    ),
    "other linear": (
        lambda s, c: c["target_modules"].append("k_proj"),
        "the adapter's target 'k_proj' matches no linear layer",
    ),
    "other parameter": (
        lambda s, c: c.update(target_parameters=["moe.gate_up_proj"]),
        "the adapter's target 'moe.gate_up_proj' matches no packed expert parameter",
    ),
    "one target less": (
        lambda s, c: c.update(target_modules=[]),
        "has the unexpected .*layers.0.q_proj.lora_A",
    ),
    "regex": (lambda s, c: c.update(target_modules=r".*k_proj"), "target '.*k_proj' matches no linear layer"),
    "all": (lambda s, c: c.update(target_modules="all-linear"), "'all-linear' is not supported"),
    "kind": (lambda s, c: c.update(peft_type="LOHA"), "peft_type is 'LOHA', only 'LORA' is supported"),
    "dora": (lambda s, c: c.update(use_dora=True), "use_dora=True is not supported"),
    "pissa": (lambda s, c: c.update(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
    "layout": (
        lambda s, c: c.update(lora_B_layout="expert_major"),
        "lora_B_layout must be one of rank_major, grouped_by_expert, got 'expert_major'",
    ),
    "no rank": (lambda s, c: c.pop("r"), "adapter_config.json: r must be an integer of at least 1, got None"),
}
WRONG_FIELDS: list[tuple[str, object, str]] = [
    ("r", True, "an integer of at least 1"),
    ("r", 4.0, "an integer of at least 1"),
    ("lora_alpha", None, "a finite number"),
    ("lora_alpha", math.nan, "a finite number"),
    ("rank_pattern", [1], "a map of regular expressions to integers of at least 1"),
    ("rank_pattern", {"q_proj": "4"}, "a map of regular expressions to integers of at least 1"),
    ("rank_pattern", {"q_proj": 0}, "a map of regular expressions to integers of at least 1"),
    ("alpha_pattern", {"[": 3}, "a map of regular expressions to finite numbers"),
    ("alpha_pattern", {"q_proj": math.inf}, "a map of regular expressions to finite numbers"),
    ("target_modules", 5, "a list of names or one regular expression"),
    ("target_modules", ["q_proj", 5], "a list of names or one regular expression"),
    ("target_modules", "*q_proj", "a list of names or one regular expression"),
    ("target_parameters", "mlp.experts.down_proj", "a list of names"),
    ("peft_version", 0.21, "a string"),
]
BROKEN |= {
    f"{name}={value!r}": (
        lambda s, c, name=name, value=value: c.update({name: value}),
        re.escape(f"adapter_config.json: {name} must be {kind}, got {value!r}"),
    )
    for name, value, kind in WRONG_FIELDS
}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_load_is_strict_and_changes_nothing(tmp_path: Path, case: str, adapted: bool) -> None:
    change, message = BROKEN[case]
    save_adapter(trained(Toy()), tmp_path)
    rewrite(tmp_path, change)
    model = trained(Toy()) if adapted else Toy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if adapted and case == "rank":
        message = "layers.0.q_proj: the adapter has rank R = 3, the model's has R = 4"
    if adapted and case == "one target less":
        message = "only the model adapts layers.0.q_proj, layers.1.q_proj"
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_fault_c16_dropout_is_refused_in_words(tmp_path: Path) -> None:
    save_adapter(trained(Toy()), tmp_path)
    rewrite(tmp_path, lambda s, c: c.update(lora_dropout=0.1))
    with pytest.raises(ValueError, match="lora_dropout=0.1 is not supported; set it to 0, a trained adapter's output"):
        load_adapter(Toy(), tmp_path)


def test_a_file_in_place_of_its_folder(tmp_path: Path) -> None:
    save_adapter(trained(Toy()), tmp_path)
    with pytest.raises(ValueError, match=f"safetensors is a file: give the adapter's folder, {tmp_path}$"):
        load_adapter(Toy(), tmp_path / "adapter_model.safetensors")


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    save_adapter(trained(Toy()), tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="adapter_config.json must hold a JSON object of LoRA settings, got list"):
        load_adapter(Toy(), tmp_path)


@pytest.mark.parametrize("kind", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_and_damaged_files(tmp_path: Path, kind: str) -> None:
    save_adapter(trained(Toy()), tmp_path)
    whole = (tmp_path / kind).read_bytes()
    (tmp_path / kind).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="holds a damaged adapter"):
        load_adapter(Toy(), tmp_path)
    (tmp_path / kind).write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match="holds a damaged adapter"):
        load_adapter(Toy(), tmp_path)
    (tmp_path / kind).unlink()
    with pytest.raises(ValueError, match=f"has no {kind}: not an adapter, or its saving was interrupted"):
        load_adapter(Toy(), tmp_path)


@pytest.mark.parametrize("packed_linear", [False, True])
def test_save_and_load_give_the_same_model(tmp_path: Path, packed_linear: bool) -> None:
    torch.manual_seed(1)
    model = trained(Toy(packed_linear=packed_linear), expert_r=2, rslora=True)
    x = torch.randn(5, HIDDEN)
    save_adapter(model, tmp_path / "new" / "folder", base_model_name_or_path="base")
    torch.manual_seed(1)
    fresh = Toy(packed_linear=packed_linear)
    load_adapter(fresh, tmp_path / "new" / "folder")
    assert torch.equal(fresh(x), model(x))
    assert {n for n, p in fresh.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    remove_adapters(fresh)
    trained(fresh, expert_r=2, alpha=99)  # another scaling: the file's must win
    load_adapter(fresh, tmp_path / "new" / "folder")
    assert torch.equal(fresh(x), model(x))
    config = json.loads((tmp_path / "new" / "folder" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 8, True)
    assert config["rank_pattern"] == {"q_proj": 4} and config["base_model_name_or_path"] == "base"
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_saving_without_adapters_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model has no adapters"):
        save_adapter(Toy(), tmp_path)
    with pytest.raises(ValueError, match="PEFT has no name for an adapter on the root module"):
        experts = NVFP4Experts(2, HIDDEN, INTER)
        experts.add_lora(2, scaling=1.0)
        adapter_state_dict(experts)


def renames_until(kill_at: int) -> Callable[[Path, Path], None]:
    """os.replace that is interrupted before its rename number `kill_at`."""
    renames = itertools.count()

    def replace(source: Path, target: Path) -> None:
        if next(renames) == kill_at:
            raise KeyboardInterrupt
        shutil.move(source, target)

    return replace


@pytest.mark.parametrize("same_config", [True, False])
def test_a_kill_at_any_rename_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_config: bool
) -> None:
    old, new = trained(Toy()), trained(Toy(), alpha=8 if same_config else 64)
    outcomes = set()
    for kill_at in range(4):
        directory = tmp_path / str(kill_at)
        save_adapter(old, directory)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", renames_until(kill_at))
            save_adapter(new, directory)
        model = Toy()
        try:
            load_adapter(model, directory)
        except ValueError as error:
            assert "has no adapter_config.json" in str(error)
            outcomes.add("refused")
            continue
        found = adapter_state_dict(model)
        is_new = torch.equal(found[KEY], adapter_state_dict(new)[KEY])
        assert is_new or torch.equal(found[KEY], adapter_state_dict(old)[KEY])
        wanted = (new if is_new else old).layers[0].q_proj.scaling
        assert model.layers[0].q_proj.scaling == wanted
        outcomes.add("new" if is_new else "old")
    assert outcomes == ({"old", "new"} if same_config else {"refused", "new"})


def test_names_are_those_of_the_bare_model_under_wrappers(tmp_path: Path) -> None:
    model = trained(Toy())
    names = adapter_state_dict(model).keys()
    compiled = torch.compile(model, backend="eager")
    assert adapter_state_dict(compiled).keys() == names
    save_adapter(compiled, tmp_path)
    load_adapter(compiled, tmp_path)


def test_targets_name_what_is_adapted_and_nothing_else(tmp_path: Path) -> None:
    """An adapter on one of two like-named layers is saved under its full name."""
    model = Toy()
    add_lora(model, r=2, targets=("layers.1.q_proj", "layers.0.mlp.experts.down_proj"))
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["1.q_proj"]
    assert config["target_parameters"] == ["0.mlp.experts.down_proj"]
    reference = PeftModel.from_pretrained(Toy(dense=True), tmp_path)
    stock = {name for name, _ in reference.named_parameters() if "lora_" in name}
    assert {name.replace(".default", "") for name in stock} == adapter_state_dict(model).keys()
