"""The work at the end of a node's process: forked nodes end as every Python process does."""

import atexit
import gzip
import logging
import multiprocessing
import signal
import threading
import time
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("without_torch")

KEPT: list[Any] = []  # holds objects until the process ends


class WritesWhenCollected:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def __del__(self) -> None:
        self._file.write("collected")
        self._file.close()


class WarnsWhenAskedForItsClass:
    """An object that warns as `torch.distributed.reduce_op` does."""

    def __getattribute__(self, name: str) -> Any:
        print(f"asked for {name}")
        return super().__getattribute__(name)


def _write_later(path: Path) -> None:
    time.sleep(0.2)
    path.write_text("late")


def _leave_work(folder: Path) -> None:
    pool = ThreadPoolExecutor(1)
    for index in range(3):
        pool.submit(_write_later, folder / f"pool{index}")
    threading.Thread(target=_write_later, args=(folder / "thread",)).start()
    multiprocessing.get_context("fork").Process(target=_write_later, args=(folder / "child",)).start()
    atexit.register((folder / "atexit").write_text, "exit function")
    log = (folder / "log").open("w")
    packed = gzip.open(folder / "packed.gz", "wt")  # noqa: SIM115 (left open on purpose)
    log.write("step,loss\n")
    packed.write("packed")
    archive = zipfile.ZipFile(folder / "archive.zip", "w")
    archive.writestr("member", "text")
    dead = weakref.proxy(WritesWhenCollected(folder / "proxied"))
    KEPT.extend([dead, log, packed, archive, pool])
    KEPT.extend([WritesWhenCollected(folder / "object"), WarnsWhenAskedForItsClass()])
    weakref.finalize(pool, (folder / "finalized").write_text, "finalizer")


def _keep_file_in_daemon(folder: Path) -> None:
    file = (folder / "daemon").open("w")
    file.write("kept by a frame")

    def hold_file() -> None:
        while not file.closed:
            time.sleep(0.01)

    threading.Thread(target=hold_file, daemon=True).start()


def test_node_ends_as_every_python_process_does(tmp_path: Path) -> None:
    program = lp.Program("end")
    folders = {"forked": tmp_path / "forked", "fresh": tmp_path / "fresh"}
    for name, folder in folders.items():
        folder.mkdir()
        with program.group(name, resources=lp.Resources(fresh_interpreter=name == "fresh")):
            program.add_node(lp.PyNode(_leave_work, folder))
    program.add_node(lp.PyNode(_keep_file_in_daemon, tmp_path), label="daemon")
    lp.launch(program, mode="process", run_dir=tmp_path / "run").wait(60)
    for folder in folders.values():
        assert [(folder / f"pool{index}").read_text() for index in range(3)] == ["late"] * 3
        assert (folder / "thread").read_text() == (folder / "child").read_text() == "late"
        assert (folder / "log").read_text() == "step,loss\n"
        assert gzip.open(folder / "packed.gz", "rt").read() == "packed"  # noqa: SIM115 (left open on purpose)
        assert zipfile.ZipFile(folder / "archive.zip").read("member") == b"text"
        assert [(folder / name).read_text() for name in ("atexit", "object", "finalized")] == [
            "exit function",
            "collected",
            "finalizer",
        ]
    assert (tmp_path / "daemon").read_text() == "kept by a frame"
    assert "asked for __class__" not in "".join(log.read_text() for log in (tmp_path / "run" / "logs").glob("*.log"))


def _run_for_ever() -> None:
    while True:
        time.sleep(0.05)


def _leave_endless_thread(path: Path, fails: bool) -> None:
    file = path.open("w")
    file.write("buffered")
    KEPT.append(file)
    threading.Thread(target=_run_for_ever, name="uploader").start()
    if fails:
        raise ValueError("no data")


def test_stop_waits_for_threads_within_the_grace_and_names_what_is_cut_off(tmp_path: Path) -> None:
    program = lp.Program("endless")
    program.add_node(lp.PyNode(_leave_endless_thread, tmp_path / "file", False), label="node")
    with lp.launch(program, mode="process", grace=0.3, run_dir=tmp_path / "run") as run:
        until(lambda: run.status()["node"][0]["state"] == "finished")
        with pytest.raises(TimeoutError):
            run.wait(0.2)
        log = run.log_path("node", 0)
        began = time.monotonic()
        run.stop()
    assert time.monotonic() - began < 5
    assert log is not None
    assert "'uploader'" in log.read_text()
    assert (tmp_path / "file").read_text() == "buffered"


def test_failed_node_waits_for_its_threads_within_the_grace(tmp_path: Path) -> None:
    program = lp.Program("endless")
    program.add_node(lp.PyNode(_leave_endless_thread, tmp_path / "file", True), label="node")
    run = lp.launch(program, mode="process", grace=0.3, run_dir=tmp_path / "run")
    with pytest.raises(lp.NodeError, match="no data"):
        run.wait(30)
    log = run.log_path("node", 0)
    assert log is not None
    assert "'uploader'" in log.read_text()
    assert (tmp_path / "file").read_text() == "buffered"


def _fail_at_the_end() -> None:
    atexit.register(logging.getLogger("last").warning, "the last exit function")
    atexit.register(_run_for_ever)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_exit_function_that_does_not_end_keeps_no_other_from_running(tmp_path: Path) -> None:
    program = lp.Program("endless")
    program.add_node(lp.PyNode(_fail_at_the_end), label="node")
    with lp.launch(program, mode="process", grace=0.3, run_dir=tmp_path / "run") as run:
        until(lambda: run.status()["node"][0]["state"] == "finished")
        log = run.log_path("node", 0)
        run.stop()
    assert log is not None
    assert "in _run_for_ever" in log.read_text()
    assert "the last exit function" in log.read_text()


def _launch_program_of_its_own() -> None:
    program = lp.Program("inner")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    KEPT.append(lp.launch(program, mode="thread"))


def test_stop_reaches_the_programs_that_a_node_has_launched(tmp_path: Path) -> None:
    program = lp.Program("outer")
    program.add_node(lp.PyNode(_launch_program_of_its_own), label="node")
    with lp.launch(program, mode="process", grace=60.0, run_dir=tmp_path / "run") as run:
        until(lambda: run.status()["node"][0]["state"] == "finished")
        began = time.monotonic()
        run.stop()
    assert time.monotonic() - began < 30
