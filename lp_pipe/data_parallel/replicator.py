"""TF-Replicator's shape of data parallelism: an input function for each worker, and a step function for each replica.

Source: TF-Replicator (Buchlovsky et al., 2019), `input_fn` and `step_fn`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lp_pipe.context import log_metrics
from lp_pipe.data_parallel.add import ReplicasHandle, add_replicas
from lp_pipe.data_parallel.replica import Replica
from lp_pipe.errors import DataParallelError
from lp_pipe.program import Program

StepFunction = Callable[[Any], Mapping[str, Any] | None]
InputFunction = Callable[["InputContext"], Callable[[int], Any]]


@dataclass(frozen=True)
class InputContext:
    """What an `input_fn` gets: which part of the data its worker reads. replica_ids: the replicas of this worker."""

    num_replicas: int
    replica_ids: tuple[int, ...]

    def batch_slice(self, n: int) -> slice:
        """Return which of the n samples of a batch are this worker's, cut as torch.chunk cuts."""
        size = -(-n // self.num_replicas)
        return slice(min(n, self.replica_ids[0] * size), min(n, (self.replica_ids[-1] + 1) * size))


def add_replicator(
    program: Program,
    make_step: Callable[[Replica], StepFunction],
    input_fn: InputFunction,
    /,
    *,
    replicas: int,
    workers: int | None = None,
    steps: int = 1000,
    save_every: int | None = None,
    **options: Any,
) -> ReplicasHandle:
    """Add a worker for each replica, which calls its step function once a step, and return the handle of all.

    make_step: makes the step function, `step(batch) -> {name: number}`; what rank 0's returns is logged. Inside, the
        worker's `replica` has the collectives, and `replica.optimizer(…).step()` adds up the gradients of all replicas.
    input_fn: `input_fn(context) -> (step) -> batch`, called once in each worker.
    workers: only `replicas`.
    options: those of `add_replicas`.

    Raises:
        DataParallelError: workers is another number than replicas, or an option is wrong.
    """
    if workers not in (None, replicas) or options.get("on_failure") == "shrink":
        raise DataParallelError(
            f"add_replicator(replicas={replicas}, workers={workers!r}): each replica is a worker; give replicas alone, "
            "and not on_failure='shrink'"
        )
    if not isinstance(steps, int) or steps < 0:
        raise DataParallelError(f"steps must be a whole number, got {steps!r}")
    arguments = (make_step, input_fn, steps, save_every)
    return add_replicas(program, _replicate, *arguments, replicas=replicas, workers=replicas, **options)


def _replicate(
    replica: Replica,
    make_step: Callable[[Replica], StepFunction],
    input_fn: InputFunction,
    steps: int,
    save_every: int | None,
) -> None:
    batch_of = input_fn(InputContext(replica.num_replicas, replica.replicas))
    step_function = make_step(replica)
    for step in replica.steps(steps, save_every):
        batch = batch_of(step)
        with replica.computing(step):
            values = step_function(batch)
        if values and replica.rank == 0:
            log_metrics({name: float(value) for name, value in values.items()}, step=step)
