"""scripts/setup.sh, with a stand-in for Python that notes what it is called with and installs nothing."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.sh"
TORCH = next(line for line in SCRIPT.parent.with_name("constraints.txt").read_text().split() if "torch==" in line)
FAKE_PYTHON = """#!/bin/sh
echo "$*" >>"{folder}/calls"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip show"*) exit 1 ;;
    "-m pip install"*) [ ! -e "{folder}/no-network" ] ;;
    *version_info\\[:3\\]*) echo 3.11.9 ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A folder with programs, and the environment that set-up makes there."""

    folder: Path

    def setup(self, extra: str = "dev", **env: str) -> tuple[int, str, list[str]]:
        """Runs the script: exit status, what it printed, and the pip installs that it started."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        command = ["sh", str(SCRIPT), str(self.folder / "venv"), extra]
        kept = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX_URL"}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(command, env={**kept, "PATH": path, **env}, text=True, capture_output=True)
        installs = [line for line in calls.read_text().splitlines() if line.startswith("-m pip install")]
        return done.returncode, done.stdout + done.stderr, installs


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    python = tmp_path / "bin" / "python3.11"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON.format(folder=tmp_path))
    python.chmod(0o755)
    return Machine(tmp_path)


def test_installs_torch_first_and_announces_it(machine: Machine) -> None:
    status, text, installs = machine.setup("demo")
    assert status == 0
    assert f"downloading {TORCH} from the default index" in text
    assert installs == [
        f"-m pip install -c constraints.txt {TORCH} setuptools",
        "-m pip install -c constraints.txt --no-build-isolation -e .[demo]",
    ]


def test_a_second_run_does_nothing(machine: Machine) -> None:
    machine.setup("dev")
    assert machine.setup("dev") == (0, "", [])
    assert machine.setup("demo") == (0, "", [])  # dev has all that demo has


def test_dev_after_demo_installs_the_rest_and_keeps_the_environment(machine: Machine) -> None:
    machine.setup("demo")
    status, text, installs = machine.setup("dev")
    assert status == 0
    assert installs[-1].endswith("-e .[dev]")
    assert "making" not in text


def test_other_files_than_at_the_last_install(machine: Machine) -> None:
    machine.setup("dev")
    (machine.folder / "venv" / ".installed-dev").write_text("of another pyproject.toml\n")
    _, text, installs = machine.setup("dev")
    assert len(installs) == 2
    assert "making" not in text


def test_an_interrupted_install_starts_afresh(machine: Machine) -> None:
    (machine.folder / "no-network").touch()
    assert machine.setup()[0] != 0
    half_written = machine.folder / "venv" / "half-written"
    half_written.touch()
    (machine.folder / "no-network").unlink()
    status, text, _ = machine.setup()
    assert status == 0
    assert "making" in text
    assert not half_written.exists()
    assert machine.setup() == (0, "", [])


def test_an_environment_whose_python_is_gone_is_made_anew(machine: Machine) -> None:
    machine.setup()
    (machine.folder / "venv" / "bin" / "python").unlink()
    status, text, _ = machine.setup()
    assert status == 0
    assert "making" in text


def test_index_of_torch(machine: Machine) -> None:
    url = "https://index.invalid/cpu"
    _, text, installs = machine.setup(TORCH_INDEX_URL=url)
    assert f"downloading {TORCH} from {url}" in text
    assert installs[0] == f"-m pip install --index-url {url} {TORCH}"
    assert machine.setup(TORCH_INDEX_URL=url) == (0, "", [])
    assert machine.setup() == (0, "", [])
    assert "making" in machine.setup(TORCH_INDEX_URL=f"{url}-other")[1]


def test_no_usable_python_is_one_line(tmp_path: Path) -> None:
    programs = {"python3.12": "exit 127", "python3": 'case "$2" in *exit*) exit 1 ;; esac; echo 3.9.2'}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("cat", "cksum", "dirname", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    command = ["sh", str(SCRIPT), str(tmp_path / "venv"), "demo"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "torch_nvfp4: needs Python 3.11 to 3.14 with its venv module; found: "
        "python3.12 (does not run), python3 (is 3.9.2)\n"
    )
