"""A pipeline logs how busy its stages are, and how a step should run."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.pipeline.layers.model_names import layer_names
from lp_pipe.pipeline.schedule.prediction import Prediction
from tests.pipeline.plain_loop import D, random_batches, sgd, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([6, 6, 6, 6])
LAYERS = [nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the events of a launch in thread mode, which keeps none in its folder."""
    found: list[dict[str, Any]] = []

    def log_event(self: Coordinator, node_id: str, event: str, facts: dict[str, Any]) -> None:
        found.append({"node": node_id, "event": event, **facts})

    monkeypatch.setattr(Coordinator, "log_event", log_event)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_utilization_of_stages_and_the_bubble_are_metrics(
    tmp_path: Path, events: list[dict[str, Any]], schedule: str
) -> None:
    program = lp.Program("train")
    model = pp.Model(LAYERS, squared_error, sgd)
    handle = pp.add_pipeline(program, model, stages=2, microbatches=3, schedule=schedule)
    with lp.launch(program, "thread", run_dir=tmp_path) as run:
        results = [run.client(handle).step(batch) for batch in BATCHES]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 3
    assert {record["node"] for record in records} == {"stages/0"}
    for name, shares in [
        ("bubble_fraction", [result.bubble_fraction for result in results]),
        ("utilization/0", [result.utilization[0] for result in results]),
        ("utilization/1", [result.utilization[1] for result in results]),
    ]:
        logged = [record["values"][name] for record in records]
        assert min(shares) <= min(logged) <= max(logged) <= max(shares)  # each is the mean of some steps
    (event,) = events  # the seconds are those of a step, without delays
    prediction = Prediction.from_facts(event)
    assert prediction.schedule.workers == pp.make_schedule(schedule, 2, 3).workers
    assert prediction.timeline().makespan > 0


def test_the_plans_seconds_are_predicted_before_the_first_step(events: list[dict[str, Any]], tmp_path: Path) -> None:
    names = layer_names(LAYERS)
    plan = pp.Plan((pp.PlannedStage((names[0],), 2, 0.3), pp.PlannedStage((*names[1:],), 1, 0.6)), 0.6)
    program = lp.Program("planned")
    pp.add_pipeline(program, pp.Model(LAYERS, squared_error, sgd), stages=plan, microbatches=4)
    with lp.launch(program, "thread", run_dir=tmp_path) as run:
        run.client("stages").current_step()
    (event,) = events
    costs = Prediction.from_facts(event).costs
    assert (event["node"], event["name"]) == ("stages/0", "1f1b")
    assert costs.forward == pytest.approx([0.1, 0.2])
    assert costs.durations(2)["B"] == pytest.approx([0.2, 0.4])
