"""Runs leave a note of themselves, by which others find them and see whether they are still there."""

import errno
import json
import os
import socket
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lp_pipe.launch import run_records
from lp_pipe.launch.run_records import Entry, Outcome, RunRecord, dead_entries, entries, live_folder, read_record
from lp_pipe.process_tree import start_time


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    """A run of this very process."""
    (tmp_path / "out").mkdir()
    return RunRecord(
        program="demo",
        mode="process",
        run_dir=str(tmp_path / "out"),
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_started=start_time(os.getpid()),
        started=1000.0,
        control="unix:/tmp/lp-x/control",
        socket_dir="/tmp/lp-x",
    )


def test_a_run_is_among_the_live_ones_until_it_ends(record: RunRecord, tmp_path: Path) -> None:
    entry = Entry(record)
    assert list(entries().values()) == [record]
    assert (record.name, record.is_live) == ("out", True)
    entry.end(1060.0, Outcome("failed", 1, "node a/0: ValueError"))
    assert entries() == {}
    ended = read_record(tmp_path / "out" / "run.json")
    assert ended == replace(record, ended=1060.0, outcome="failed", exit_status=1, failure="node a/0: ValueError")
    assert not ended.is_live


def test_only_this_user_can_look_into_the_folder(record: RunRecord) -> None:
    live_folder().mkdir(parents=True, mode=0o755)
    Entry(record)
    assert stat.S_IMODE(live_folder().stat().st_mode) == 0o700


def test_a_pid_that_another_process_has_by_now_is_not_taken_for_the_run(record: RunRecord) -> None:
    assert not replace(record, pid_started=record.pid_started - 1).is_live


def test_a_killed_launcher_is_dead_also_as_a_zombie(record: RunRecord) -> None:
    child = subprocess.Popen(["sleep", "60"])
    killed = replace(record, pid=child.pid, pid_started=start_time(child.pid))
    assert killed.is_live
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert not killed.is_live
    child.wait()
    assert not killed.is_live


def test_a_run_that_ends_in_order_just_after_its_entry_was_read_has_left_nothing(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lp_pipe ps` said that a killed run had left something behind, and `clean` that its launcher was dead."""

    def end_now(pid: int) -> int:
        entry.end(1060.0, Outcome("failed", 1, "node a/0: ValueError"))
        return 0

    entry = Entry(record)
    monkeypatch.setattr(run_records, "start_time", end_now)
    assert dead_entries() == {}


def test_a_run_that_cannot_be_listed_leaves_no_word_that_it_runs(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full home: its own folder said for ever that the run goes on, and took no other run of the same process.

    What it said of an earlier run stays, or `--resume` would not find that again.
    """

    def no_room(path: Path, record: RunRecord) -> None:
        if path.parent == live_folder():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, record)

    write = run_records._write
    own = record.folder.record
    for earlier in (None, replace(record, ended=1060.0)):
        if earlier is not None:
            write(own, earlier)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(run_records, "_write", no_room)
            Entry(record)
        assert read_record(own) == earlier


def test_entries_of_other_hosts_and_what_is_no_entry_are_left_alone(record: RunRecord) -> None:
    Entry(replace(record, host="elsewhere"))
    (live_folder() / "half.json").write_text('{"program": "de')
    (live_folder() / "other.json").write_text(json.dumps({"of": "a later version"}))
    assert entries() == {}
    assert len(list(live_folder().glob("*.json"))) == 3
