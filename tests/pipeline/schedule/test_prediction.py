"""A prediction is read from the event that it was logged as."""

import json

import pytest

import lp_pipe.pipeline as pp
from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import make_schedule, simulate
from lp_pipe.pipeline.schedule.prediction import Prediction, measured_costs, planned_costs


@pytest.mark.parametrize("name", ["1f1b", "zbv", "pipedream_2bw"])
def test_an_event_has_the_whole_timeline(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    costs = measured_costs([("F", 0, 1.0), ("I", 0, 1.5), ("W", 0, 0.5), ("F", 0, 9.0), ("F", 0, 0.1)], schedule.stages)
    prediction = Prediction(schedule, costs, "by step 3")
    read = Prediction.from_facts(json.loads(json.dumps(prediction.facts())))
    assert (read.schedule.workers, read.costs, read.source) == (schedule.workers, costs, "by step 3")
    assert read.timeline() == simulate(schedule, costs)
    assert costs.durations(schedule.stages)["F"][:2] == [1.0, 0.0]


def test_what_is_no_prediction_is_refused() -> None:
    facts = Prediction(make_schedule("1f1b", 2, 2), planned_costs([3.0, 6.0]), "by the plan").facts()
    assert facts is not None
    assert Prediction.from_facts(facts).timeline().makespan == 9 + 6
    for wrong in ({"workers": 3}, {"workers": ["/etc/passwd"]}, {"workers": [" 0F0" * 20_001]}, {"forward_s": "x"}):
        with pytest.raises((ScheduleError, TypeError, ValueError)):
            Prediction.from_facts({**facts, **wrong})
    with pytest.raises(ScheduleError):
        Prediction.from_facts({**facts, "workers": ["0F0", "1F0 1B0"]}).timeline()
    large = pp.Schedule("large", make_schedule("gpipe", 2, 6000).workers)
    assert Prediction(large, planned_costs([1.0, 1.0]), "").facts() is None
