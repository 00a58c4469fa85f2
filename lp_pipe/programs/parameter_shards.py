"""A server's shard of the parameters, which applies each gradient once and returns the new parameters.

Handlers are async: waiting workers occupy no thread, and no lock is needed.

A shard starts without parameters. The evaluator opens it with a state and the name of a generation (generations.py).
When a node has died, the evaluator opens all shards again, with the states of one version and a new name.

At the versions `cuts`, every shard keeps its state until the evaluator takes it. The states of all shards at one
version are a consistent cut. Arrays are never changed in place, so keeping one costs memory but no copy.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.errors import CheckpointError
from lp_pipe.programs.generations import GenerationServer, StaleGeneration

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent with momentum. It is elementwise, so shards give the same result as the whole."""

    learning_rate: float = 0.1
    momentum: float = 0.9

    def step(self, parameters: Vector, velocity: Vector, gradient: Vector) -> tuple[Vector, Vector]:
        """Return the next parameters and velocity, as new arrays."""
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
    """The whole state of a shard at a version.

    updates: number of applied gradients by rank. repeated: gradients that were refused because they had been applied.
    """

    snapshot: Snapshot
    velocity: Vector
    updates: tuple[int, ...]
    repeated: int = 0
    max_staleness: int = 0
    sum_staleness: int = 0


def at_the_beginning(parameters: Vector, num_workers: int) -> ShardState:
    """Return the state of a shard before the first gradient."""
    return ShardState(Snapshot(0, parameters), np.zeros_like(parameters), (0,) * num_workers)


class Joined(NamedTuple):
    """The reply to a worker that joins a generation. step: how many of its gradients have been applied."""

    generation: str
    step: int


_MAX_CUTS = 2  # states kept for a slow evaluator; workers wait while there are so many, which bounds the memory


class ParameterShard(GenerationServer):
    """The base of both kinds of server. Workers wait until it is opened.

    cuts: versions to keep the state of, until `take` asks for it.

    Raises (every call with a generation): StaleGeneration: the generation is over, or the program stops.
    """

    _current: Snapshot
    _updates: list[int]

    def __init__(self, sgd: Sgd, cuts: Collection[int] = ()) -> None:
        super().__init__()
        self._sgd = sgd
        self._cuts = frozenset(cuts)

    async def open(self, generation: str, state: ShardState) -> None:
        """Continue from `state` in a new generation, and drop the current state and all kept ones."""
        self._generation = generation
        # The last two versions: a restarted worker may find this shard one step ahead of another.
        self._previous = self._current = state.snapshot
        self._velocity = state.velocity
        self._updates = list(state.updates)
        self._repeated, self._max_staleness = state.repeated, state.max_staleness
        self._sum_staleness = state.sum_staleness
        self._kept: dict[int, ShardState] = {}
        self._changes.notify()

    async def join(self, rank: int) -> Joined:
        """Wait until the shard is open; return the generation and the worker's step.

        Raises:
            StaleGeneration: the program stops.
        """
        generation = await self._until_opened()
        return Joined(generation, self._updates[rank])

    async def take(self, generation: str, version: int) -> ShardState:
        """Wait for this version, one of `cuts`, and return its state, which is then no longer kept."""
        await self._until(generation, lambda: version in self._kept or version <= self._current.version)
        assert version in self._kept, f"the state of version {version} was taken, or is none of the cuts"
        state = self._kept.pop(version)
        self._changes.notify()
        return state

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
        """Wait until fewer than `_MAX_CUTS` states are kept."""
        await self._until(generation, lambda: len(self._kept) < _MAX_CUTS)

    def _is_repeated(self, rank: int, step: int) -> bool:
        """Return whether the gradient was applied before, when the worker died before it got the reply."""
        assert step <= self._updates[rank], f"worker {rank} skips from step {self._updates[rank]} to {step}"
        is_repeated = step < self._updates[rank]
        self._repeated += is_repeated
        return is_repeated


class SyncShard(ParameterShard):
    """A shard that makes one update from the mean of one gradient of each worker, summed in rank order.

    Version v contains the gradients of steps 0 to v - 1, so step v starts from version v.
    """

    async def open(self, generation: str, state: ShardState) -> None:
        """Continue from `state`, and also drop gradients that wait for those of other workers."""
        self._gradients: list[Vector | None] = [None] * len(state.updates)
        await super().open(generation, state)

    async def pull(self, generation: str, step: int) -> Snapshot:
        """Return the parameters from which this step's gradients are computed."""
        self._check(generation)
        return self._at(step)

    async def push(self, generation: str, rank: int, step: int, version: int, gradient: Vector) -> Snapshot:
        """Wait until all workers have pushed this step; return the next step's parameters."""
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


class AsyncShard(ParameterShard):
    """A shard that makes one update from each gradient, when it arrives.

    A gradient that is s updates late counts 1/(1 + s). With full weight, a delayed worker pushes an outdated direction,
    and training diverges. Source: Zhang et al., "Staleness-aware Async-SGD" (IJCAI 2016).
    """

    async def pull(self, generation: str, step: int) -> Snapshot:
        """Return the newest parameters."""
        self._check(generation)
        return self._current

    async def push(self, generation: str, rank: int, step: int, version: int, gradient: Vector) -> Snapshot:
        """Apply the gradient, which was computed from `version`; return the new parameters."""
        await self._until_there_is_room(generation)
        if not self._is_repeated(rank, step):
            staleness = self._current.version - version
            self._sum_staleness += staleness
            self._max_staleness = max(self._max_staleness, staleness)
            self._updates[rank] += 1
            self._apply(gradient / (1 + staleness))
        return self._current


SHARDS: dict[str, type[ParameterShard]] = {"sync": SyncShard, "async": AsyncShard}


def all_of(servers: Sequence[lp.CourierClient], method: str, *args: Any) -> list[Any]:
    """Call a method of all servers at the same time and return the results.

    Raises:
        StaleGeneration: as `results_of`.
    """
    return results_of([getattr(server.futures, method)(*args) for server in servers])


def results_of(calls: "Iterable[Future[Any]]") -> list[Any]:
    """Wait for the calls and return their results.

    Raises:
        StaleGeneration: a server raised it, or has died.
    """
    try:
        return [call.result() for call in list(calls)]
    except lp.Unavailable as error:
        raise StaleGeneration(str(error)) from error


class Parameters:
    """The states of all servers at one version, as a part of checkpoints. Empty before `go_back`.

    initial: returns all parameters of version 0. mode: the servers' mode, "sync" or "async".
    """

    def __init__(
        self, servers: Sequence[lp.CourierClient], initial: Callable[[], Vector], num_workers: int, mode: str
    ) -> None:
        self._servers = servers
        self._initial = initial
        self._num_workers = num_workers
        self._mode = mode
        self._generation = ""
        self.states: list[ShardState] = []

    @property
    def version(self) -> int:
        return self.states[0].snapshot.version

    def go_back(self, checkpoints: Checkpoints) -> None:
        """Start a new generation: open all servers with the newest checkpoint, or with the initial parameters.

        Raises:
            StaleGeneration: a server has died meanwhile; try again.
        """
        checkpoints.wait_until_written()
        if checkpoints.restore() is None:
            parts = np.array_split(self._initial(), len(self._servers))
            self.states = [at_the_beginning(part, self._num_workers) for part in parts]
        self._generation = uuid.uuid4().hex
        pairs = zip(self._servers, self.states, strict=True)
        results_of([server.futures.open(self._generation, state) for server, state in pairs])

    def take(self, version: int) -> None:
        """Wait until all servers have reached `version`, and take their states.

        Raises:
            StaleGeneration: a server has died, or the program stops.
        """
        calls = [server.futures.take(self._generation, version) for server in self._servers]
        # If a server has died, the others wait for a version that they never reach.
        ended, _ = wait(calls, return_when=FIRST_EXCEPTION)
        results_of(ended)
        self.states = results_of(calls)

    def whole(self) -> Vector:
        return np.concatenate([state.snapshot.parameters for state in self.states])

    def mean_staleness(self) -> float:
        return float(np.mean([state.snapshot.mean_staleness for state in self.states]))

    def state_dict(self) -> list[ShardState]:
        return self.states

    def load_state_dict(self, states: list[ShardState]) -> None:
        """Take the states of a checkpoint.

        Raises:
            CheckpointError: a program with another mode or other numbers wrote it: its versions mean something else.
        """
        workers, version = len(states[0].updates), states[0].snapshot.version
        self._check("num_servers", len(states), len(self._servers))
        self._check("num_workers", workers, self._num_workers)
        if workers > 1 and version:  # otherwise both modes count versions alike
            self._check("mode", "async" if sum(states[0].updates) == version else "sync", self._mode)
        self.states = states

    def _check(self, what: str, found: object, given: object) -> None:
        if found != given:
            raise CheckpointError(
                f"the checkpoint is of a program with {what}={found!r}, but this program has {given!r}: resume it "
                f"with {what}={found!r}"
            )
