"""The master of a MapReduce: which tasks are idle, leased to whom, or committed (Dean & Ghemawat 2004, 3.2)."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lp_pipe as lp
from lp_pipe.programs.waiting import Changes

MAP, REDUCE = "mappers", "reducers"


@dataclass(frozen=True)
class MapReduceTask:
    """What a worker is to do: map these inputs, or reduce these files."""

    index: int
    inputs: Sequence[Any]
    folder: Path


@dataclass(frozen=True)
class WorkerId:
    """One start of the node kind/index: a later start of it has a higher incarnation."""

    kind: str
    index: int
    incarnation: int


class StaleWorker(RuntimeError):
    """The caller's place has been taken by a later start of the same node."""


class Phase:
    """The tasks of one kind. A task is idle, leased to one worker, or committed, for good."""

    def __init__(self, inputs: Sequence[Sequence[Any]], folder: Path) -> None:
        self._tasks = [MapReduceTask(index, part, folder) for index, part in enumerate(inputs)]
        self._idle = deque(self._tasks)
        self._leases: dict[int, MapReduceTask] = {}
        self._outputs: dict[int, list[Path]] = {}

    def lease(self, worker: int) -> MapReduceTask | None:
        """An idle task, if there is one."""
        if not self._idle:
            return None
        self._leases[worker] = self._idle.popleft()
        return self._leases[worker]

    def release(self, worker: int) -> None:
        """The worker has died: what it had leased is idle again (3.3)."""
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
        """By task; all must be committed."""
        return [self._outputs[task.index] for task in self._tasks]


class Master:
    """Hands tasks to workers: each map task once, then each reduce task once, again only when a worker died.

    A commit is a single message that names files which are complete: a worker that dies before it has done nothing, one
    that dies after it has done everything. Leases belong to one incarnation of a worker: when a node starts again it
    registers, and gets its predecessor's task back into the queue. No lease runs out by time: a dead worker is always
    started again, or the program ends.

    All handlers run in the server's event loop, so nothing here needs a lock, and waiting workers pin no thread.
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
        """A worker has started (again); what this returns goes with each of its calls."""
        worker = WorkerId(kind, index, self._incarnations.get((kind, index), 0) + 1)
        self._incarnations[kind, index] = worker.incarnation
        if kind in self._phases:
            self._phases[kind].release(index)
        self._changes.notify()
        return worker

    async def next_task(self, worker: WorkerId) -> MapReduceTask | None:
        """Wait for a task of the worker's kind; None when all are committed, or when the program stops."""
        is_up = True
        while is_up:
            self._check(worker)
            phase = self._phases.get(worker.kind)  # there are no reduce tasks before everything is mapped
            task = None if phase is None else phase.lease(worker.index)
            if task is not None or (phase is not None and phase.is_done):
                return task
            is_up = await self._changes.wait()
        return None

    async def commit(self, worker: WorkerId, task_index: int, outputs: list[Path]) -> None:
        """A task is done, and its outputs are complete."""
        self._check(worker)
        self._phases[worker.kind].commit(worker.index, task_index, outputs)
        self._begin_to_reduce_if_mapped()
        lp.log_metrics({"total_steps": self._num_tasks}, step=self._num_committed)
        self._changes.notify()

    def wait_for_outputs(self) -> list[Path] | None:
        """The reducers' files, by partition; None when the program stops before they are there."""
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
            raise StaleWorker(f"{worker} has been started again since, and its task given away")
