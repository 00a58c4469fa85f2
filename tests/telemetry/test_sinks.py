"""Sinks get every record in order, in threads of their own; what they leave out is counted and said."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.telemetry import sink_threads
from lp_pipe.telemetry.metrics import MetricsLog
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.telemetry.sink_threads import MetricsRecord, RunSink, SinkRun

WITHIN_S = 30


def train() -> None:
    for step in range(5):
        lp.log_metrics({"loss": 1 / (step + 3), "a/b time": float("nan"), "big": 1e300}, step=step)
    lp.log_metrics({"unnumbered": -2.5})


def test_tensorboard_reads_what_metrics_jsonl_has(mode: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program = lp.Program("demo")
    for label in ("trainer", "../odd label"):
        program.add_node(lp.PyNode(train), label=label)
    lp.launch(program, mode, run_dir=tmp_path, metrics_sinks=[lp.sinks.tensorboard()]).wait(WITHIN_S)
    folders = sorted(RunFolder(tmp_path).tensorboard.iterdir())
    assert [folder.name for folder in folders if "~" not in folder.name] == ["trainer-0"]
    assert len(folders) == 2 and len(list(folders[1].iterdir())) == 1
    found = EventAccumulator(str(tmp_path / "tensorboard" / "trainer-0"))
    found.Reload()
    said: dict[str, list[tuple[int, Any]]] = {}
    for line in RunFolder(tmp_path).metrics.read_text().splitlines():
        record = json.loads(line)
        for name, value in record["values"].items() if record["node"] == "trainer/0" else ():
            said.setdefault(name, []).append((record["step"] or 0, float(value)))
    assert found.Tags()["scalars"] == list(said)
    for name, values in said.items():
        with np.errstate(over="ignore"):  # TensorBoard's numbers have 32 bits
            expected = np.array([value for _, value in values]).astype(np.float32)
        assert np.array_equal(expected, [scalar.value for scalar in found.Scalars(name)], equal_nan=True)
        assert [step for step, _ in values] == [scalar.step for scalar in found.Scalars(name)]


def test_tensorboard_has_the_command_and_the_flags(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    sink = lp.sinks.tensorboard()
    sink.begin(SinkRun(RunFolder(tmp_path), "demo", ("lp_pipe", "launch", "x.py"), ("--lr=0.1", "--opt=adam", "-v")))
    sink(MetricsRecord(1.0, "a/0", -1, {"x": 1.0}))
    sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard" / "a-0"))
    found.Reload()
    (text,) = found.Tensors("lp_pipe/command")
    assert text.tensor_proto.string_val[0] == b"lp_pipe launch x.py"
    (content,) = found.PluginTagToContent("hparams").values()
    parameters = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (parameters["lr"].number_value, parameters["opt"].string_value) == (0.1, "adam")
    assert [scalar.step for scalar in found.Scalars("x")] == [-1]


def test_tensorboard_has_the_programs_graph(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program = lp.Program("demo")
    server = program.add_node(lp.CourierNode(dict), label="odd label")
    with program.group("users"):
        for _ in range(2):
            program.add_node(lp.PyNode(lambda server: lp.log_metrics({"x": 1.0}), server))
    with lp.launch(program, "thread", run_dir=tmp_path, metrics_sinks=[lp.sinks.tensorboard()]):
        pass
    folders = [EventAccumulator(str(path)).Reload() for path in RunFolder(tmp_path).tensorboard.iterdir()]
    (graph,) = [folder.Graph() for folder in folders if folder.Tags()["graph"]]
    nodes = {node.name: node for node in graph.node}
    assert sorted(nodes) == ["odd_label/0", "users/0", "users/1"]
    assert nodes["odd_label/0"].op == "CourierNode" and nodes["odd_label/0"].attr["runs"].s == b"dict"
    assert list(nodes["odd_label/0"].input) == ["users/0", "users/1"] and not nodes["users/0"].input


def test_a_sink_that_hangs_delays_nothing_and_what_it_missed_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sink_threads, "_LAST_RECORDS_S", 0.2)
    hanging = threading.Event()
    other: list[int | None] = []
    log = MetricsLog(
        tmp_path / "metrics.jsonl", [lambda record: hanging.wait(), lambda record: other.append(record.step)]
    )
    began = time.monotonic()
    for step in range(10_500):
        log.record("a/0", {"x": 1.0}, step)
    assert time.monotonic() - began < 10  # and not for ever
    log.close()
    hanging.set()
    assert other == list(range(10_500))
    (message,) = caplog.messages
    assert "10500 records" in message and str(tmp_path / "metrics.jsonl") in message
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10_500


class Failing(RunSink):
    """Cannot open, then takes only odd steps."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, run: SinkRun) -> None:
        self.calls.append(run.program)
        if len(self.calls) == 1:
            raise OSError("not yet")

    def __call__(self, record: MetricsRecord) -> None:
        if record.step is not None and record.step % 2:
            self.calls.append(record.step)
        else:
            raise ValueError(record.step)

    def close(self) -> None:
        self.calls.append("closed")


def test_failures_are_counted_and_the_sink_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Failing()
    log = MetricsLog(tmp_path / "metrics.jsonl", [sink], SinkRun(RunFolder(tmp_path), "demo"))
    for step in range(6):
        log.record("a/0", {"x": 1.0}, step)
    log.close()
    assert sink.calls == ["demo", "demo", 1, 3, 5, "closed"]
    first, last = caplog.messages
    assert "not yet" in first and "3 records" in last
