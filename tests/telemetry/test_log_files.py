"""The files with what the nodes print."""

import io
import os
import shutil
from pathlib import Path

import pytest

from lp_pipe.telemetry.log_files import LogFiles
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.terminal_lines import Unfinished

NODES = ["trainer/0"]


def log_of(folder: Path, node_id: str = "trainer/0") -> Path:
    return RunFolder(folder).node_logs()[node_id]


def test_every_node_has_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = LogFiles(RunFolder(tmp_path), NODES)
    files.write("trainer/0", False, [b"one", b"two"])
    files.close()
    assert log_of(tmp_path).read_text() == "one\ntwo\n"
    assert capsys.readouterr().out == "[trainer/0] one\n[trainer/0] two\n"


def test_a_settled_prompt_is_in_the_file_and_its_line_goes_on_behind_it(tmp_path: Path) -> None:
    files = LogFiles(RunFolder(tmp_path), NODES)
    files.show("trainer/0", False, Unfinished(b"Password", False))
    files.show("trainer/0", False, Unfinished(b"Password: ", True))
    assert log_of(tmp_path).read_text() == "Password: "
    files.write("trainer/0", False, [b"Password: ok"])
    files.show("trainer/0", False, Unfinished(b"half", True))
    files.write("trainer/0", True, [b"other stream"])
    files.write("trainer/0", False, [b"half and half"])
    files.close()
    assert log_of(tmp_path).read_text() == "Password: ok\nhalf\nother stream\nhalf and half\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_full_disk_is_said_once_and_the_lines_still_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the lines were silently missing in the file."""
    files = LogFiles(RunFolder(tmp_path), NODES)
    (tmp_path / "logs" / "trainer-0.log").symlink_to("/dev/full")
    for line in (b"one", b"two"):
        files.write("trainer/0", False, [line])
    files.close()
    assert capsys.readouterr().out == "[trainer/0] one\n[trainer/0] two\n"
    (said,) = caplog.messages
    assert "No space left on device" in said and str(tmp_path) in said


def test_every_label_has_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels a/b and a-b shared a file; a long one, or one with a NUL, had none."""
    labels = ["a/b", "a-b", "a_b", "L" * 252, "A", "a", "..", ".", ".x", "-x", "a\0b", "a\ud800b", "größe", "e\u0301"]
    nodes = [f"{label}/{index}" for label in labels for index in (0, "1.0")]
    files = LogFiles(RunFolder(tmp_path), nodes)
    for node in nodes:
        files.write(node, False, [repr(node).encode()])
    files.close()
    found = RunFolder(tmp_path).node_logs()
    assert {node: path.read_text() for node, path in found.items()} == {node: f"{node!r}\n" for node in nodes}
    assert len({path.name.casefold() for path in found.values()}) == len(nodes)
    assert found["a-b/0"].name == "a-b-0.log"
    assert found["größe/1.0"].name == "größe-1.0.log"
    assert {path.parent for path in found.values()} == {tmp_path / "logs"}


def test_files_of_an_earlier_run_in_the_folder_are_still_known(tmp_path: Path) -> None:
    for nodes in (["a/b/0", "c/0"], ["d:e/0"]):
        files = LogFiles(RunFolder(tmp_path), nodes)
        for node in nodes:
            files.write(node, False, [b"one"])
        files.close()
    assert set(RunFolder(tmp_path).node_logs()) == {"a/b/0", "c/0", "d:e/0"}


def test_a_deleted_file_begins_anew_and_a_deleted_folder_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: later lines silently went to the deleted file."""
    path = tmp_path / "logs" / "trainer-0.log"
    files = LogFiles(RunFolder(tmp_path), NODES)
    files.write("trainer/0", False, [b"one"])
    path.unlink()
    files.write("trainer/0", False, [b"two"])
    assert path.read_text() == "two\n"
    shutil.rmtree(path.parent)
    files.write("trainer/0", False, [b"three"])
    files.close()
    (said,) = caplog.messages
    assert str(path) in said


def test_a_launcher_without_streams_keeps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the nodes' pipes ended, and every node that printed much stood still."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    files = LogFiles(RunFolder(tmp_path), NODES)
    for is_stderr in (False, True):
        files.write("trainer/0", is_stderr, [b"one"])
    files.flush()
    files.close()
    assert log_of(tmp_path).read_text() == "one\none\n"


def test_a_terminal_without_a_letter_gets_the_line_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all lines that were read together with it were silently missing."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", terminal)
    files = LogFiles(RunFolder(tmp_path), ["größe/0"])
    files.write("größe/0", False, ["日本".encode(), b"two"])
    files.flush()
    files.close()
    assert terminal.buffer.getvalue() == "[größe/0] \\u65e5\\u672c\n[größe/0] two\n".encode("latin-1")
