"""Hosts that have a folder of their own in the place of the run's are named at the start."""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from lp_pipe.errors import Unavailable
from lp_pipe.launch.hosts.agent_messages import SeesFile
from lp_pipe.launch.hosts.host_files import local_modules, warn_of_hosts_apart
from lp_pipe.launch.supervision.peer import Peer


class Agent:
    """An agent that answers, or is gone."""

    def __init__(self, sees: Callable[[str], Any]) -> None:
        self._sees = sees

    def ask(self, question: SeesFile) -> "Future[bool]":
        answer: Future[bool] = Future()
        try:
            answer.set_result(self._sees(question.path))
        except Unavailable as error:
            answer.set_exception(error)
        return answer


def gone(path: str) -> bool:
    raise Unavailable("host 'h3' is lost")


def said(caplog: pytest.LogCaptureFixture, run_dir: Path, **sees: Callable[[str], Any]) -> list[str]:
    agents = cast("dict[str, Peer]", {name: Agent(one) for name, one in sees.items()})
    warn_of_hosts_apart(run_dir, agents)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_hosts_that_do_not_share_the_folder_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    # A resumed training began anew on such a host, and said nothing.
    here = Path.exists
    (text,) = said(caplog, tmp_path, h1=lambda path: here(Path(path)), h2=lambda path: False, h3=gone)
    assert text.startswith(f"{tmp_path}: the run's folder is not shared by h2: ")
    assert not [*tmp_path.iterdir()]


def test_nothing_is_said_of_hosts_that_do(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert said(caplog, tmp_path, h1=lambda path: Path(path).exists()) == []


def test_a_folder_that_cannot_be_written_to_is_for_others_to_say(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert said(caplog, tmp_path / "gone", h1=lambda path: False) == []


def test_packages_that_pip_has_put_into_a_folder_of_pythonpath_are_no_modules_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They traveled by value: cloudpickle itself did, without end, and torch would have.
    for folder, name in [("packages", "compat_installed"), ("own", "compat_own")]:
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(tmp_path / folder)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__file__ = str(tmp_path / folder / f"{name}.py")
    (tmp_path / "packages" / "compat_installed-1.0.dist-info").mkdir()
    names = {module.__name__ for module in local_modules()}
    assert "compat_own" in names and "compat_installed" not in names
