"""What every test gets: seeds, threads, hypothesis profiles, poisoned memory, and a policy on skips.

A skip hides a test, so only one kind is allowed: a test marked `gpu` where there is no CUDA device. Those are
listed by name. Any other skip, any xfail, and a session in which no test ran make the session fail.
"""

import os

# No test may reach for a hub: what tests load, they make.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ranks import Ranks

NO_GPU = "needs a CUDA device"
POISON_BYTES = [1 << power for power in range(6, 25, 2)]  # 64 B to 16 MiB

for _name, _examples in {"ci": 50, "deep": 1000}.items():
    settings.register_profile(
        _name,
        deadline=None,
        derandomize=True,
        max_examples=_examples,
        print_blob=True,
        # The fixtures of this suite hold no state that examples could share.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class SkipPolicy:
    """Collects what ran and what was skipped, from the reports of one session (with all xdist workers)."""

    def __init__(self) -> None:
        self.ran = 0
        self.without_gpu: list[str] = []
        self.forbidden: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "wasxfail"):
            self.forbidden.append(f"{report.nodeid}: xfail ({report.wasxfail})")
        elif report.skipped:
            reason = skip_reason(report)
            if "gpu" in report.keywords and reason == NO_GPU:
                self.without_gpu.append(report.nodeid)
            else:
                self.forbidden.append(f"{report.nodeid}: skipped ({reason})")
        elif report.when == "call":
            self.ran += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.forbidden.append(f"{report.nodeid}: skipped as a whole ({skip_reason(report)})")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly or session.exitstatus != pytest.ExitCode.OK:
            return
        if self.forbidden or not self.ran:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.without_gpu:
            terminalreporter.section(f"{len(self.without_gpu)} skipped: {NO_GPU}")
            for name in sorted(self.without_gpu):
                terminalreporter.line(name)
        if self.forbidden:
            terminalreporter.section(f"{len(self.forbidden)} not allowed", red=True)
            for name in sorted(self.forbidden):
                terminalreporter.line(f"ERROR {name}", red=True)
        if not self.ran and not terminalreporter.config.option.collectonly:
            terminalreporter.line("ERROR no test ran", red=True)


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")  # xdist's; its reports reach the policy of the main process
    torch.set_num_threads(1 if is_worker else 2)
    if not is_worker:
        config.pluginmanager.register(SkipPolicy(), "skip-policy")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(NO_GPU)


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """What one test compiled must not serve, or use up the recompile limit of, the next."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For files whose tensors are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poison() -> Iterator[Callable[[], None]]:
    """Makes uninitialised memory show: `torch.empty` gives NaN (the largest value for integers).

    Buffers of compiled code do not come from `torch.empty`. For those, free blocks of many sizes are filled
    with 0xFF bytes, NaN in every float format here, so that the CPU allocator hands them out next. Call the
    fixture's value to fill them once more.
    """

    def fill_free_memory() -> None:
        blocks = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in POISON_BYTES for _ in range(4)]
        del blocks

    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    fill_free_memory()
    yield fill_free_memory
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Iterator["Ranks"]:
    """Two processes that last for a file, in a process group unless the file says `GROUPED = False`."""
    from ranks import Ranks

    with Ranks(2, grouped=getattr(request.module, "GROUPED", True)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> Iterator["Ranks"]:
    """As `two`."""
    from ranks import Ranks

    with Ranks(4, grouped=getattr(request.module, "GROUPED", True)) as ranks:
        yield ranks
