"""Train with a parameter server: workers send gradients, servers hold the parameters, an evaluator watches.

    lp_pipe launch lp_pipe.programs.parameter_server -- --mode=async --num_workers=3

    workers/0 --- push(gradient) ---> servers/0, first part of the parameters <--- take(version) ---+
    workers/1 --- push(gradient) ---> servers/1, second part, ...             <---------------------+--- evaluator

"sync": a step takes one gradient from each worker, summed in the order of the ranks: the same parameters to the last
bit however long anybody takes. "async": each gradient is applied as it comes, to parameters that may have moved on
since they were read; the later it is (its staleness), the less it counts. In both, each gradient is applied once, also
when something dies and starts again.

A worker that has died asks the servers where it was. The evaluator saves a checkpoint whenever it looks at the
parameters; when a server or itself has died it takes all servers back to the newest one, and the workers follow: "sync"
ends with the same bits, and in "async", too, each step of each worker is applied once on every server. So it does after
`lp_pipe launch … --resume=RUN`, when the whole program was stopped or has crashed.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), 3.4 and 5.1.
"""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.nodes import user_code
from lp_pipe.programs.all_shards import Parameters, all_of, results_of
from lp_pipe.programs.checked_task import CheckedTask, TrainingTask, Vector
from lp_pipe.programs.digits import load_digits
from lp_pipe.programs.options import option, parse_options
from lp_pipe.programs.parameter_shards import SHARDS, Joined, Sgd, Snapshot, StaleGeneration
from lp_pipe.programs.waiting import until_the_stop

_log = logging.getLogger(__name__)
_PAUSE_S = 0.02  # before another try: a peer that is gone for good makes each try short


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
    on_result: called in the evaluator's node after the last update; once, if the evaluator does not die just then.
    evaluations: how often the evaluator looks at the parameters on the way, and saves them, the last time included.

    Whatever dies starts again in its place, and all go on; after the fourth failure of a node the program ends, and can
    be resumed.

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
    """Compute and push gradients, in one generation after another."""
    task = CheckedTask(task)
    while not lp.stop_event().is_set():
        with contextlib.suppress(StaleGeneration):
            _work_for_a_generation(task, servers, rank, steps)
        lp.wait_for_stop(_PAUSE_S)


def _work_for_a_generation(task: TrainingTask, servers: Sequence[lp.CourierClient], rank: int, steps: int) -> None:
    """From where this rank has come to; until the generation's end, also when all steps are done.

    Raises:
        StaleGeneration: that is now.
    """
    joined: list[Joined] = all_of(servers, "join", rank)
    generation = joined[0].generation
    if any(one.generation != generation for one in joined):
        raise StaleGeneration("the servers are about to go back, one after another")
    # Servers may be one step apart when a worker dies between its pushes: who has this step's gradient refuses it.
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
    wait([over])  # reports of hangs do not count this one: the others may still have much to do
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
    """Begin where the newest checkpoint is; do it again whenever a server has died, and all others follow."""
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
            lp.wait_for_stop(_PAUSE_S)


def _watch_a_generation(
    task: TrainingTask, parameters: Parameters, checkpoints: Checkpoints, cuts: Sequence[int], on_result: OnResult
) -> None:
    """Evaluate and save as the parameters get newer; after the last update deliver the result and end the program.

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
