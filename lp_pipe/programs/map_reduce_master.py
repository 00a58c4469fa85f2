"""The master of a MapReduce, which tracks idle, leased and committed tasks (Dean & Ghemawat 2004, 3.2)."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lp_pipe as lp
from lp_pipe.rpc.changes import Changes

MAP, REDUCE = "mappers", "reducers"


@dataclass(frozen=True)
class MapReduceTask:
    """A task for a worker: map these inputs, or reduce these files."""

    index: int
    inputs: Sequence[Any]
    folder: Path


@dataclass(frozen=True)
class WorkerId:
    """A worker after one start of the node kind/index; a later start has a higher incarnation."""

    kind: str
    index: int
    incarnation: int


class StaleWorker(RuntimeError):
    """The caller was replaced by a later start of the same node."""


class Phase:
    """The tasks of one kind. A task is idle, leased to one worker, or committed, which is final."""

    def __init__(self, inputs: Sequence[Sequence[Any]], folder: Path) -> None:
        self._tasks = [MapReduceTask(index, part, folder) for index, part in enumerate(inputs)]
        self._idle = deque(self._tasks)
        self._leases: dict[int, MapReduceTask] = {}
        self._outputs: dict[int, list[Path]] = {}

    def lease(self, worker: int) -> MapReduceTask | None:
        """Lease an idle task to the worker and return it; None if there is none."""
        if not self._idle:
            return None
        self._leases[worker] = self._idle.popleft()
        return self._leases[worker]

    def release(self, worker: int) -> None:
        """Make the task of a dead worker idle again (3.3)."""
        task = self._leases.pop(worker, None)
        if task is not None:
            self._idle.appendleft(task)

    def commit(self, worker: int, index: int, outputs: list[Path]) -> None:
        lease = self._leases.pop(worker)
        assert lease.index == index, f"worker {worker} holds task {lease.index} and commits {index}"
        self._outputs[index] = outputs

    @property
    def num_committed(self) -> int:
        return len(self._outputs)

    @property
    def is_done(self) -> bool:
        return len(self._outputs) == len(self._tasks)

    def outputs(self) -> list[list[Path]]:
        """Return the outputs by task; all tasks must be committed."""
        return [self._outputs[task.index] for task in self._tasks]


class Master:
    """A server that gives each map task, then each reduce task, to one worker; to another one only if that dies.

    A commit is one message that names complete files: a worker that dies before it has done nothing, a worker that dies
    after it has done everything. A lease belongs to one incarnation of a worker: a restarted node registers, which puts
    its predecessor's task back into the queue. Leases have no timeout, because a dead worker is always restarted, or
    the program ends.

    All handlers run in the server's event loop: no lock is needed, and waiting workers occupy no thread.
    """

    def __init__(self, splits: Sequence[Sequence[Any]], num_reducers: int, folder: Path) -> None:
        self._phases = {MAP: Phase(splits, folder)}
        self._num_reducers = num_reducers
        self._num_tasks = len(splits) + num_reducers
        self._folder = folder
        self._incarnations: dict[tuple[str, int], int] = {}
        self._changes = Changes()
        self._is_done = threading.Event()
        self._begin_to_reduce_if_mapped()

    async def register(self, kind: str, index: int) -> WorkerId:
        """Register a worker after each start; the worker passes the returned id to all other methods."""
        worker = WorkerId(kind, index, self._incarnations.get((kind, index), 0) + 1)
        self._incarnations[kind, index] = worker.incarnation
        if kind in self._phases:
            self._phases[kind].release(index)
        self._changes.notify()
        return worker

    async def next_task(self, worker: WorkerId) -> MapReduceTask | None:
        """Wait for a task of the worker's kind; return None when all are committed, or the program stops."""
        is_up = True
        while is_up:
            self._check(worker)
            phase = self._phases.get(worker.kind)  # there are no reduce tasks before all map tasks are committed
            task = None if phase is None else phase.lease(worker.index)
            if task is not None or (phase is not None and phase.is_done):
                return task
            is_up = await self._changes.wait()
        return None

    async def commit(self, worker: WorkerId, task_index: int, outputs: list[Path]) -> None:
        """Mark a task as done; its outputs must be complete."""
        self._check(worker)
        self._phases[worker.kind].commit(worker.index, task_index, outputs)
        self._begin_to_reduce_if_mapped()
        lp.log_metrics({"total_steps": self._num_tasks}, step=self._num_committed)
        self._changes.notify()

    def wait_for_outputs(self) -> list[Path] | None:
        """Wait for the reducers' files and return them by partition; None if the program stops before."""
        lp.register_stop_handler(self._is_done.set)
        self._is_done.wait()
        reducing = self._phases.get(REDUCE)
        if reducing is None or not reducing.is_done:
            return None
        return [paths[0] for paths in reducing.outputs()]

    @property
    def _num_committed(self) -> int:
        return sum(phase.num_committed for phase in self._phases.values())

    def _begin_to_reduce_if_mapped(self) -> None:
        mapping = self._phases[MAP]
        if mapping.is_done and REDUCE not in self._phases:
            parts = [[paths[index] for paths in mapping.outputs()] for index in range(self._num_reducers)]
            self._phases[REDUCE] = Phase(parts, self._folder)
        elif self._num_committed == self._num_tasks:
            self._is_done.set()

    def _check(self, worker: WorkerId) -> None:
        if self._incarnations.get((worker.kind, worker.index)) != worker.incarnation:
            raise StaleWorker(f"{worker} was restarted since, and its task was given to another worker")
