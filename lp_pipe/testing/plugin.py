"""The pytest plugin: the fixtures `launched` and `faults`, and the option --lp-mode.

Every pytest in an environment with lp_pipe loads this plugin, and with it the core of lp_pipe, but no engine.
"""

from collections.abc import Generator, Iterator
from types import ModuleType
from typing import Any, Protocol

import pytest

from lp_pipe.errors import NodeError
from lp_pipe.launch import Run, launch
from lp_pipe.launch.launcher import MODES
from lp_pipe.program import Program
from lp_pipe.testing import faults as lp_faults
from lp_pipe.testing.leaks import PATIENCE_S, LeakSnapshot
from lp_pipe.testing.temp_dir import private_temp_dir

_HAS_FAILED = pytest.StashKey[bool]()
_RUNS = pytest.StashKey[list[Run]]()


class Launched(Protocol):
    """The type of the fixture `launched`."""

    def __call__(self, program: Program, mode: str | None = None, **options: Any) -> Run: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lp_pipe").addoption(
        "--lp-mode",
        choices=list(MODES),
        default="thread",
        help="the mode in which the fixture `launched` launches programs: thread (the default) or process",
    )
    parser.addini(
        "lp_leak_patience",
        "seconds until the fixture `launched` reports a thread, process or file that a test has left as a leak",
        default=str(PATIENCE_S),
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        item.stash[_HAS_FAILED] = True
        for run in item.stash.get(_RUNS, []):
            failure = run.failure
            if failure is not None:  # often the cause of the test's failure
                report.sections.append((f"node {failure.label}/{failure.index} failed", str(failure)))
    return report


@pytest.fixture
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Launch programs that end with the test: `run = launched(program, mode=None, **launch_options)`.

    The mode is thread, unless the test or the command line (--lp-mode=process) gives another one. Several programs may
    run at a time. At the end of the test all are stopped. A test that has passed still fails if a node has failed and
    the test did not see that (in `run.wait()` or at the end of `with run`), or if a thread, process, socket, shared
    memory or temporary file is left.
    """
    if "faults" in request.fixturenames:  # before the launch, even if the test lists `faults` after `launched`
        request.getfixturevalue("faults")
    tmp_path_factory.getbasetemp()  # creates pytest's own folder now: not below the test's temporary folder
    runs = request.node.stash[_RUNS] = []

    def start(program: Program, mode: str | None = None, **options: Any) -> Run:
        runs.append(launch(program, mode or request.config.getoption("--lp-mode"), **options))
        return runs[-1]

    with private_temp_dir():
        before = LeakSnapshot()
        yield start
        failure = _stop_all(runs)
        runs.clear()
        if request.node.stash.get(_HAS_FAILED, False):
            return  # the traceback of the failure still holds objects, and the test has failed anyway
        if failure is not None:
            raise failure
        before.assert_nothing_new(float(request.config.getini("lp_leak_patience")))


@pytest.fixture
def faults() -> Iterator[ModuleType]:
    """Return the module `lp_pipe.testing.faults`, for programs that `launched` launches in this test."""
    with lp_faults.enabled():
        yield lp_faults


def _stop_all(runs: list[Run]) -> NodeError | None:
    """Stop the programs and return the first failure that the test has not seen."""
    lp_faults.heal_all()
    for run in runs:
        run.request_stop()
    failures = []
    for run in runs:
        run.stop()
        if not run.has_raised_failure and run.failure is not None:
            failures.append(run.failure)
    return failures[0] if failures else None
