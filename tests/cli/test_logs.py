"""Log files of a run that may be another user's."""

import os
from pathlib import Path

import pytest

from lp_pipe.cli.errors import UsageError
from lp_pipe.cli.logs import log_files, without_control
from lp_pipe.telemetry.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return RunFolder(tmp_path / "run")


def test_lines_come_once_and_whole(folder: RunFolder) -> None:
    path = folder.logs / "node-0.log"
    path.write_text("one\ntw")
    (file,) = log_files(folder)
    assert (file.node, file.new_lines()) == ("node/0", ["one"])
    with path.open("a") as more:
        more.write("o\nend")
    assert file.new_lines() == ["two"]
    assert file.new_lines(with_unfinished=True) == ["end"]


@pytest.mark.parametrize("kind", ["link", "link to folder", "pipe"])
def test_only_plain_files_of_the_run_are_read(folder: RunFolder, tmp_path: Path, kind: str) -> None:
    # Root, who looks at the logs of another user's run, was shown any file.
    secret = tmp_path / "elsewhere" / "node-0.log"
    secret.parent.mkdir()
    secret.write_text("secret\n")
    if kind == "link":
        (folder.logs / "node-0.log").symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(folder.logs / "node-0.log")
    else:
        folder.logs.rmdir()
        folder.logs.symlink_to(secret.parent)
    (file,) = log_files(folder)
    with pytest.raises(UsageError, match=r"node-0\.log"):
        file.new_lines()


def test_a_terminal_is_not_controlled_by_what_a_node_printed() -> None:
    assert without_control("\x1b[31mred\x1b[0m\tplain") == "\x1b[31mred\x1b[0m\tplain"
    assert without_control("\x1b]0;title\x07 \x1b[2J\r\x9b1m") == "\\x1b]0;title\\x07 \\x1b[2J\\x0d\\x9b1m"
