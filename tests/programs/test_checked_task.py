"""Results of a training task that have the wrong type or shape are refused."""

from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.programs.parameter_server import CheckedTask, parameter_server
from tests.programs.conftest import WITHIN_S


class Task:
    def __init__(self, **given: Any) -> None:
        self._given = given

    def initial_parameters(self) -> Any:
        return self._given.get("initial", np.zeros(6))

    def gradient(self, parameters: Any, step: int, rank: int) -> Any:
        return self._given.get("gradient", parameters - 1)

    def evaluate(self, parameters: Any) -> Any:
        return self._given.get("metrics", {"first": float(parameters[0])})


@pytest.mark.usefixtures("no_leaks")
def test_a_gradient_of_another_shape_ends_the_training() -> None:
    # The servers kept it, failed when the last worker's came, and every worker waited for that step for ever.
    program = parameter_server(
        Task(gradient=np.ones(3)), num_workers=2, num_servers=2, steps=3, on_result=lambda result: None
    )
    shapes = r"step 0, rank [01], gave ndarray of shape \(3,\), .* shape \(6,\)"
    with pytest.raises(lp.NodeError, match=r"workers/[01].*\n*.*" + shapes):
        lp.launch(program, "thread").wait(WITHIN_S)


@pytest.mark.parametrize("given", [None, 1.0, {"w": np.ones(6)}, np.ones((6, 1)), ["a"] * 6])
def test_what_is_no_gradient_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=f"gave {type(given).__name__}"):
        CheckedTask(Task(gradient=given)).gradient(np.zeros(6), 0, 0)


def test_initial_parameters_and_metrics_are_checked_too() -> None:
    with pytest.raises(TypeError, match=r"initial_parameters\(\) gave dict.* one vector"):
        CheckedTask(Task(initial={"w": np.ones(2)})).initial_parameters()
    with pytest.raises(TypeError, match=r"evaluate\(\) gave float.* a dict"):
        CheckedTask(Task(metrics=0.5)).evaluate(np.zeros(6))


def test_a_list_will_do() -> None:
    task = CheckedTask(Task(initial=[0.0, 1.0], gradient=[1.0, 2.0]))
    assert task.gradient(task.initial_parameters(), 0, 0).tolist() == [1.0, 2.0]
