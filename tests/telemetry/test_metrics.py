"""Metrics: when they cannot be kept, training goes on, and a warning comes once."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lp_pipe as lp
from lp_pipe.telemetry.metrics import MetricsLog, as_numbers
from lp_pipe.telemetry.sink_threads import MetricsRecord
from tests.checkpoint import disks

needs_disks = pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not() or "there are disks")


GONE = os.strerror(errno.ENOENT)


def lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    file = os.open(folder / "filling", os.O_CREAT | os.O_WRONLY)
    for size in (4096, 1):
        try:
            while True:
                os.write(file, bytes(size))
        except OSError:
            continue
    os.close(file)
    return folder / "filling"


@needs_disks
def test_a_full_disk_costs_whole_lines_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        disks.mount_small(tmp_path, "64k")
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.record("a/0", {"x": 1.0}, 0)
        filling = fill(tmp_path)
        for step in range(1, 100):  # more than what is left of the file's last block
            log.record("a/0", {"x" * 100: 1.0}, step)
        kept = lines(tmp_path / "metrics.jsonl")
        assert kept == list(range(len(kept)))
        assert len(kept) < 50
        filling.unlink()
        log.record("a/0", {"x": 1.0}, 100)
        log.close()
        assert lines(tmp_path / "metrics.jsonl") == [*kept, 100]

    disks.with_own_mounts(body)
    assert [record.getMessage().partition(" to ")[0] for record in caplog.records] == ["metrics cannot be written"]
    assert "No space left on device" in caplog.text


def test_a_folder_that_is_deleted_is_said_and_one_that_comes_again_is_written_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The records went to the deleted file, without a word."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    log = MetricsLog(path)
    log.record("a/0", {"x": 1.0}, 0)
    shutil.rmtree(path.parent)
    log.record("a/0", {"x": 1.0}, 1)
    [message] = caplog.messages
    assert f"{path} " in message and message.endswith(f"[Errno 2] {GONE}: '{path}'")
    path.parent.mkdir()  # as a checkpoint does
    log.record("a/0", {"x": 1.0}, 2)
    log.close()
    assert lines(path) == [2]


def test_a_folder_that_is_gone_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    log.record("a/0", {"x": 1.0}, 0)
    log.close()
    assert "metrics cannot be written" in caplog.text


@pytest.mark.usefixtures("warm_bare_template")
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_sink_that_raises_ends_no_node(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def sink(record: MetricsRecord) -> None:
        seen.append(record.step)
        raise ValueError("nobody to show it to")

    def node() -> None:
        for step in range(3):
            lp.log_metrics({"x": 1.0}, step)

    program = lp.Program("sink")
    program.add_node(lp.PyNode(node), label="node")
    run = lp.launch(program, mode, run_dir=tmp_path, metrics_sinks=(sink,))
    run.wait(30)
    assert seen == [0, 1, 2]
    assert lines(tmp_path / "metrics.jsonl") == [0, 1, 2]
    assert caplog.text.count("nobody to show it to") == 1


@pytest.mark.usefixtures("warm_bare_template")
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_program_ends_whatever_its_metrics_file_says_at_the_end(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def close(log: MetricsLog) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsLog, "close", close)
    program = lp.Program("end")
    program.add_node(lp.PyNode(lambda: None), label="node")
    lp.launch(program, mode, run_dir=tmp_path).wait(30)
    assert "at the end of the program" in caplog.text


def test_what_has_happened_at_a_step_is_between_the_numbers_and_no_sink_is_told(tmp_path: Path) -> None:
    seen: list[MetricsRecord] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", (seen.append,))
    log.record("a/0", {"x": 1.0}, 7)
    log.record_event("a/0", "resumed", 5)
    log.record("a/0", {"x": 1.0}, 6)
    log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record.get("event"), record["step"]) for record in records] == [(None, 7), ("resumed", 5), (None, 6)]
    assert [record.step for record in seen] == [7, 6]


WITHIN_S = 30


def test_numbers_of_numpy_and_torch_are_logged_in_thread_mode_as_in_processes(no_leaks: None, tmp_path: Path) -> None:
    # A loss of np.float32 ended the node in thread mode: "not JSON serializable".
    def log() -> None:
        lp.log_metrics({"a": np.float32(1.5), "b": torch.tensor(2.5), "c": np.array(3), "d": True}, step=np.int64(4))

    program = lp.Program("numbers")
    program.add_node(lp.PyNode(log), label="node")
    lp.launch(program, "thread", run_dir=tmp_path).wait(WITHIN_S)
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["step"], record["values"]) == (4, {"a": 1.5, "b": 2.5, "c": 3.0, "d": 1.0})


@pytest.mark.parametrize(
    ("metrics", "step", "message"),
    [
        ({"loss": "0.5"}, None, "'loss' is of type str"),
        ({"loss": None}, None, "'loss' is of type NoneType"),
        ({"loss": torch.ones(3)}, None, "'loss' is of type Tensor"),
        ({"loss": 10**400}, None, "'loss' is of type int"),
        ("loss", None, r"log_metrics\('loss'\)"),
        ({1: 2.0}, None, "name 1 "),
        ({"loss": 1.0}, 1.5, "step=1.5"),
    ],
)
def test_what_is_no_number_is_named(metrics: Any, step: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_numbers(metrics, step)
