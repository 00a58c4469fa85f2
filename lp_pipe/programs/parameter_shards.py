"""One server's part of the parameters: takes gradients, each once, and hands out what they made of it.

Handlers are async: however many workers wait for a step, they pin no thread, and no lock is needed.

A shard has no parameters of its own: the evaluator opens it with a state, under the name of a *generation*. When
something has died the evaluator opens all shards anew, with the states of one version, under a new name; calls of the
generation before are refused, and their callers begin again.

At some versions, agreed on beforehand, every shard keeps its state for the evaluator to take: all shards' states of one
version are a consistent cut. Arrays are never changed in place, so keeping one costs memory but no copy.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

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
    """All that a shard needs to go on from a version.

    updates: gradients applied, by rank; repeated: gradients refused because they had been taken before.
    """

    snapshot: Snapshot
    velocity: Vector
    updates: tuple[int, ...]
    repeated: int = 0
    max_staleness: int = 0
    sum_staleness: int = 0


def at_the_beginning(parameters: Vector, num_workers: int) -> ShardState:
    """The state of a shard that has had no gradient."""
    return ShardState(Snapshot(0, parameters), np.zeros_like(parameters), (0,) * num_workers)


class Joined(NamedTuple):
    """What a worker begins with. step: how many of its gradients have been taken."""

    generation: str
    step: int


class StaleGeneration(RuntimeError):
    """The caller's generation is over: begin again with a new one, if the program does not stop."""


_MAX_CUTS = 2  # that wait to be taken; workers wait then, so that a slow evaluator costs no more memory than that


class Shard:
    """What both kinds of server have in common. Workers wait until it is opened.

    cuts: versions of which the state is kept until `take` asks for it.

    Raises (every call with a generation): StaleGeneration: it is over, or the program stops.
    """

    _current: Snapshot
    _updates: list[int]

    def __init__(self, sgd: Sgd, cuts: Collection[int] = ()) -> None:
        self._sgd = sgd
        self._cuts = frozenset(cuts)
        self._generation: str | None = None
        self._changes = Changes()

    async def open(self, generation: str, state: ShardState) -> None:
        """Go on from there; whatever has been done or kept since is forgotten."""
        self._generation = generation
        # The last two versions: a worker that starts again may find this shard one step ahead of another.
        self._previous = self._current = state.snapshot
        self._velocity = state.velocity
        self._updates = list(state.updates)
        self._repeated, self._max_staleness = state.repeated, state.max_staleness
        self._sum_staleness = state.sum_staleness
        self._kept: dict[int, ShardState] = {}
        self._changes.notify()

    async def join(self, rank: int) -> Joined:
        """Wait until it is open; where this worker begins.

        Raises:
            StaleGeneration: the program stops.
        """
        while self._generation is None:
            await self._change()
        return Joined(self._generation, self._updates[rank])

    async def take(self, generation: str, version: int) -> ShardState:
        """Wait for this version, one of `cuts`, and take its state, once."""
        await self._until(generation, lambda: version in self._kept or version <= self._current.version)
        assert version in self._kept, f"the state of version {version} was taken, or is none of the cuts"
        state = self._kept.pop(version)
        self._changes.notify()
        return state

    async def outlive(self, generation: str) -> None:
        """Wait for the generation's end, which is a StaleGeneration."""
        await self._until(generation, lambda: False)

    def _state(self) -> ShardState:
        counts = (self._repeated, self._max_staleness, self._sum_staleness)
        return ShardState(self._current, self._velocity, tuple(self._updates), *counts)

    def _apply(self, gradient: Vector) -> None:
        parameters, self._velocity = self._sgd.step(self._current.parameters, self._velocity, gradient)
        version = self._current.version + 1
        self._previous, self._current = self._current, Snapshot(version, parameters, self._sum_staleness / version)
        if version in self._cuts:
            self._kept[version] = self._state()
        self._changes.notify()

    async def _until_there_is_room(self, generation: str) -> None:
        """Until the evaluator has taken enough."""
        await self._until(generation, lambda: len(self._kept) < _MAX_CUTS)

    async def _until(self, generation: str, is_so: Callable[[], bool]) -> None:
        self._check(generation)
        while not is_so():
            await self._change()
            self._check(generation)

    async def _change(self) -> None:
        if not await self._changes.wait():
            raise StaleGeneration("the program stops")

    def _check(self, generation: str) -> None:
        if generation != self._generation:
            raise StaleGeneration(f"generation {generation} is over, now there is {self._generation or 'none yet'}")

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

    async def open(self, generation: str, state: ShardState) -> None:
        """As Shard's; gradients that wait for others are forgotten, too."""
        self._gradients: list[Vector | None] = [None] * len(state.updates)
        await super().open(generation, state)

    async def pull(self, generation: str, step: int) -> Snapshot:
        """The parameters that this step's gradients are computed from."""
        self._check(generation)
        return self._at(step)

    async def push(self, generation: str, rank: int, step: int, version: int, gradient: Vector) -> Snapshot:
        """Wait until all workers have pushed this step; the next one's parameters."""
        assert version == step, f"worker {rank} computed step {step} from version {version}"
        await self._until_there_is_room(generation)
        if not self._is_repeated(rank, step):
            self._gradients[rank] = gradient
            self._updates[rank] += 1
            self._step_if_complete()
        await self._until(generation, lambda: self._current.version > step)
        return self._at(step + 1)

    def _at(self, step: int) -> Snapshot:
        return self._previous if step == self._previous.version else self._current

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

    async def pull(self, generation: str, step: int) -> Snapshot:
        """The newest parameters."""
        self._check(generation)
        return self._current

    async def push(self, generation: str, rank: int, step: int, version: int, gradient: Vector) -> Snapshot:
        """Apply the gradient, which was computed from this version; the parameters now."""
        await self._until_there_is_room(generation)
        if not self._is_repeated(rank, step):
            staleness = self._current.version - version
            self._sum_staleness += staleness
            self._max_staleness = max(self._max_staleness, staleness)
            self._updates[rank] += 1
            self._apply(gradient / (1 + staleness))
        return self._current


SHARDS: dict[str, type[Shard]] = {"sync": SyncShard, "async": AsyncShard}
