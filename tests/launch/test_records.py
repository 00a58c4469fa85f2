"""The files that a run leaves for people and for other programs to read."""

import json
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.graph import GraphView
from lp_pipe.launch.run_records import record_in
from lp_pipe.telemetry.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("warm_bare_template")

PATIENCE_S = 30.0


class Server:
    def add(self, a: int) -> int:
        return a + 1


class Trainer:
    """Fails once, then saves a checkpoint."""

    def __init__(self, server: Any, mark: Path) -> None:
        self.server = server
        self.mark = mark

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("there is nothing to load")

    def run(self) -> None:
        self.server.add(1)
        if not self.mark.exists():
            self.mark.touch()
            raise ValueError("the first time")
        Checkpoints({"trainer": self}).save(7)
        lp.stop()


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(run_dir).events.read_text().splitlines()]


def test_events_tell_the_life_of_every_node(mode: str, tmp_path: Path) -> None:
    program = lp.Program("demo")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("trainer", on_failure="restart", max_restarts=1):
        program.add_node(lp.PyClassNode(Trainer, server, tmp_path / "mark"))
    lp.launch(program, mode, run_dir=tmp_path / "run").wait(PATIENCE_S)
    events = events_of(tmp_path / "run")
    assert all(event["time"] > 1e9 for event in events)

    def told_of(node: str | None) -> list[str]:
        return [event["event"] for event in events if event["node"] == node]

    assert told_of(None) == ["start", "end"]
    assert told_of("trainer/0") == ["start", "death", "restart", "start", "checkpoint", "end"]
    assert told_of("server/0") == ["start", "ready", "end"]
    (death,) = [event for event in events if event["event"] == "death"]
    assert death["how"] == "ValueError: the first time"
    (saved,) = [event for event in events if event["event"] == "checkpoint"]
    assert (saved["step"], Path(saved["path"]).name) == (7, "step-00000007")
    assert (events[0]["mode"], events[-1]["outcome"], events[-1]["exit_status"]) == (mode, "done", 0)
    graph = json.loads(RunFolder(tmp_path / "run").graph.read_text())
    assert graph == json.loads(GraphView.of(program, mode).to_json())


def failing() -> None:
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("function", "outcome", "failure"),
    [
        (int, "done", ""),
        (lp.wait_for_stop, "stopped", ""),
        (failing, "failed", "node node/0 failed: ValueError: broken"),
    ],
)
def test_the_record_says_how_a_run_was_launched_and_ended(
    function: Any, outcome: str, failure: str, mode: str, tmp_path: Path
) -> None:
    program = lp.Program("demo")
    program.add_node(lp.PyNode(function), label="node")
    run = lp.launch(program, mode, run_dir=tmp_path)
    if outcome == "stopped":
        run.stop()
    else:
        with pytest.raises(lp.NodeError) if failure else pytest.MonkeyPatch.context():
            run.wait(PATIENCE_S)
    record = record_in(tmp_path)
    assert record is not None
    assert (record.program, record.mode, record.cwd) == ("demo", mode, str(Path.cwd()))
    assert (record.outcome, record.exit_status, record.failure) == (outcome, 1 if failure else 0, failure)
    assert record.ended is not None and record.ended >= record.started


def test_the_record_names_the_exception_that_ended_the_with_block(tmp_path: Path) -> None:
    program = lp.Program("demo")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with pytest.raises(KeyError), lp.launch(program, "thread", run_dir=tmp_path):
        raise KeyError("weights")
    record = record_in(tmp_path)
    assert record is not None
    assert (record.outcome, record.exit_status, record.failure.count("KeyError: 'weights'")) == ("failed", 1, 1)
    assert record.versions["python"].startswith("3.") and record.versions["lp_pipe"]
    assert record.argv and record.flags["target"] == ""
    assert record.parent is None


def test_a_run_in_the_folder_of_an_ended_one_names_it(tmp_path: Path, no_leaks: None) -> None:
    program = lp.Program("demo")
    program.add_node(lp.PyNode(int), label="node")
    for _ in range(2):
        first = record_in(tmp_path)
        lp.launch(program, "thread", run_dir=tmp_path).wait(PATIENCE_S)
    second = record_in(tmp_path)
    assert first is not None and second is not None
    assert second.parent == first.as_parent()
    assert [event["event"] for event in events_of(tmp_path) if event["node"] is None] == ["start", "end"] * 2


def test_a_record_of_a_later_version_can_be_read(tmp_path: Path, no_leaks: None) -> None:
    program = lp.Program("demo")
    program.add_node(lp.PyNode(int), label="node")
    lp.launch(program, "thread", run_dir=tmp_path).wait(PATIENCE_S)
    file = RunFolder(tmp_path).record
    file.write_text(json.dumps({**json.loads(file.read_text()), "of_a_later_version": 1}))
    assert record_in(tmp_path) is not None


def meet() -> None:
    lp.context().services.meet("workers", 0, b"").result(PATIENCE_S)


def test_an_event_says_which_nodes_of_a_group_work_together(mode: str, tmp_path: Path) -> None:
    program = lp.Program("demo")
    with program.group("workers"):
        for _ in range(2):
            program.add_node(lp.PyNode(meet))
    lp.launch(program, mode, run_dir=tmp_path).wait(PATIENCE_S)
    (event,) = [event for event in events_of(tmp_path) if event["event"] == "membership"]
    assert event["node"] is None
    assert (event["group"], event["generation"], event["members"]) == ("workers", 0, ["workers/0", "workers/1"])
