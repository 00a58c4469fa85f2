"""A killed part of a parameter server starts again in its place; nothing else does, and the result is the same."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
from lp_pipe.programs.parameter_server import TrainingResult
from lp_pipe.programs.parameter_shards import Sgd, Vector
from tests.programs.conftest import Delivered, Once, kill_this_process
from tests.programs.marks import SERVERS, STEPS, WORKERS, Marks, Tally, marked_by_a_plain_loop, marking

pytestmark = pytest.mark.usefixtures("no_leaks")


@dataclasses.dataclass
class Killing:
    """Kills whoever comes by one of these places, once, when a third of the updates are made, or all ("at the end")."""

    folder: Path
    places: tuple[str, ...]

    def strike(self, place: str, parameters: Vector) -> None:
        share = np.count_nonzero(parameters) / len(parameters)
        for name, due in ((place, 1 / 3), (f"{place} at the end", 1.0)):
            if name in self.places and share >= due and Once(self.folder / name)():
                kill_this_process()


class KillsAServer(Sgd):
    """A task in which one of the servers dies in an update."""

    def __init__(self, killing: Killing, usual: Sgd) -> None:
        super().__init__(usual.learning_rate, usual.momentum)
        object.__setattr__(self, "parts", (killing, usual))

    def step(self, parameters: Vector, velocity: Any, gradient: Vector) -> tuple[Vector, Any]:
        killing, usual = self.parts  # type: ignore[attr-defined]
        killing.strike("server", parameters)
        parameters, velocity = usual.step(parameters, getattr(velocity, "value", velocity), gradient)
        return parameters, Velocity(velocity, killing, parameters)


@dataclasses.dataclass
class Velocity:
    """A descent with a state beside its parameters. The evaluator dies when it has taken it, before it saves it."""

    value: Vector
    killing: Killing
    parameters: Vector

    def __reduce__(self) -> Any:
        if lp.context().label == "evaluator":
            self.killing.strike("save", self.parameters)
        return Velocity, (self.value, self.killing, self.parameters)


@dataclasses.dataclass
class KillsOthers(Marks):
    """A worker dies in a gradient, the evaluator in an evaluation."""

    killing: Killing

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        self.killing.strike("worker", parameters)
        return super().gradient(parameters, step, rank)

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        self.killing.strike("evaluation", parameters)
        return {}


def trained(places: tuple[str, ...], delivered: Delivered, folder: Path, kind: str, sgd: Sgd) -> TrainingResult:
    """Train in processes, of which one dies in each place."""
    killing = Killing(folder, places)
    program = marking(KillsOthers(killing), delivered, kind, KillsAServer(killing, sgd))
    result: TrainingResult = delivered.of(program, "process")
    return result


PLACES = [
    (("server", "evaluation"), {"servers": 1, "evaluator": 1}),
    pytest.param(("server",), {"servers": 1}, marks=pytest.mark.slow),
    pytest.param(("evaluation", "save"), {"evaluator": 2}, marks=pytest.mark.slow),
    pytest.param(("server", "worker"), {"servers": 1, "workers": 1}, marks=pytest.mark.slow),
    pytest.param(("server", "save"), {"servers": 1, "evaluator": 1}, marks=pytest.mark.slow),
    # Workers have done all their steps then, and must do the last ones again.
    pytest.param(("save at the end",), {"evaluator": 1}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("places", "restarts"), PLACES, ids=lambda value: " and ".join(value))
def test_synchronous_training_ends_with_the_same_bits(
    places: tuple[str, ...], restarts: dict[str, int], delivered: Delivered, tmp_path: Path
) -> None:
    result = trained(places, delivered, tmp_path, "sync", Sgd())
    assert {label: count for label in delivered.status if (count := delivered.restarts(label))} == restarts
    assert np.array_equal(result.parameters, marked_by_a_plain_loop(Sgd()))
    assert result.updates == [[STEPS] * WORKERS] * SERVERS


@pytest.mark.parametrize(("places", "restarts"), PLACES, ids=lambda value: " and ".join(value))
def test_asynchronous_training_loses_no_update_and_applies_none_twice(
    places: tuple[str, ...], restarts: dict[str, int], delivered: Delivered, tmp_path: Path
) -> None:
    result = trained(places, delivered, tmp_path, "async", Tally())
    assert {label: count for label in delivered.status if (count := delivered.restarts(label))} == restarts
    assert result.parameters.tolist() == [1.0] * (SERVERS * STEPS * WORKERS)
    assert result.updates == [[STEPS] * WORKERS] * SERVERS


@pytest.mark.slow
def test_a_server_that_dies_again_and_again_ends_the_program(delivered: Delivered, tmp_path: Path) -> None:
    program = marking(Marks(), delivered, "sync", Deadly())
    with pytest.raises(lp.NodeError, match="SIGKILL") as caught:
        delivered.of(program, "process")
    assert caught.value.label == "servers"


class Deadly(Sgd):
    """Kills its server in the first update of all."""

    def step(self, parameters: Vector, velocity: Vector, gradient: Vector) -> tuple[Vector, Vector]:
        kill_this_process()
        return parameters, velocity
