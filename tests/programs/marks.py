"""A training by a parameter server whose result tells which gradients it has had."""

import dataclasses

import numpy as np

import lp_pipe as lp
from lp_pipe.programs.parameter_server import OnResult, parameter_server
from lp_pipe.programs.parameter_shards import Sgd, Vector

STEPS, WORKERS, SERVERS, EVALUATIONS = 12, 2, 2, 6


class Tally(Sgd):
    """A stand-in for descent that counts for each parameter how many gradients have changed it."""

    def step(self, parameters: Vector, velocity: Vector, gradient: Vector) -> tuple[Vector, Vector]:
        return parameters + (gradient != 0), velocity


@dataclasses.dataclass
class Marks:
    """A model in which each step of each worker has a parameter of its own on every server.

    A gradient depends on the parameters it is computed from, as every gradient does, so that only the right ones in the
    right order end with the same bits.
    """

    def initial_parameters(self) -> Vector:
        return np.zeros(SERVERS * STEPS * WORKERS)

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        gradient = np.zeros((SERVERS, STEPS * WORKERS))
        gradient[:, step * WORKERS + rank] = 1 + np.abs(parameters).sum() / 3
        return gradient.ravel()

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        return {}


def marking(task: Marks, on_result: OnResult, kind: str, sgd: Sgd) -> lp.Program:
    """The program."""
    sizes = {"num_workers": WORKERS, "num_servers": SERVERS, "steps": STEPS, "evaluations": EVALUATIONS}
    return parameter_server(task, on_result=on_result, mode=kind, sgd=sgd, **sizes)


def marked_by_a_plain_loop(sgd: Sgd) -> Vector:
    """The parameters at the end, without any program."""
    task = Marks()
    parameters = task.initial_parameters()
    velocity = np.zeros_like(parameters)
    for step in range(STEPS):
        total = np.zeros_like(parameters)
        for rank in range(WORKERS):
            total += task.gradient(parameters, step, rank)
        parameters, velocity = sgd.step(parameters, velocity, total / WORKERS)
    return parameters
