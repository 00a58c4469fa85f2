"""Give every test process one compute thread and no hypothesis deadline; launch programs so that leaks are found."""

import os
import resource

# Read when torch or numpy is first imported, so it is set here, before any test module. Child processes inherit it:
# two xdist workers that each start several nodes would otherwise ask for cores × nodes threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where FORCE_COLOR is set, as CI services do, Python 3.13 colours the tracebacks of the scripts that tests read.
os.environ["PYTHON_COLORS"] = "0"

import contextlib
import gc
import importlib.util
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from lp_pipe.connections import credentials
from lp_pipe.launch.plan.hardware import this_host
from lp_pipe.launch.processes import template
from lp_pipe.testing import assert_no_leaks

# A shell that starts tests in the background has them ignore Ctrl+C, and so would every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# With nohup they would ignore SIGHUP; what has a handler here is as by default in the programs that are started.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Two test processes share two cores: the time one example takes says nothing.
settings.register_profile("lp_pipe", deadline=None)
settings.load_profile("lp_pipe")

IS_WITHOUT_TORCH = importlib.util.find_spec("torch") is None
collect_ignore = ["channels"] if IS_WITHOUT_TORCH else []  # its conftest imports torch
Script = Callable[[str], "subprocess.Popen[str]"]


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs: stages would take them, and the plain loops that they are compared with compute on the CPU."""
    on_gpus = Path(__file__).parent / "gpu"
    are_on_gpus = all(Path(argument.split("::")[0]).resolve().is_relative_to(on_gpus) for argument in config.args)
    if this_host().gpus and not are_on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, pytest.CollectReport]:
    """Skip modules that import torch where it is not installed, as in `make test-python`."""
    report: pytest.CollectReport = yield
    if report.failed and IS_WITHOUT_TORCH and "No module named 'torch'" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, "Skipped: torch is not installed")
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector leave alone what is there from now on to the end: torch, and all tests.

    Checks for leaks collect garbage, which takes 0.2 s with 300,000 objects, thousands of times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _state_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["LP_PIPE_RUNS"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Restore the level of logging: nodes of later tests take it over, and would not say what these wait for."""
    root = logging.getLogger()
    level, disabled, loggers = (
        root.level,
        root.manager.disable,
        [logging.getLogger(name) for name in ("lp_pipe", "absl")],
    )
    levels = [(logger, logger.level, logger.disabled) for logger in loggers]
    yield
    root.setLevel(level)
    logging.disable(disabled)
    for logger, own_level, is_disabled in levels:
        logger.setLevel(own_level)
        logger.disabled = is_disabled


@pytest.fixture
def socket_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give this test's programs a short folder for sockets, whose paths have at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run_credentials() -> Iterator[credentials.Credentials]:
    """Let this process listen and connect over TCP, with credentials of its own."""
    generated = credentials.generate_credentials()
    credentials.use_credentials(generated)
    yield generated
    credentials.use_credentials(None)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start in 0.2 s: the template does not import torch, though other tests of this process have."""
    monkeypatch.setattr(template, "_WORTH_PRELOADING", ())


@pytest.fixture(scope="session")
def _warm_templates() -> Iterator[template.WarmTemplates]:
    with contextlib.closing(template.WarmTemplates()) as templates:
        yield templates


@pytest.fixture
def warm_template(_warm_templates: template.WarmTemplates) -> Iterator[None]:
    """Fork the processes of all tests that ask for this from one template, which imports torch once."""
    with _warm_templates.used():
        _warm_templates.warm_up()  # now, so that the test does not leave it behind
        yield


@pytest.fixture(scope="session")
def _warm_bare_templates() -> Iterator[template.WarmTemplates]:
    with contextlib.closing(template.WarmTemplates()) as templates:
        yield templates


@pytest.fixture
def warm_bare_template(without_torch: None, _warm_bare_templates: template.WarmTemplates) -> Iterator[None]:
    """Fork the processes of all tests that ask for this from one template without torch.

    A template takes half a second of CPU time. That each launch starts its own is tested in tests/launch.
    """
    with _warm_bare_templates.used():
        _warm_bare_templates.warm_up()
        yield


@pytest.fixture
def own_templates(warm_bare_template: None) -> Iterator[None]:
    """Let each launch start its template after all, for a test of several at a time or in another environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_warm", [])
        yield


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest, without_torch: None) -> Iterator[None]:
    """Assert after the test that nothing is left which was not there before."""
    if "warm_bare_template" in request.fixturenames:  # before, even if the test lists it after this one
        request.getfixturevalue("warm_bare_template")
    with assert_no_leaks():
        yield


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Let this process open as many descriptors as it may: thousands of connections have two ends here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=os.environ.get("LP_PIPE_TEST_MODES", "thread,process").split(","))
def mode(request: pytest.FixtureRequest, no_leaks: None) -> str:
    """Every launch mode: one test body must hold in all of them.

    `make test-multihost` sets LP_PIPE_TEST_MODES=multi_host: an agent takes longer to start than most of these tests.
    """
    return str(request.param)


@pytest.fixture
def script(tmp_path: Path, socket_home: Path) -> Iterator[Script]:
    """Start Python source as a script of its own, in a session of its own, with its output piped."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> "subprocess.Popen[str]":
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, "-u", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
