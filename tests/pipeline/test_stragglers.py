"""A stage that computes slowly is told of with its numbers: in the log, in the metrics, and to those who ask."""

import json
import socket
import time
from pathlib import Path

import pytest
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.pipeline.layer_names import layer_names
from tests.pipeline.plain_loop import D, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([4])


class TakesTime(nn.Module):
    """Some seconds for each forward of training."""

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
    assert [record["step"] for record in records if record.get("straggler/stages/1", 0) >= 4] == [straggler.since]
