"""Train with a parameter server: workers send gradients, servers hold the parameters, an evaluator watches.

    lp_pipe launch lp_pipe.programs.parameter_server -- --mode=async --num_workers=3

    workers/0 --- push(gradient) ---> servers/0, first part of the parameters <--- take(version) ---+
    workers/1 --- push(gradient) ---> servers/1, second part, ...             <---------------------+--- evaluator

"sync": a step takes one gradient from each worker and sums them in rank order, so the parameters are the same to the
last bit, independent of timing. "async": each gradient is applied when it arrives, to parameters that may have changed
since they were read; the more they have changed (its staleness), the less the gradient counts. In both modes each
gradient is applied once, also when a node dies and is restarted.

A restarted worker asks the servers for its step. The evaluator saves a checkpoint at each evaluation. When a server or
the evaluator has died, the evaluator takes all servers back to the newest checkpoint, and the workers follow. "sync"
then ends with the same bits; in "async", too, each step of each worker is applied once on every server. The same holds
after `lp_pipe launch … --resume=RUN`, when the whole program was stopped or has crashed.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), 3.4 and 5.1.
"""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.nodes import user_code
from lp_pipe.programs.digits import load_digits
from lp_pipe.programs.generations import StaleGeneration, has_stopped
from lp_pipe.programs.options import option, parse_options
from lp_pipe.programs.parameter_shards import (
    SHARDS,
    Joined,
    Parameters,
    Sgd,
    Snapshot,
    all_of,
    results_of,
)
from lp_pipe.programs.waiting import until_the_stop

Vector = NDArray[np.float64]


class TrainingTask(Protocol):
    """A model and its data. It is sent to all nodes, so it must be picklable (or a Deferred)."""

    def initial_parameters(self) -> Vector:
        """Return all parameters as one vector; the same at every call."""

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        """Return the gradient for a batch that `step` and `rank` select.

        A function of its arguments only, so that it can be computed again.
        """

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        """Return numbers for the display and the result, such as the test accuracy."""


class CheckedTask:
    """A wrapper of a task that checks the shapes of its results.

    Raises (all methods): TypeError: the result has the wrong type or shape.
    """

    def __init__(self, task: TrainingTask) -> None:
        self._task = task

    def initial_parameters(self) -> Vector:
        given = self._task.initial_parameters()
        found = _as_array(given)
        if found is None or found.ndim == 0:
            raise TypeError(f"parameter_server: initial_parameters() gave {_kind(given)}, but must return one vector")
        return found

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        given = self._task.gradient(parameters, step, rank)
        found = _as_array(given)
        if found is None or found.shape != parameters.shape:
            raise TypeError(
                f"parameter_server: gradient() of step {step}, rank {rank}, gave {_kind(given)}, but must return an "
                f"array of the parameters' shape {parameters.shape}"
            )
        return found

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        given = self._task.evaluate(parameters)
        if not isinstance(given, Mapping):
            raise TypeError(f"parameter_server: evaluate() gave {_kind(given)}, but must return a dict of numbers")
        return dict(given)


def _as_array(given: Any) -> Vector | None:
    """Return the value as an array; None if it holds no numbers."""
    found = np.asarray(given)
    return found if found.dtype.kind in "fiub" else None


def _kind(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"{type(given).__name__} of shape {tuple(shape)}"


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """The trained parameters and statistics.

    updates: per shard, the number of applied gradients of each worker. repeated: gradients that were refused because
    they had been applied before.
    mean_staleness, max_staleness: updates between reading the parameters and changing them (0 in sync mode).
    """

    parameters: Vector
    metrics: dict[str, float]
    updates: list[list[int]]
    repeated: int
    mean_staleness: float
    max_staleness: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.parameters.tobytes()).hexdigest()


OnResult = Callable[[TrainingResult], object]


def parameter_server(
    task: TrainingTask,
    *,
    num_workers: int,
    steps: int,
    on_result: OnResult,
    mode: str = "sync",
    num_servers: int = 1,
    sgd: Sgd | None = None,
    evaluations: int = 10,
    name: str = "parameter_server",
) -> lp.Program:
    """Return a program in which every worker computes `steps` gradients of `task`, and servers apply them.

    mode: "sync" or "async", see above.
    num_servers: shards of the parameters; the result in sync mode does not depend on it.
    on_result: called in the evaluator's node after the last update; once, unless the evaluator dies at that moment.
    evaluations: how often the evaluator evaluates and saves the parameters, including the end.

    A node that dies is restarted, and training continues. After the fourth failure of a node the program ends; it can
    be resumed.

    Raises:
        ValueError: the mode is unknown, or a number is below 1.
    """
    if mode not in SHARDS:
        raise ValueError(f"{name}: unknown mode {mode!r}; it must be {' or '.join(SHARDS)}")
    if min(num_workers, steps, num_servers, evaluations) < 1:
        numbers = f"num_workers={num_workers}, steps={steps}, num_servers={num_servers}, evaluations={evaluations}"
        raise ValueError(f"{name}: each number must be at least 1, got {numbers}")
    program = lp.Program(name)
    num_versions = steps if mode == "sync" else steps * num_workers
    cuts = sorted({num_versions * number // evaluations for number in range(1, evaluations + 1)} - {0})
    with program.group("servers", on_failure="restart"):
        make = functools.partial(SHARDS[mode], sgd or Sgd(), cuts)
        servers = [program.add_node(lp.CourierNode(make)) for _ in range(num_servers)]
    with program.group("workers", on_failure="restart"):
        for rank in range(num_workers):
            program.add_node(lp.PyNode(work, task, servers, rank, steps))
    with program.group("evaluator", on_failure="restart"):
        program.add_node(lp.PyNode(watch, task, servers, num_workers, mode, cuts, on_result))
    return program


@until_the_stop()
def work(task: TrainingTask, servers: Sequence[lp.CourierClient], rank: int, steps: int) -> None:
    """Compute and push gradients, for one generation after another; the function of a worker's node."""
    task = CheckedTask(task)
    while not lp.stop_event().is_set():
        with contextlib.suppress(StaleGeneration):
            _work_for_a_generation(task, servers, rank, steps)
        has_stopped()


def _work_for_a_generation(task: TrainingTask, servers: Sequence[lp.CourierClient], rank: int, steps: int) -> None:
    """Compute and push this rank's remaining gradients, then wait for the generation's end.

    Raises:
        StaleGeneration: always, when the generation ends.
    """
    joined: list[Joined] = all_of(servers, "join", rank)
    generation = joined[0].generation
    if any(one.generation != generation for one in joined):
        raise StaleGeneration("the servers are about to go back, one after another")
    # Servers may be one step apart if this worker died between its pushes. A server refuses a gradient that it has.
    step = min(one.step for one in joined)
    snapshots: list[Snapshot] = all_of(servers, "pull", generation, step)
    while step < steps:
        parameters = np.concatenate([snapshot.parameters for snapshot in snapshots])
        gradient = task.gradient(parameters, step, rank)
        parts = np.split(gradient, np.cumsum([len(snapshot.parameters) for snapshot in snapshots])[:-1])
        snapshots = results_of(
            server.futures.push(generation, rank, step, snapshot.version, part)
            for server, snapshot, part in zip(servers, snapshots, parts, strict=True)
        )
        step += 1
    over = servers[0].futures.outlive(generation)
    wait([over])  # not result(): other workers may still have much to do, and a wait for a future is no hang
    results_of([over])


@until_the_stop()
def watch(
    task: TrainingTask,
    servers: Sequence[lp.CourierClient],
    num_workers: int,
    mode: str,
    cuts: Sequence[int],
    on_result: OnResult,
) -> None:
    """Start at the newest checkpoint, and again each time a server has died; the function of the evaluator's node."""
    task = CheckedTask(task)
    parameters = Parameters(servers, task.initial_parameters, num_workers, mode)
    checkpoints = Checkpoints({"parameters": parameters})
    why = ""
    while not lp.stop_event().is_set():
        try:
            parameters.go_back(checkpoints)
            if why:
                _log.warning("all have gone back to version %d: %s", parameters.version, why)
            _watch_a_generation(task, parameters, checkpoints, cuts, on_result)
            return
        except StaleGeneration as reason:
            why = str(reason).splitlines()[0]
            has_stopped()


def _watch_a_generation(
    task: TrainingTask, parameters: Parameters, checkpoints: Checkpoints, cuts: Sequence[int], on_result: OnResult
) -> None:
    """Evaluate and save the parameters at each cut; after the last update deliver the result and end the program.

    Raises:
        StaleGeneration: a server has died, or the program stops.
    """
    for version in [cut for cut in cuts if cut > parameters.version]:
        parameters.take(version)
        checkpoints.save(version, wait=version == cuts[-1])
        staleness = parameters.mean_staleness()
        metrics = {**task.evaluate(parameters.whole()), "staleness": staleness, "total_steps": cuts[-1]}
        lp.log_metrics(metrics, step=version)
    user_code.call(
        on_result,
        TrainingResult(
            parameters.whole(),
            task.evaluate(parameters.whole()),
            updates=[list(state.updates) for state in parameters.states],
            repeated=sum(state.repeated for state in parameters.states),
            mean_staleness=parameters.mean_staleness(),
            max_staleness=max(state.max_staleness for state in parameters.states),
        ),
    )
    lp.stop()


# --- The example: scikit-learn's handwritten digits ---


@dataclass(frozen=True)
class ParameterServerOptions:
    """Learn scikit-learn's handwritten digits with a parameter server."""

    mode: str = option("sync", "whether a step waits for all workers or for none", choices=("sync", "async"))
    num_workers: int = option(2, "nodes that compute gradients", at_least=1)
    num_servers: int = option(1, "nodes that share the parameters", at_least=1)
    steps: int = option(600, "gradients of each worker", at_least=1)
    evaluations: int = option(10, "evaluations on the test images", at_least=1)
    seed: int = option(0, "seed of weights and batches", at_least=0)


def print_result(result: TrainingResult) -> None:
    print(f"test accuracy {result.metrics['test_accuracy']:.2%}")
    print(f"updates of each worker {result.updates[0]}, refused as repeated {result.repeated}")
    print(f"staleness: {result.mean_staleness:.2f} updates in the mean, {result.max_staleness} at most")
    print(f"parameters sha256 {result.sha256}", flush=True)


def make_program() -> lp.Program:
    """Make the example with the options given by flags."""
    options = parse_options(ParameterServerOptions, "lp_pipe.programs.parameter_server")
    return parameter_server(
        load_digits(options.seed),
        num_workers=options.num_workers,
        steps=options.steps,
        on_result=print_result,
        mode=options.mode,
        num_servers=options.num_servers,
        sgd=Sgd(learning_rate=0.1, momentum=0.9),
        evaluations=options.evaluations,
    )
