"""A parameter server whose parameters tell which updates they have had: what chaos strikes, and soon over.

    lp_pipe launch benchmarks/tally.py -- --mode=async --steps=200

Every step of every worker has a parameter of its own on every server. "async" counts how many gradients have changed
it: at the end each is 1, or else an update was lost or applied twice. "sync" descends along gradients that depend on
all parameters, so that only the right ones, in the right order, end with the same bits. Needs no torch.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import lp_pipe as lp
from lp_pipe.programs.options import option, parse_options
from lp_pipe.programs.parameter_server import TrainingResult, parameter_server, print_result
from lp_pipe.programs.parameter_shards import Sgd, Vector


class Count(Sgd):
    """An optimizer that counts, instead of descending, how many gradients have changed each parameter."""

    def step(self, parameters: Vector, velocity: Vector, gradient: Vector) -> tuple[Vector, Vector]:
        return parameters + (gradient != 0), velocity


@dataclass(frozen=True)
class Marks:
    """pause_s: that a gradient takes."""

    num_servers: int
    num_workers: int
    steps: int
    pause_s: float

    def initial_parameters(self) -> Vector:
        return np.zeros(self.num_servers * self.num_workers * self.steps)

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        time.sleep(self.pause_s)
        gradient = np.zeros((self.num_servers, self.num_workers * self.steps))
        gradient[:, step * self.num_workers + rank] = 1 + np.abs(parameters).sum() / 3
        return gradient.ravel()

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        return {"test_accuracy": np.count_nonzero(parameters) / len(parameters)}


@dataclass(frozen=True)
class Options:
    """Count updates with a parameter server."""

    mode: str = option("sync", "wait for all workers in every step, or for none", choices=("sync", "async"))
    num_workers: int = option(2, "nodes that compute gradients", at_least=1)
    num_servers: int = option(2, "nodes that share the parameters", at_least=1)
    steps: int = option(200, "gradients of each worker", at_least=1)
    evaluations: int = option(20, "checkpoints on the way", at_least=1)
    pause_ms: float = option(5.0, "milliseconds that a gradient takes")


def print_counts(result: TrainingResult) -> None:
    """Print the result without values that differ from run to run, such as staleness."""
    print_result(dataclasses.replace(result, repeated=0, mean_staleness=0.0, max_staleness=0))


def tally(options: Options, on_result: Callable[[TrainingResult], object]) -> lp.Program:
    task = Marks(options.num_servers, options.num_workers, options.steps, options.pause_ms / 1e3)
    return parameter_server(
        task,
        num_workers=options.num_workers,
        steps=options.steps,
        on_result=on_result,
        mode=options.mode,
        num_servers=options.num_servers,
        sgd=Count() if options.mode == "async" else Sgd(learning_rate=1e-3),
        evaluations=options.evaluations,
        name=f"tally_{options.mode}",
    )


def make_program() -> lp.Program:
    """The program that the flags ask for."""
    return tally(parse_options(Options, "benchmarks/tally.py"), print_counts)
