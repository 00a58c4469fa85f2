"""All shards of a parameter server as one: calls that reach each of them, and their states of one version."""

import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import numpy as np

import lp_pipe as lp
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.errors import CheckpointError
from lp_pipe.programs.parameter_shards import ShardState, StaleGeneration, Vector, at_the_beginning


def all_of(servers: Sequence[lp.CourierClient], method: str, *args: Any) -> list[Any]:
    """The method's results of all servers, which are called at the same time.

    Raises:
        StaleGeneration: as `results_of`.
    """
    return results_of([getattr(server.futures, method)(*args) for server in servers])


def results_of(calls: "Iterable[Future[Any]]") -> list[Any]:
    """What the servers answer.

    Raises:
        StaleGeneration: one of them says so, or has died.
    """
    try:
        return [call.result() for call in list(calls)]
    except lp.Unavailable as error:
        raise StaleGeneration(str(error)) from error


class Parameters:
    """All servers' states of one version, as a part of checkpoints; none before `go_back`.

    initial: makes the whole parameters of version 0. mode: of the servers.
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
        """Open all servers at the newest checkpoint, or at the beginning, under a new generation.

        Raises:
            StaleGeneration: one of them has died meanwhile; try again.
        """
        checkpoints.wait_until_written()
        if checkpoints.restore() is None:
            parts = np.array_split(self._initial(), len(self._servers))
            self.states = [at_the_beginning(part, self._num_workers) for part in parts]
        self._generation = uuid.uuid4().hex
        pairs = zip(self._servers, self.states, strict=True)
        results_of([server.futures.open(self._generation, state) for server, state in pairs])

    def take(self, version: int) -> None:
        """Wait for it.

        Raises:
            StaleGeneration: a server has died, or the program stops.
        """
        calls = [server.futures.take(self._generation, version) for server in self._servers]
        # Where one has died, the others wait for a version that never comes.
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
        """
        Raises:
            CheckpointError: another program wrote it: versions, and who waits for whom, would mean something else.
        """
        workers, version = len(states[0].updates), states[0].snapshot.version
        self._check("num_servers", len(states), len(self._servers))
        self._check("num_workers", workers, self._num_workers)
        if workers > 1 and version:  # else the modes count alike
            self._check("mode", "async" if sum(states[0].updates) == version else "sync", self._mode)
        self.states = states

    def _check(self, what: str, found: object, given: object) -> None:
        if found != given:
            raise CheckpointError(
                f"the checkpoint is of a program with {what}={found!r}, this one has {given!r}: resume it with "
                f"{what}={found!r}"
            )
