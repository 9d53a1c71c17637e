"""From a packed checkpoint to a merged one with transformers and PEFT: load, train a step, save, merge, load again."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden_models import COMPRESSED_TENSORS, GOLDEN, QWEN, load, logits, token_ids
from merge_models import merged_by_hand, packed_of, raw
from packed_models import COMPRESSED, W123, Style, export, make_stock, make_stock_with_vision
from peft import LoraConfig, PeftModel, get_peft_model
from test_hf_pretrained import gpt_oss_mxfp4
from torch import nn
from transformers import PreTrainedModel

from torch_nvfp4.checkpoint import open_checkpoint
from torch_nvfp4.cli import run
from torch_nvfp4.hf import pack_on_load, skeletons
from torch_nvfp4.lora import add_lora, load_adapter, remove_adapters, save_adapter
from torch_nvfp4.merge import MergeError, merge_folder
from torch_nvfp4.nn import NVFP4Experts, NVFP4Linear, set_numerics

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:`(is_gradient_checkpointing|gradient_checkpointing_enable)` is dep:FutureWarning"
    ),
]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GPT_OSS = "ckpt_modelopt_gpt_oss-NVFP4_DEFAULT_CFG"


@pytest.fixture(params=[QWEN, COMPRESSED_TENSORS, GPT_OSS, "gpt-oss"])
def base(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Folder of a golden checkpoint, or of a gpt-oss in its own MXFP4."""
    if request.param != "gpt-oss":
        yield GOLDEN / request.param
        return
    gpt_oss_mxfp4(tmp_path / "base")
    pack_on_load("mxfp4")
    try:
        yield tmp_path / "base"
    finally:
        pack_on_load("mxfp4", False)


def train(model: nn.Module, steps: int = 2, lr: float = 0.05) -> None:
    """Adam at a rate so high that 4 bits see it; the first step moves B alone."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        model(input_ids=token_ids(), labels=token_ids(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
def test_the_merged_model_is_the_merge_aware_one(base: Path, factors: torch.dtype, tmp_path: Path) -> None:
    model = load(base)
    before = logits(model)
    linears = [
        path.rpartition(".")[2] for path in open_checkpoint(base).linears
    ]  # all that there are: gpt-oss has none
    add_lora(model, r=4, alpha=8, targets=("experts", *linears), dtype=factors)
    set_numerics(model, merge_aware=True)
    train(model)
    save_adapter(model, tmp_path / "adapter")
    code = ["merge", "--model", base, "--adapter", tmp_path / "adapter", "--output", tmp_path / "out"]
    report = tmp_path / "report.json"
    assert run([*map(str, code), "--report", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["merge_aware"] and told["total"]["direction"] > 0.1

    wanted, got = merged_by_hand(model), packed_of(open_checkpoint(tmp_path / "out"))
    packed = {path for path, m in model.named_modules() if isinstance(m, NVFP4Experts | NVFP4Linear)}
    assert wanted and {name.removesuffix(".gate_up").removesuffix(".down") for name in wanted} <= packed
    for name, parts in wanted.items():
        assert all(torch.equal(raw(x), raw(y)) for x, y in zip(parts, got[name], strict=True)), name
    merged = load(tmp_path / "out")
    assert torch.equal(raw(merged.lm_head.weight), raw(model.lm_head.weight))
    aware, alone = logits(model), logits(merged)
    torch.testing.assert_close(alone, aware, rtol=0, atol=2e-5)
    assert (aware - before).abs().max() > 100 * (alone - aware).abs().max()
    set_numerics(model, merge_aware=False)
    assert (logits(model) - alone).abs().max() > 1e-3  # unmerged it is another model
    remove_adapters(model)
    assert torch.equal(logits(model), before)


def peft_model(model: PreTrainedModel, **changes: object) -> PeftModel:
    packed = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}
    settings = dict(r=4, lora_alpha=8, target_modules=sorted(packed), target_parameters=BOTH)
    return get_peft_model(model, LoraConfig(**(settings | changes)))


def test_peft_writes_the_stamp_and_reads_it(base: Path, tmp_path: Path) -> None:
    model = peft_model(load(base), use_rslora=True)
    set_numerics(model, merge_aware=True)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    data = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    format = open_checkpoint(base).experts["model.layers.0.mlp.experts"].format
    stamp = {"merge_aware": True, "quantizer": "nvfp4-merge-1", "format": format}
    assert data["torch_nvfp4"] == stamp | {"base": data["torch_nvfp4"]["base"]}
    report = merge_folder(base, tmp_path / "adapter", tmp_path / "out", skeletons=skeletons)
    packed = open_checkpoint(base)
    assert report.merge_aware and len(report.tensors) == 2 * len(packed.experts) + len(packed.linears)
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(model), rtol=0, atol=2e-5)

    with pytest.warns(UserWarning, match="trained merge-aware"):
        again = PeftModel.from_pretrained(load(base), str(tmp_path / "adapter"))
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["torch_nvfp4"] == data["torch_nvfp4"]
    set_numerics(again, merge_aware=True)
    assert torch.equal(logits(again), logits(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = load(base)
        set_numerics(loaded, merge_aware=True)
        PeftModel.from_pretrained(loaded, str(tmp_path / "adapter"))
        load_adapter(_aware(load(base)), tmp_path / "adapter")


def _aware(model: PreTrainedModel) -> PreTrainedModel:
    set_numerics(model, merge_aware=True)
    return model


def test_peft_without_merge_aware_writes_no_stamp(tmp_path: Path) -> None:
    model = peft_model(load(GOLDEN / QWEN))
    model.save_pretrained(tmp_path / "adapter")
    assert "torch_nvfp4" not in json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())


def test_saving_leaves_the_callers_config_without_a_stamp(tmp_path: Path) -> None:
    """It may serve a second model, whose adapter is not of the first one's kind."""
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=BOTH)
    model = get_peft_model(load(GOLDEN / QWEN), config)
    set_numerics(model, merge_aware=True)
    model.save_pretrained(tmp_path / "first")
    assert "torch_nvfp4" in json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        get_peft_model(load(GOLDEN / QWEN), config).save_pretrained(tmp_path / "second")
    assert "torch_nvfp4" not in json.loads((tmp_path / "second" / "adapter_config.json").read_text())


def test_stock_peft_takes_a_stamped_file(tmp_path: Path) -> None:
    """Without this library in the process: with a warning, and the same configuration."""
    model = peft_model(load(GOLDEN / QWEN))
    set_numerics(model, merge_aware=True)
    model.save_pretrained(tmp_path)
    code = (
        "import sys, warnings; from peft import PeftConfig\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always'); config = PeftConfig.from_pretrained(sys.argv[1])\n"
        "assert not [name for name in sys.modules if name.startswith('torch_nvfp4')]\n"
        "print(config.r, config.lora_alpha, *[str(w.message) for w in seen])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("4 8 Unexpected keyword arguments ['torch_nvfp4'] for class LoraConfig, these are")


CASES: dict[str, tuple[Callable[[], PreTrainedModel], Style]] = {
    "mixtral": (lambda: make_stock("mixtral"), Style(renames=((r"mlp\.experts", "block_sparse_moe.experts"), *W123))),
    "mixtral, compressed": (lambda: make_stock("mixtral"), Style(**COMPRESSED)),
    "deepseek_v3": (lambda: make_stock("deepseek_v3"), Style()),
    "glm4_moe": (lambda: make_stock("glm4_moe"), Style()),
    "nemotron_h": (lambda: make_stock("nemotron_h"), Style(renames=((r"^model\.", "backbone."),))),
    "gpt_oss": (lambda: make_stock("gpt_oss"), Style(fused=True, linears="$^")),
    "gpt_oss, compressed": (lambda: make_stock("gpt_oss"), Style(**COMPRESSED, linears="$^")),
    "llama4": (lambda: make_stock("llama4"), Style(fused=True)),
    "gemma4": (lambda: make_stock("gemma4"), Style()),
    "qwen3_5_moe": (lambda: make_stock("qwen3_5_moe"), Style()),
    "qwen3_5_moe with vision": (make_stock_with_vision, Style()),
}


@pytest.mark.parametrize("case", CASES)
def test_architectures_whose_files_have_other_names(case: str, tmp_path: Path) -> None:
    make, style = CASES[case]
    export(make(), tmp_path / "base", style)
    model = load(tmp_path / "base")
    add_lora(model, r=3, alpha=6, targets=("experts", *([] if "gpt" in case else ["o_proj"])))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    save_adapter(model, tmp_path / "adapter")
    report = merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", skeletons=skeletons)
    set_numerics(model, merge_aware=True)
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(model), rtol=1e-4, atol=1e-4)
    assert all(tensor.survived for tensor in report.tensors)
    set_numerics(model, merge_aware=False)
    merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "dense", dense=True, skeletons=skeletons)
    dense = load(tmp_path / "dense")
    assert not [m for m in dense.modules() if isinstance(m, NVFP4Experts | NVFP4Linear)]
    assert (logits(dense) - logits(model)).norm() < 0.05 * logits(model).norm()  # bf16 weights


def test_names_that_only_transformers_knows(tmp_path: Path) -> None:
    make, style = CASES["mixtral"]
    export(make(), tmp_path / "base", style)
    model = load(tmp_path / "base")
    add_lora(model, r=3, targets=("experts",))
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(MergeError, match="target 'mlp.experts.gate_up_proj' matches no packed expert parameter"):
        merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    merge_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", skeletons=skeletons)


def test_the_command_tells_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load(GOLDEN / QWEN)
    add_lora(model, r=2, targets=("experts",))
    save_adapter(model, tmp_path / "adapter")
    code = ["merge", "--model", str(GOLDEN / QWEN), "--adapter", str(tmp_path / "adapter")]
    capsys.readouterr()
    assert run([*code, "--output", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert "model.layers.0.mlp.experts.gate_up_proj  nvfp4" in told.out and told.err == ""
    assert told.out.endswith("out: 2 weights merged into 4-bit weights\n")
    assert run([*code, "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    assert run([*code, "--output", str(tmp_path / "new")]) == 2
    assert "has no adapter_config.json" in capsys.readouterr().err and not (tmp_path / "new").exists()
