"""A stage that computes slowly is reported with its numbers: in the log, in the metrics, and to clients that ask."""

import contextlib
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.conductor.stragglers import Stragglers
from lp_pipe.pipeline.config import Ranks
from lp_pipe.pipeline.layers.model_names import layer_names
from lp_pipe.pipeline.protocol import GetInfo, Report, WorkerInfo
from tests.pipeline.plain_loop import D, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([4])


class TakesTime(nn.Module):
    """A layer that takes some seconds for each forward of training."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_stage_that_is_slower_than_planned_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: str
) -> None:
    layers = [nn.Linear(D, D), nn.Linear(D, D), TakesTime(0.004)]
    names = layer_names(layers)
    stages = pp.PlannedStage((names[0],), 1, 0.050), pp.PlannedStage((*names[1:],), 1, 0.001)
    program = lp.Program("slow")
    options = {"stages": pp.Plan(stages, 0.050), "schedule": schedule, "microbatches": 2}
    handle = pp.add_pipeline(program, pp.Model(layers, squared_error, sgd), **options)  # type: ignore[arg-type]
    with lp.launch(program, "thread", run_dir=tmp_path) as run:
        pipeline: pp.PipelineClient = run.client(handle)
        assert pipeline.stragglers() == []
        for _ in range(30):
            pipeline.step(BATCHES[0])
        (straggler,) = pipeline.stragglers()
    assert (straggler.node, straggler.host, straggler.stages) == ("stages/1", socket.gethostname(), (1,))
    assert straggler.expected_seconds == 0.001
    assert straggler.measured_seconds >= 0.004
    told = [record.getMessage() for record in caplog.records if "straggler" in record.getMessage()]
    assert told == [f"straggler: {straggler}, after step {straggler.since}"]
    assert f"stages/1 on {socket.gethostname()} (stage 1, replica 0) is " in told[0]
    assert "times slower than expected: " in told[0]
    assert told[0].endswith(f" ms per micro-batch instead of 1 ms (by the plan), after step {straggler.since}")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    slow = [record["step"] for record in records if record["values"].get("straggler/stages/1", 0) >= 4]
    assert slow == [straggler.since]


class Workers:
    """Two, of which the second may be dead."""

    is_one_dead = False
    host = "h1"

    def all(self, command: GetInfo) -> list[WorkerInfo]:
        if self.is_one_dead:
            raise lp.Unavailable("stages/1 has died")
        return [WorkerInfo("stages/0", "h0", (0,)), WorkerInfo("stages/1", self.host, (1,))]


@pytest.fixture
def stragglers(monkeypatch: pytest.MonkeyPatch) -> Stragglers:
    """Return the stragglers among workers that should take 10 ms."""
    # This is no node.
    monkeypatch.setattr("lp_pipe.pipeline.conductor.stragglers.log_metrics", lambda metrics, step: None)
    config: Any = SimpleNamespace(ranks=Ranks((1, 1)), predicted_seconds=(0.01, 0.01))
    workers: Any = Workers()
    return Stragglers(config, workers)


def steps(stragglers: Stragglers, busy_s: float) -> None:
    """Twenty, in which the second worker takes so long."""
    for step in range(20):
        with contextlib.suppress(lp.Unavailable):
            stragglers.note(step, [Report(busy_s=0.01), Report(busy_s=busy_s)], 1)


def test_a_straggler_that_could_not_be_reported_may_become_well(stragglers: Stragglers) -> None:
    # A worker died just when the others were asked where they run: the step failed, and was made again.
    workers: Any = stragglers._workers
    workers.is_one_dead = True
    steps(stragglers, 0.05)
    assert stragglers.now == []
    steps(stragglers, 0.01)
    workers.is_one_dead = False
    steps(stragglers, 0.05)
    assert [straggler.node for straggler in stragglers.now] == ["stages/1"]


class Vanishing(dict[int, Any]):
    """A dict that another thread empties at the first look."""

    def __getitem__(self, rank: int) -> Any:
        found = super().__getitem__(rank)
        self.clear()
        return found


def test_a_client_that_asks_while_a_step_ends_gets_the_stragglers_before_it(stragglers: Stragglers) -> None:
    # A client that asked at the wrong moment got a KeyError.
    stragglers._by_rank = Vanishing({0: "slow", 1: "slow, too"})
    assert stragglers.now == ["slow", "slow, too"]


def test_one_that_starts_again_on_another_host_is_told_of_anew(stragglers: Stragglers) -> None:
    workers: Any = stragglers._workers
    steps(stragglers, 0.05)
    workers.host = "h2"
    stragglers.begin_again()
    assert stragglers.now == []
    steps(stragglers, 0.05)
    assert [(straggler.node, straggler.host) for straggler in stragglers.now] == [("stages/1", "h2")]
