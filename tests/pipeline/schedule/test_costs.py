import json
from pathlib import Path
from typing import Any

import pytest

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule import Costs, make_schedule, simulate


def test_costs_are_kept_in_a_file(tmp_path: Path) -> None:
    costs = Costs(forward=0.5, backward_input=[1.0, 2.0], backward_weight=0.25)
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    assert simulate(make_schedule("1f1b", 2, 4), Costs.load(tmp_path / "costs.json")).makespan > 0


GOOD = {"forward": 1, "backward_input": 1, "backward_weight": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read costs: "),
        ("[1, 2]", "costs are an object with the keys forward, backward_input, backward_weight"),
        (json.dumps({"forward": 1, "backward_input": 1}), '"backward_weight" is missing'),
        (json.dumps({**GOOD, "backward": 2}), "unknown key 'backward'"),
        (json.dumps({**GOOD, "forward": "fast"}), '"forward" is "fast": give seconds'),
        (json.dumps({**GOOD, "backward_input": [1, -1]}), r'"backward_input" is \[1, -1\]: give seconds'),
        (json.dumps({**GOOD, "backward_input": []}), r'"backward_input" is \[\]: give seconds'),
        (json.dumps({**GOOD, "backward_weight": float("nan")}), '"backward_weight" is NaN'),
    ],
)
def test_a_wrong_file_is_named_with_the_key(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ScheduleError, match=f"costs.json: {message}"):
        Costs.load(tmp_path / "costs.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"none.json: cannot read costs: .*No such file"):
        Costs.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("forward", "stages", "expected"),
    [
        (1, 4, [0.5, 0.5, 0.5, 0.5]),  # a number is what a stage takes where each of the two workers has one
        ([2, 4], 4, [1, 1, 2, 2]),
        ([1, 1, 2, 2], 2, [2, 4]),
        ([3, 3], 3, [2, 2, 2]),
        ([1, 2, 3], 2, [2, 4]),
    ],
)
def test_a_model_is_cut_into_more_stages_or_fewer(
    forward: float | list[float], stages: int, expected: list[float]
) -> None:
    costs = Costs(forward=forward, backward_input=0, backward_weight=0).cut_into(stages, workers=2)
    assert costs.forward == pytest.approx(expected)


@pytest.mark.parametrize("forward", [None, True, "1.0"], ids=["none", "bool", "text"])
def test_what_is_no_number_of_seconds_is_refused_where_a_model_is_cut(forward: Any) -> None:
    costs = Costs(forward=forward, backward_input=1.0, backward_weight=1.0)
    with pytest.raises(ScheduleError, match=r"costs.forward is .*: give seconds, one number or one per"):
        costs.cut_into(4, workers=2)
