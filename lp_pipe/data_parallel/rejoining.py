"""How workers go on after one is gone or has come: they meet, and tell each other how far they are.

A step is committed when `agree` returns True: then every worker holds the whole sum. What one worker has committed,
all can finish:

    A   sums   agree: True   step 8 …          meet: 8 are committed                drops step 8, which comes again
    B   sums   agree: GenerationOver           meet: 7 are committed, has the sum   finishes step 7
    C   sums   agree: killed
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lp_pipe.collectives.backend import GenerationOver
from lp_pipe.data_parallel.training_state import TrainingState
from lp_pipe.data_parallel.workers import ReplicaWorkers


@dataclass(frozen=True)
class Position:
    """How far a worker is, as it tells the others when they meet.

    committed: the number of committed steps. holds_sum: whether it holds the whole sum of the next one.
    has_state: whether it has trained, or has the state of a worker that has.
    """

    node: str
    committed: int
    holds_sum: bool
    has_state: bool


def is_step_finished(positions: Sequence[Position], step: int) -> bool:
    """Return whether a worker that holds the whole sum of a step may finish it; else all drop it."""
    trained = [one for one in positions if one.has_state]
    is_elsewhere = any(one.committed > step for one in trained)
    return is_elsewhere or all(one.holds_sum for one in trained)


class Rejoining:
    """The meetings of one worker with the others. Used by the thread that runs `train`."""

    def __init__(self, workers: ReplicaWorkers, state: TrainingState) -> None:
        self._workers = workers
        self._state = state

    def own_position(self, *, is_committed: bool = False, holds_sum: bool = False) -> Position:
        """Return how far this worker is. is_committed: the current step is."""
        state = self._state
        return Position(self._workers.node.name, state.step + is_committed, holds_sum, state.is_trained)

    def first_positions(self) -> list[Position]:
        """Return how far the workers of this generation are."""
        try:
            return self._workers.gathered(self.own_position())
        except GenerationOver:
            if not self._workers.options.may_change:
                raise
            return self.meet()

    def meet(self, own: Position | None = None) -> list[Position]:
        """Meet, as often as it takes, and return how far all workers are."""
        while True:
            try:
                self._workers.meet()
                return self._workers.gathered(own or self.own_position())
            except GenerationOver:
                if not self._workers.options.may_change:
                    raise

    def synchronize(self, positions: Sequence[Position]) -> None:
        """Give the state of a worker that has trained to those that have not; at first rank 0's to all."""
        while True:
            try:
                if any(not position.has_state for position in positions):
                    self._send_state(positions)
                self._state.is_trained = True
                return
            except GenerationOver:
                if not self._workers.options.may_change:
                    raise
                positions = self.meet()

    def _send_state(self, positions: Sequence[Position]) -> None:
        root = next((rank for rank, position in enumerate(positions) if position.has_state), None)
        if root is None:
            root = 0
            self._state.restore()
        self._state.copy_state(root)
