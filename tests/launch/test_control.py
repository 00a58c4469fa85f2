"""A run that answers other processes, sends them its events, and leaves nothing behind."""

import json
import os
import stat
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.launch.run_records import RunRecord, entries, live_folder, read_record
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("warm_bare_template")

PATIENCE_S = 20.0


class Waiting:
    def is_up(self) -> bool:
        return True


def program() -> lp.Program:
    made = lp.Program("waiting")
    with made.group("nodes"):
        for _ in range(2):
            made.add_node(lp.CourierNode(Waiting))
    return made


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def only_run() -> RunRecord:
    (record,) = entries().values()
    return record


def asker(record: RunRecord) -> lp.CourierClient:
    return lp.CourierClient(record.control, call_timeout=PATIENCE_S, wait_for_ready=False)


def test_a_run_can_be_asked_and_stopped_by_whoever_finds_it(mode: str, tmp_path: Path) -> None:
    with lp.launch(program(), mode, run_dir=tmp_path / "out", listed=True) as run:
        record = only_run()
        assert (record.program, record.mode, record.run_dir) == ("waiting", mode, str(tmp_path / "out"))
        own = read_record(tmp_path / "out" / "run.json")
        assert own is not None and (own.control, own.pid, own.mark) == (record.control, record.pid, record.mark)
        control = asker(record)
        until(lambda: {row["state"] for row in run.status()["nodes"]} == {"running"})  # now they have their pids
        assert [row["pid"] for row in control.status()["nodes"]] == [row["pid"] for row in run.status()["nodes"]]
        assert [row["state"] for row in control.stop()["nodes"]] == ["stopped", "stopped"]
        run.wait(PATIENCE_S)
    assert entries() == {}
    assert json.loads((tmp_path / "out" / "run.json").read_text())["ended"] >= record.started
    assert not Path(record.socket_dir).exists()
    with pytest.raises(lp.Unavailable):
        asker(record).status()


def test_what_others_must_not_touch_is_private_whatever_the_umask(mode: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with lp.launch(program(), mode, run_dir=tmp_path / "out", listed=True):
            found = only_run()
            for folder in (Path(found.socket_dir), live_folder()):
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_stacks_can_be_asked_for(mode: str, tmp_path: Path) -> None:
    with lp.launch(program(), mode, run_dir=tmp_path, listed=True) as run:
        control = asker(only_run())
        assert run.client("nodes", 0).is_up()
        assert run.client("nodes", 1).is_up()
        assert "node nodes/1" in control.stacks()
        run.stop()


def test_unit_tests_in_thread_mode_do_not_pay_for_it(tmp_path: Path, no_leaks: None) -> None:
    with lp.launch(program(), "thread") as run:
        assert entries() == {}
        assert list(run.run_dir.iterdir()) == []
        run.stop()
    assert not run.run_dir.exists()  # a folder for each test piled up for ever


def test_a_run_that_cannot_be_listed_runs_all_the_same(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with lp.launch(program(), mode, run_dir=tmp_path / "out", listed=True) as run:
        run.stop()
    assert "cannot be found by `lp_pipe status`" in caplog.text
    assert not list(Path(os.environ["TMPDIR"]).glob("lp-*"))
