"""A module that a host lacks and this one has: the error says what to do."""

import socket
from pathlib import Path

import pytest

from lp_pipe.errors import NodeError
from lp_pipe.launch.report import failure_report, missing_module_hint


def test_a_module_of_this_host_is_to_be_installed_or_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    said = missing_module_hint("ModuleNotFoundError: No module named 'only_here.part'", "h2")
    assert said == "only_here is found here, but not on h2: install it there, or send your sources with --sync=DIR"
    error = NodeError("trainer", 0, "ModuleNotFoundError", "No module named 'only_here'")
    assert failure_report(error, host="h2", advice=said).splitlines()[:2] == [
        "node trainer/0 on h2 failed: ModuleNotFoundError: No module named 'only_here'",
        f"  {said}",
    ]


def test_a_file_of_this_host_is_to_be_sent_or_shared(tmp_path: Path) -> None:
    (tmp_path / "data.txt").touch()
    said = missing_module_hint(f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/data.txt'", "h2")
    assert said.startswith("it is here, but not on h2: ")


@pytest.mark.parametrize(
    "summary",
    [
        "ModuleNotFoundError: No module named 'nowhere_at_all'",
        "FileNotFoundError: no file: '/no/where'",
        "ValueError: x",
    ],
)
def test_what_this_host_lacks_too_is_no_matter_of_hosts(summary: str) -> None:
    assert missing_module_hint(summary, "h2") == ""


def test_on_this_host_there_is_nothing_to_send() -> None:
    assert missing_module_hint("ModuleNotFoundError: No module named 'json'", socket.gethostname()) == ""
