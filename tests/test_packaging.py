"""The distribution: wheel and sdist, the import guard, pinned versions, and what README says."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"triton", "transformers", "peft", "tokenizers", "matplotlib", "rich", "typer"}
HEAVY_IN_TORCH = ("torch._inductor", "torch._dynamo")
SITE_PACKAGES = sysconfig.get_path("purelib")


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, text=True, capture_output=True)


def checked(*command: str, cwd: Path, **env: str) -> str:
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Built:
    """A copy of the source, the names in the sdist and the wheel that come of it, and the wheel unpacked."""

    source: Path
    sdist: set[str]
    wheel: set[str]
    unpacked: Path


def _not_source(folder: str, names: list[str]) -> set[str]:
    made = {"build", "dist", "golden", "__pycache__"}
    return {name for name in names if name in made or (name.startswith(".") and name != ".ci")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=_not_source)
    for probe in ("lowering/probe.jinja", "lowering/probe/__init__.py", "lowering/probe/deep.jinja"):
        (source / probe).parent.mkdir(exist_ok=True)
        (source / probe).touch()
    checked(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    with tarfile.open(sdist) as archive:
        sdist_names = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
        wheel_names = set(archive.namelist())
    return Built(source, sdist_names, wheel_names, folder / "unpacked")


def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    """Every Python file and template of the two folders, at its place; no top-level `lowering`, no tests."""
    expected = {"torch_nvfp4/py.typed"}
    for folder, name in (("torch_nvfp4", "torch_nvfp4"), ("lowering", "torch_nvfp4/lowering")):
        for path in (built.source / folder).rglob("*"):
            if path.suffix in (".py", ".jinja"):
                expected.add(f"{name}/{path.relative_to(built.source / folder).as_posix()}")
    assert "torch_nvfp4/lowering/probe/deep.jinja" in expected
    assert {name for name in built.wheel if ".dist-info/" not in name} == expected


def test_wheel_metadata(built: Built) -> None:
    (info,) = built.unpacked.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    requires = metadata.get_all("Requires-Dist") or []
    assert metadata["License-Expression"] == "Apache-2.0"
    assert [line for line in requires if "extra ==" not in line] == [
        "torch<2.16,>=2.11",
        "safetensors",
        'triton; platform_system == "Linux"',
    ]
    assert set(metadata.get_all("Provides-Extra") or []) == {"hf", "demo", "datasets", "test", "dev"}
    scripts = configparser.ConfigParser()
    scripts.read(info / "entry_points.txt")
    assert scripts["console_scripts"]["torch-nvfp4"] == "torch_nvfp4.cli:main"
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_sdist_can_test_itself(built: Built) -> None:
    needed = {"Makefile", "constraints.txt", "scripts/setup.sh", "lowering/__init__.py", "tests/conftest.py"}
    needed |= {
        ".ci/run",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        "tests/test_packaging.py",
    }
    assert needed <= built.sdist


def test_wheel_imports_from_an_empty_folder(built: Built, tmp_path: Path) -> None:
    code = "import torch_nvfp4; from torch_nvfp4 import lowering; print(torch_nvfp4.__file__, lowering.__file__)"
    out = checked(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(built.unpacked)).split()
    package = built.unpacked / "torch_nvfp4"
    assert [Path(path) for path in out] == [package / "__init__.py", package / "lowering" / "__init__.py"]


def test_wheel_runs_as_a_module(built: Built, tmp_path: Path) -> None:
    out = checked(sys.executable, "-m", "torch_nvfp4", "--help", cwd=tmp_path, PYTHONPATH=str(built.unpacked))
    assert "finetune" in out


@pytest.mark.parametrize("folder", [ROOT, Path("/")], ids=["root", "elsewhere"])
def test_editable_install_finds_lowering(folder: Path) -> None:
    code = "from torch_nvfp4 import lowering; import torch_nvfp4.lowering; print(lowering.__file__)"
    assert Path(checked(sys.executable, "-c", code, cwd=folder).strip()) == ROOT / "lowering" / "__init__.py"


@pytest.mark.parametrize("python_path", [SITE_PACKAGES, ""], ids=["with torch", "with nothing"])
def test_import_without_an_install_says_what_to_do(python_path: str) -> None:
    """-S leaves out .pth files, and with them the editable install; PYTHONPATH still counts."""
    done = run(sys.executable, "-S", "-c", "import torch_nvfp4", cwd=ROOT, PYTHONPATH=python_path)
    assert done.returncode == 1
    *_, stack_end, message = done.stderr.strip().splitlines()
    assert stack_end.startswith("    ")
    assert message.startswith("ImportError: torch_nvfp4 is not installed")
    assert "pip install -e ." in message


@pytest.mark.parametrize("module", ["hf", "distributed.load"])
def test_import_without_transformers_says_what_to_install(module: str) -> None:
    code = f"import sys; sys.modules['transformers'] = None; import torch_nvfp4.{module}"
    message = run(sys.executable, "-c", code, cwd=ROOT).stderr.strip().splitlines()[-1]
    assert message == "ModuleNotFoundError: transformers is not installed: pip install 'torch-nvfp4[hf]'"


def test_import_is_light() -> None:
    code = """
import sys, time, torch
before, start = set(sys.modules), time.perf_counter()
import torch_nvfp4
print(time.perf_counter() - start, *(set(sys.modules) - before))
"""
    seconds = []
    while not seconds or (min(seconds) > 0.3 and len(seconds) < 3):  # a busy machine gets two more tries
        took, *names = checked(sys.executable, "-c", code, cwd=Path("/")).split()
        seconds.append(float(took))
    assert not {name for name in names if name.partition(".")[0] in HEAVY or name.startswith(HEAVY_IN_TORCH)}
    assert min(seconds) < 0.3


def test_version_is_one() -> None:
    import torch_nvfp4

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert torch_nvfp4.__version__ == project["version"]
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_direct_requirement_is_pinned() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    lines += [line for extra in project["optional-dependencies"].values() for line in extra]
    wanted = {re.match(r"[\w-]+", line)[0].lower() for line in lines} - {"torch_nvfp4"}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in pins if re.fullmatch(r"[\w.-]+==[\w.]+", line)}
    assert wanted <= pinned
    assert len(pinned) == len([line for line in pins if not line.startswith("#")])


def readme_blocks(language: str) -> list[str]:
    """The fenced blocks of README in this language ("" for none)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return [text for name, text in blocks if name == language]


def test_readme_quick_start_runs(tmp_path: Path) -> None:
    """Exactly its text, on a tiny checkpoint that ModelOpt wrote; the data is the user's."""
    quick, _ = readme_blocks("python")
    assert len(quick.splitlines()) <= 11  # a blank one among them
    golden = ROOT / "tests" / "golden" / "ckpt_modelopt_qwen3_moe-NVFP4_DEFAULT_CFG"
    given = f"""
import torch
torch.manual_seed(0)
folder = {str(golden)!r}
data = [{{"input_ids": ids, "labels": ids}} for ids in torch.randint(3, 16, (8, 12))]
"""
    out = checked(sys.executable, "-c", given + quick, cwd=tmp_path)
    assert "trainable params" in out and "train_loss" in out
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_readme_example_runs(tmp_path: Path) -> None:
    _, layer = readme_blocks("python")
    out = checked(sys.executable, "-W", "error::UserWarning", "-c", layer, cwd=tmp_path)
    assert out.startswith("torch.Size([16, 64])")
    assert float(re.search(r"tensor\(([\d.]+)\)", out)[1]) > 0


def test_readme_schema_is_the_schema() -> None:
    import torch

    import torch_nvfp4  # noqa: F401  registers the ops

    text = re.sub(r"(\w+_)\{([\w,]+)\}(=\w+)?", _expand, readme_blocks("")[0].strip())
    told = re.findall(r"(\w+)(?:=([\w.\"]+))?(?=[,)])", text.removeprefix("moe_lora("))
    arguments = torch.ops.nvfp4.moe_lora.default._schema.arguments
    true = [(a.name, str(a.default_value) if a.has_default_value() else "") for a in arguments]
    assert [(name, default.strip('"')) for name, default in told] == true


def _expand(match: re.Match[str]) -> str:
    stem, ends, default = match.groups(default="")
    return ", ".join(stem + end + default for end in ends.split(","))


def test_readme_is_one_screen_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    assert [link for link in re.findall(r"\]\((?!http)(.*?)\)", text) if not (ROOT / link).exists()] == []


def test_ci_runs_what_readme_says(tmp_path: Path) -> None:
    """A stand-in for make tells what .ci/run calls, and where."""
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $* in $PWD"\n')
    make.chmod(0o755)
    out = checked("bash", str(ROOT / ".ci" / "run"), cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert out.splitlines()[-1] == f"make test in {ROOT}"
    assert "make test" in readme_blocks("sh")[0]
