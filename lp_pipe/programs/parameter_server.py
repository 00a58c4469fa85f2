"""Train with a parameter server: workers send gradients, servers hold the parameters, an evaluator watches.

    lp_pipe launch lp_pipe.programs.parameter_server -- --mode=async --num_workers=3

    workers/0 --- push(gradient) ---> servers/0, first part of the parameters <--- at_least(version) ---+
    workers/1 --- push(gradient) ---> servers/1, second part, ...             <-------------------------+--- evaluator

"sync": a step takes one gradient from each worker, summed in the order of the ranks: the same parameters to the last
bit however long anybody takes. "async": each gradient is applied as it comes, to parameters that may have moved on
since they were read; the later it is (its staleness), the less it counts. In both, each gradient is applied once, also
when its worker dies and starts again.

The evaluator saves a checkpoint whenever it looks at the parameters. After a crash, or a stop, `lp_pipe launch …
--resume=RUN` goes on from the newest one: "sync" ends with the same bits, and in "async", too, each step of each worker
is applied once on every server.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), 3.4 and 5.1.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.errors import CheckpointError
from lp_pipe.programs.digits import load_digits
from lp_pipe.programs.options import option, parse_options
from lp_pipe.programs.parameter_shards import SHARDS, Sgd, Shard, ShardState, Snapshot
from lp_pipe.programs.waiting import until_the_stop

Vector = NDArray[np.float64]


class TrainingTask(Protocol):
    """What is trained; goes to all nodes, and must pickle (or be a Deferred)."""

    def initial_parameters(self) -> Vector:
        """All of them as one vector; the same at every call."""

    def gradient(self, parameters: Vector, step: int, rank: int) -> Vector:
        """Of the batch that `step` and `rank` decide: a function of its arguments, so that it can be computed again."""

    def evaluate(self, parameters: Vector) -> dict[str, float]:
        """Numbers for the display and the result, such as the test accuracy."""


@dataclass(frozen=True)
class TrainingResult:
    """What came out.

    updates: gradients of each worker that were applied, on every shard; repeated: those refused because they had been.
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
    """A program in which every worker computes `steps` gradients of `task`, and servers apply them.

    mode: "sync" or "async", see above.
    num_servers: shards of the parameters; the result in sync mode does not depend on it.
    on_result: called once, in the evaluator's node, after the last update.
    evaluations: how often the evaluator looks at the parameters on the way, and saves them, the last time included.

    A worker that dies starts again. A server or the evaluator that dies ends the program, which can be resumed.

    Raises:
        ValueError: unknown mode, a number below 1.
    """
    if mode not in SHARDS:
        raise ValueError(f"{name}: unknown mode {mode!r}; known are {', '.join(SHARDS)}")
    if min(num_workers, steps, num_servers, evaluations) < 1:
        numbers = f"num_workers={num_workers}, steps={steps}, num_servers={num_servers}, evaluations={evaluations}"
        raise ValueError(f"{name}: {numbers}: at least 1 is needed")
    program = lp.Program(name)
    num_versions = steps if mode == "sync" else steps * num_workers
    cuts = sorted({num_versions * number // evaluations for number in range(1, evaluations + 1)} - {0})
    with program.group("servers"):
        make = functools.partial(parameter_shard, mode, task, num_servers, num_workers, sgd or Sgd(), cuts)
        servers = [program.add_node(lp.CourierNode(make, index)) for index in range(num_servers)]
    with program.group("workers", on_failure="restart"):
        for rank in range(num_workers):
            program.add_node(lp.PyNode(work, task, servers, rank, steps))
    program.add_node(lp.PyNode(watch, task, servers, cuts, on_result), label="evaluator")
    return program


def parameter_shard(
    mode: str, task: TrainingTask, num_servers: int, num_workers: int, sgd: Sgd, cuts: Sequence[int], index: int
) -> Shard:
    """The server of the index-th part of the parameters; the evaluator opens it, or loads its state before."""
    part = np.array_split(task.initial_parameters(), num_servers)[index]
    return SHARDS[mode](part.copy(), num_workers, sgd, cuts, is_open=False)


@until_the_stop()
def work(task: TrainingTask, servers: Sequence[lp.CourierClient], rank: int, steps: int) -> None:
    """Compute and push gradients from where this rank has come to, which is 0 unless it has died on the way."""
    # Servers may be one step apart when a worker dies between its pushes: who has this step's gradient refuses it.
    steps_taken: list[int | None] = _all(servers, "next_step", rank)
    if None in steps_taken:
        return  # the program stops
    step = min(taken for taken in steps_taken if taken is not None)
    snapshots: list[Snapshot] = _all(servers, "pull", step)
    while step < steps:
        parameters = np.concatenate([snapshot.parameters for snapshot in snapshots])
        gradient = task.gradient(parameters, step, rank)
        parts = np.split(gradient, np.cumsum([len(snapshot.parameters) for snapshot in snapshots])[:-1])
        calls = [
            server.futures.push(rank, step, snapshot.version, part)
            for server, snapshot, part in zip(servers, snapshots, parts, strict=True)
        ]
        snapshots = [call.result() for call in calls]
        if None in snapshots:
            return  # the program stops
        step += 1


class Parameters:
    """All servers' states of one version, as a part of checkpoints."""

    def __init__(self, servers: Sequence[lp.CourierClient]) -> None:
        self._servers = servers
        self.states: list[ShardState] = []

    @property
    def version(self) -> int:
        return self.states[0].snapshot.version if self.states else 0

    def take(self, version: int) -> bool:
        """Wait for it; False when the program stops."""
        states: list[ShardState | None] = _all(self._servers, "take", version)
        if None in states:
            return False
        self.states = [state for state in states if state is not None]
        return True

    def whole(self) -> Vector:
        return np.concatenate([state.snapshot.parameters for state in self.states])

    def mean_staleness(self) -> float:
        return float(np.mean([state.snapshot.mean_staleness for state in self.states]))

    def state_dict(self) -> list[ShardState]:
        return self.states

    def load_state_dict(self, states: list[ShardState]) -> None:
        if len(states) != len(self._servers):
            wrong = f"the checkpoint is of {len(states)} servers, this program has {len(self._servers)}"
            raise CheckpointError(f"{wrong}: resume it with num_servers={len(states)}")
        calls = [server.futures.load_state(state) for server, state in zip(self._servers, states, strict=True)]
        for call in calls:
            call.result()
        self.states = states


@until_the_stop()
def watch(task: TrainingTask, servers: Sequence[lp.CourierClient], cuts: Sequence[int], on_result: OnResult) -> None:
    """Evaluate and save as the parameters get newer; after the last update deliver the result and end the program."""
    parameters = Parameters(servers)
    checkpoints = Checkpoints({"parameters": parameters})
    checkpoints.restore()
    _all(servers, "open")
    for version in cuts:
        if version <= parameters.version:
            continue  # before the newest checkpoint
        if not parameters.take(version):
            return  # the program stops
        checkpoints.save(version, wait=version == cuts[-1])
        staleness = parameters.mean_staleness()
        metrics = {**task.evaluate(parameters.whole()), "staleness": staleness, "total_steps": cuts[-1]}
        lp.log_metrics(metrics, step=version)
    on_result(
        TrainingResult(
            parameters.whole(),
            task.evaluate(parameters.whole()),
            updates=[list(state.updates) for state in parameters.states],
            repeated=sum(state.repeated for state in parameters.states),
            mean_staleness=parameters.mean_staleness(),
            max_staleness=max(state.max_staleness for state in parameters.states),
        )
    )
    lp.stop()


def _all(servers: Sequence[lp.CourierClient], method: str, *args: Any) -> list[Any]:
    """The method's results of all servers, which are called at the same time."""
    return [call.result() for call in [getattr(server.futures, method)(*args) for server in servers]]


# --- The example: scikit-learn's handwritten digits ---


@dataclass(frozen=True)
class Options:
    """Learn scikit-learn's handwritten digits with a parameter server."""

    mode: str = option("sync", "wait for all workers in every step, or for none", choices=("sync", "async"))
    num_workers: int = option(2, "nodes that compute gradients", at_least=1)
    num_servers: int = option(1, "nodes that share the parameters", at_least=1)
    steps: int = option(600, "gradients of each worker", at_least=1)
    evaluations: int = option(10, "looks at the test images on the way", at_least=1)
    seed: int = option(0, "decides weights and batches", at_least=0)


def print_result(result: TrainingResult) -> None:
    print(f"test accuracy {result.metrics['test_accuracy']:.2%}")
    print(f"updates of each worker {result.updates[0]}, refused as repeated {result.repeated}")
    print(f"staleness: {result.mean_staleness:.2f} updates in the mean, {result.max_staleness} at most")
    print(f"parameters sha256 {result.sha256}", flush=True)


def make_program() -> lp.Program:
    """The example that the flags ask for."""
    options = parse_options(Options, "lp_pipe.programs.parameter_server")
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
