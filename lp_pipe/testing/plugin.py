"""The pytest plugin: the fixtures `launched` and `faults`, the option --lp-mode.

Loaded by every pytest of an environment in which lp_pipe is installed, so it imports only what a fixture is asked for.
"""

from collections.abc import Generator, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from lp_pipe.launch import Run
    from lp_pipe.program import Program

_HAS_FAILED = pytest.StashKey[bool]()


class Launched(Protocol):
    """The type of the fixture `launched`."""

    def __call__(self, program: "Program", mode: str | None = None, **options: Any) -> "Run": ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lp_pipe").addoption(
        "--lp-mode",
        default="thread",
        help="the mode in which the fixture `launched` launches programs: thread (the default) or process",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_HAS_FAILED] = report.failed
    return report


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[Launched]:
    """`run = launched(program, mode=None, **launch_options)`: launch a program that ends with the test.

    As threads, unless the test or the command line (--lp-mode=process) says otherwise; several programs may run at a
    time. At the end of the test all are stopped. If it has passed, it fails nevertheless when a node has failed and the
    test did not see that (in `run.wait()` or at the end of `with run`), or when something is left: a thread, a
    process, a socket, shared memory, a temporary file.
    """
    from lp_pipe.launch import launch
    from lp_pipe.testing.leaks import PATIENCE_S, Snapshot
    from lp_pipe.testing.temp_dir import private_temp_dir

    if "faults" in request.fixturenames:  # however late it is asked for
        request.getfixturevalue("faults")
    runs: list[Run] = []

    def start(program: "Program", mode: str | None = None, **options: Any) -> "Run":
        runs.append(launch(program, mode or request.config.getoption("--lp-mode"), **options))
        return runs[-1]

    with private_temp_dir() as folder:
        before = Snapshot(folder)
        yield start
        failures = _stop_all(runs)
        runs.clear()
        if request.node.stash.get(_HAS_FAILED, False):
            for failure in failures:  # often why the test has failed
                request.node.add_report_section("call", "failed node", failure.report or str(failure))
            return
        for failure in failures:
            raise failure
        before.assert_nothing_new(PATIENCE_S)


@pytest.fixture
def faults() -> Iterator[ModuleType]:
    """The module `lp_pipe.testing.faults`, for programs that `launched` launches in this test."""
    from lp_pipe.testing import faults

    with faults.enabled():
        yield faults


def _stop_all(runs: "list[Run]") -> "list[Any]":
    """Stop the programs; the failures of which the test does not know."""
    from lp_pipe.errors import NodeError
    from lp_pipe.testing import faults

    faults.heal_all()
    for run in runs:
        run.request_stop()
    failures = []
    for run in runs:
        run.stop()
        try:
            if not run.has_raised_failure:
                run.wait()
        except NodeError as error:
            failures.append(error)
    return failures
