"""The policy of conftest.py itself: what must fail a session does, and uninitialised memory shows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]

# name: (source of a test file, whether its session passes, a text of the summary)
CASES = {
    "passes": ("def test_it(): pass", True, "1 passed"),
    "skips": ("def test_it(): pytest.skip('no reason')", False, "test_it: skipped (no reason)"),
    "xfails": ("@pytest.mark.xfail(reason='old')\ndef test_it(): assert 0", False, "test_it: xfail (old)"),
    "passes in spite of xfail": (
        "@pytest.mark.xfail(reason='old')\ndef test_it(): pass",
        False,
        "test_it: xfail",
    ),
    "only needs a GPU": ("@pytest.mark.gpu\ndef test_it(): pass", False, "no test ran"),
    "also needs a GPU": (
        "def test_other(): pass\n@pytest.mark.gpu\ndef test_it(): raise RuntimeError",
        True,
        "1 skipped: needs a CUDA device",
    ),
    "skips a GPU test in its body": (
        "@pytest.mark.gpu\ndef test_it(): pytest.skip('needs a CUDA device 2')",
        False,
        "test_it: skipped (needs a CUDA device 2)",
    ),
}


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = gpu")
    threads = torch.get_num_threads()

    def run(code: str, *options: str, cuda: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_case=f"import pytest\n{code}")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
        torch.set_num_threads(threads)
        return result

    return run


@pytest.mark.parametrize("case", CASES)
def test_session_that(case: str, session: Callable[..., pytest.RunResult]) -> None:
    code, passes, text = CASES[case]
    result = session(code, cuda="in its body" in case)
    assert result.ret == (0 if passes else 1)
    assert text in result.stdout.str()


def test_policy_sees_what_xdist_workers_report(
    session: Callable[..., pytest.RunResult], pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_file="import pytest\npytest.importorskip('no_such_module')")
    result = session("def test_a(): pass\ndef test_b(): pytest.skip('no reason')", "-n", "1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "ERROR test_case.py::test_b: skipped (no reason)",
            "ERROR test_file.py: skipped as a whole (could not import 'no_such_module'*",
        ]
    )


def test_a_file_skipped_as_a_whole_fails_the_session(
    session: Callable[..., pytest.RunResult], pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_file="import pytest\npytest.importorskip('no_such_module')")
    assert session("def test_a(): pass").ret == 1


def test_selecting_nothing_is_not_success(session: Callable[..., pytest.RunResult]) -> None:
    assert session("def test_it(): pass", "-k", "other").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_poison_shows_uninitialised_memory(poison: Callable[[], None]) -> None:
    assert torch.empty(1000).isnan().all()
    assert torch.empty(1000, dtype=torch.bfloat16).isnan().all()
    torch.utils.deterministic.fill_uninitialized_memory = False
    poison()
    assert torch.empty(1000).view(torch.uint8).ne(0).any()


def test_poison_ends_with_its_test() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
