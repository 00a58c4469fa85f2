"""All shards of a parameter server together: calls to each of them, and their states of one version."""

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
