"""One server's part of the parameters: takes gradients, each once, and hands out what they made of it.

Handlers are async: however many workers wait for a step, they pin no thread, and no lock is needed.

At some versions, agreed on beforehand, every shard keeps its state for the evaluator to take: all shards' states of one
version are a consistent cut. Arrays are never changed in place, so keeping one costs memory but no copy.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lp_pipe.programs.waiting import Changes

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum; elementwise, so that shards compute what the whole would."""

    learning_rate: float = 0.1
    momentum: float = 0.9

    def step(self, parameters: Vector, velocity: Vector, gradient: Vector) -> tuple[Vector, Vector]:
        """The next parameters and velocity, as new arrays."""
        velocity = self.momentum * velocity + gradient
        return parameters - self.learning_rate * velocity, velocity


@dataclass(frozen=True)
class Snapshot:
    """The parameters after `version` updates."""

    version: int
    parameters: Vector
    mean_staleness: float = 0.0


@dataclass(frozen=True)
class ShardState:
    """All that a shard needs to go on from a version."""

    snapshot: Snapshot
    velocity: Vector
    updates: tuple[int, ...]
    repeated: int
    max_staleness: int
    sum_staleness: int


_MAX_CUTS = 2  # that wait to be taken; workers wait then, so that a slow evaluator costs no more memory than that


@dataclass(frozen=True)
class Counts:
    """updates: gradients applied, by rank; repeated: gradients refused because they had been taken before."""

    updates: list[int]
    repeated: int
    max_staleness: int


class Shard:
    """What both kinds of server have in common.

    cuts: versions of which the state is kept until `take` asks for it.
    is_open: whether it serves workers at once; else it waits for `open` or `load_state`.
    """

    def __init__(
        self,
        parameters: Vector,
        num_workers: int,
        sgd: Sgd,
        cuts: Collection[int] = (),
        *,
        is_open: bool = True,
    ) -> None:
        self._sgd = sgd
        self._velocity = np.zeros_like(parameters)
        # The last two versions: a worker that starts again may find this shard one step ahead of another.
        self._previous = self._current = Snapshot(0, parameters)
        self._updates = [0] * num_workers
        self._repeated = 0
        self._max_staleness = 0
        self._sum_staleness = 0
        self._changes = Changes()
        self._cuts = frozenset(cuts)
        self._kept: dict[int, ShardState] = {}
        self._is_open = is_open

    async def next_step(self, rank: int) -> int | None:
        """How many gradients of this worker have been taken; None when the program stops."""
        while not self._is_open:
            if not await self._changes.wait():
                return None
        return self._updates[rank]

    async def at_least(self, version: int) -> Snapshot | None:
        """Wait for this many updates; the newest parameters then, or None when the program stops."""
        while self._current.version < version:
            if not await self._changes.wait():
                return None
        return self._current

    async def take(self, version: int) -> ShardState | None:
        """Wait for this version, one of `cuts`, and take its state, once; None when the program stops."""
        while version not in self._kept:
            assert version > self._current.version, f"the state of version {version} was taken, or is none of the cuts"
            if not await self._changes.wait():
                return None
        state = self._kept.pop(version)
        self._changes.notify()
        return state

    async def open(self) -> None:
        """Serve workers from now on."""
        self._is_open = True
        self._changes.notify()

    async def load_state(self, state: ShardState) -> None:
        """Go on from there; before any worker is served."""
        assert not self._is_open, "workers have been served, and know newer parameters"
        self._previous = self._current = state.snapshot
        self._velocity = state.velocity
        self._updates = list(state.updates)
        self._repeated, self._max_staleness = state.repeated, state.max_staleness
        self._sum_staleness = state.sum_staleness

    async def counts(self) -> Counts:
        return Counts(self._updates, self._repeated, self._max_staleness)

    def _apply(self, gradient: Vector) -> None:
        parameters, self._velocity = self._sgd.step(self._current.parameters, self._velocity, gradient)
        version = self._current.version + 1
        self._previous, self._current = self._current, Snapshot(version, parameters, self._sum_staleness / version)
        if version in self._cuts:
            self._kept[version] = self._state()
        self._changes.notify()

    def _state(self) -> ShardState:
        counts = (self._repeated, self._max_staleness, self._sum_staleness)
        return ShardState(self._current, self._velocity, tuple(self._updates), *counts)

    async def _may_go_on(self) -> bool:
        """Once the evaluator has taken enough; False when the program stops."""
        while len(self._kept) >= _MAX_CUTS:
            if not await self._changes.wait():
                return False
        return True

    def _is_repeated(self, rank: int, step: int) -> bool:
        """Whether the gradient has been taken, from a worker that died before it knew."""
        assert step <= self._updates[rank], f"worker {rank} skips from step {self._updates[rank]} to {step}"
        is_repeated = step < self._updates[rank]
        self._repeated += is_repeated
        return is_repeated


class SyncShard(Shard):
    """One update from one gradient of each worker: their mean, added up in the order of the ranks.

    Version v has taken the gradients of steps 0 to v - 1, so a step begins with the version of its own number.
    """

    def __init__(
        self, parameters: Vector, num_workers: int, sgd: Sgd, cuts: Collection[int] = (), *, is_open: bool = True
    ) -> None:
        super().__init__(parameters, num_workers, sgd, cuts, is_open=is_open)
        self._gradients: list[Vector | None] = [None] * num_workers

    async def pull(self, step: int) -> Snapshot:
        """The parameters that this step's gradients are computed from."""
        return self._previous if step == self._previous.version else self._current

    async def push(self, rank: int, step: int, version: int, gradient: Vector) -> Snapshot | None:
        """Wait until all workers have pushed this step; the next one's parameters, or None when the program stops."""
        assert version == step, f"worker {rank} computed step {step} from version {version}"
        if not await self._may_go_on():
            return None
        if not self._is_repeated(rank, step):
            self._gradients[rank] = gradient
            self._updates[rank] += 1
            self._step_if_complete()
        is_there = await self.at_least(step + 1)
        return await self.pull(step + 1) if is_there else None

    def _step_if_complete(self) -> None:
        gradients = [gradient for gradient in self._gradients if gradient is not None]
        if len(gradients) == len(self._gradients):
            self._gradients = [None] * len(gradients)
            total = np.zeros_like(gradients[0])
            for gradient in gradients:
                total += gradient
            self._apply(total / len(gradients))


class AsyncShard(Shard):
    """One update from each gradient, at once, in the order in which they come.

    A gradient that is s updates late counts 1/(1 + s): with full weight, a worker that was held up pushes a direction
    that was right long ago, and training diverges. Source: Zhang et al., "Staleness-aware Async-SGD" (IJCAI 2016).
    """

    async def pull(self, step: int) -> Snapshot:
        """The newest parameters."""
        return self._current

    async def push(self, rank: int, step: int, version: int, gradient: Vector) -> Snapshot | None:
        """Apply the gradient, which was computed from this version; the parameters now, or None at the stop."""
        if not await self._may_go_on():
            return None
        if not self._is_repeated(rank, step):
            staleness = self._current.version - version
            self._sum_staleness += staleness
            self._max_staleness = max(self._max_staleness, staleness)
            self._updates[rank] += 1
            self._apply(gradient / (1 + staleness))
        return self._current


SHARDS: dict[str, type[Shard]] = {"sync": SyncShard, "async": AsyncShard}
