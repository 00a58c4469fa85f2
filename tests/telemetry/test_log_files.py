"""The files with what the nodes print."""

import io
import os
import shutil
from pathlib import Path

import pytest

from lp_pipe.telemetry.log_files import LogFiles, log_path


def test_every_node_has_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = LogFiles(tmp_path)
    files.write("trainer/0", False, [b"one", b"two"])
    files.close()
    assert log_path(tmp_path, "trainer/0").read_text() == "one\ntwo\n"
    assert capsys.readouterr().out == "[trainer/0] one\n[trainer/0] two\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_full_disk_is_said_once_and_the_lines_still_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """They used to be missing in the file without a word."""
    log_path(tmp_path, "trainer/0").symlink_to("/dev/full")
    files = LogFiles(tmp_path)
    for line in (b"one", b"two"):
        files.write("trainer/0", False, [line])
    files.close()
    assert capsys.readouterr().out == "[trainer/0] one\n[trainer/0] two\n"
    (said,) = caplog.messages
    assert "not all that the nodes print" in said and "No space left on device" in said and str(tmp_path) in said


@pytest.mark.parametrize("label", ["a\0b", "a\ud800b"])
def test_a_label_that_can_name_no_file_costs_its_file_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], label: str
) -> None:
    # It ended the thread that writes what all nodes print.
    files = LogFiles(tmp_path)
    files.write(f"{label}/0", True, [b"one"])
    files.write("trainer/0", False, [b"two"])
    files.close()
    assert capsys.readouterr().out == "[trainer/0] two\n"
    assert log_path(tmp_path, "trainer/0").read_text() == "two\n"
    assert "not all that the nodes print" in caplog.text


def test_a_deleted_file_begins_anew_and_a_deleted_folder_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What came later went to the deleted file, without a word."""
    path = log_path(tmp_path / "logs", "trainer/0")
    files = LogFiles(path.parent)
    files.write("trainer/0", False, [b"one"])
    path.unlink()
    files.write("trainer/0", False, [b"two"])
    assert path.read_text() == "two\n"
    shutil.rmtree(path.parent)
    files.write("trainer/0", False, [b"three"])
    files.close()
    (said,) = caplog.messages
    assert "not all that the nodes print" in said and str(path) in said


def test_a_launcher_without_streams_keeps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the nodes' pipes ended, and every node that printed much stood still."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    files = LogFiles(tmp_path)
    for is_stderr in (False, True):
        files.write("trainer/0", is_stderr, [b"one"])
    files.flush()
    files.close()
    assert log_path(tmp_path, "trainer/0").read_text() == "one\none\n"


def test_a_terminal_without_a_letter_gets_the_line_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lines that were read at a time with it were missing, without a word."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", terminal)
    files = LogFiles(tmp_path)
    files.write("größe/0", False, ["日本".encode(), b"two"])
    files.flush()
    files.close()
    assert terminal.buffer.getvalue() == "[größe/0] \\u65e5\\u672c\n[größe/0] two\n".encode("latin-1")
