"""How workers go on after one is gone or has come: they meet, and tell each other how far they are.

A step is committed when `agree` returns True: then every worker holds the whole sum. What one worker has committed,
all can finish:

    A   sums   agree: True   step 8 …          meet: 8 are committed                drops step 8, which comes again
    B   sums   agree: GenerationOver           meet: 7 are committed, has the sum   finishes step 7
    C   sums   agree: killed

With zero=1 each worker updates a shard and the mirror of another one. Those that are left then deal the shards anew,
and tell each other the parameters that they have updated. If a shard is lost with its mirror, all go back to the newest
checkpoint.

With mirror_every above 1 a worker copies its shards and those of another one in every so many steps. All go back to
the newest copies that all have, whatever has become of the step, and deal these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lp_pipe.collectives.backend import GenerationOver
from lp_pipe.data_parallel.shard_moves import STATE
from lp_pipe.data_parallel.training_state import TrainingState
from lp_pipe.data_parallel.workers import ReplicaWorkers


@dataclass(frozen=True)
class Position:
    """How far a worker is, as it tells the others when they meet.

    committed: the number of committed steps. holds_sum: whether it holds the whole sum of the next one.
    has_state: whether it has trained, or has the state of a worker that has. lost: shards that no worker has any more.
    members: the nodes that had all state when this worker last became the same as others.
    saves: whether it was saving a checkpoint, which all workers then do again.
    copied: the steps of which it has copies of shards.
    """

    node: str
    committed: int
    holds_sum: bool
    has_state: bool
    lost: str = ""
    members: tuple[str, ...] = ()
    saves: bool = False
    copied: tuple[int, ...] = ()


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
        self._members: tuple[str, ...] = ()  # when all were the same the last time
        self._dealt_in = -1  # the generation in which the shards were dealt
        self.saves = False  # whether this worker is saving a checkpoint
        self._lost = ""  # which shards are lost, until a checkpoint is read

    def own_position(self, *, is_committed: bool = False, holds_sum: bool = False) -> Position:
        """Return how far this worker is. is_committed: the current step is."""
        state = self._state
        name, committed = self._workers.node.name, state.step + is_committed
        copied = tuple(state.copied_steps())
        return Position(name, committed, holds_sum, state.is_trained, self._lost, self._members, self.saves, copied)

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

    def synchronize(self, positions: Sequence[Position]) -> bool:
        """Give the state of a worker that has trained to those that have not; at first rank 0's to all.

        Return whether all workers have to save a checkpoint of this step now.
        """
        while True:
            try:
                self._deal_shards(positions)
                if self._lost or any(not position.has_state for position in positions):
                    self._send_state(positions)
                self._keep_copies()
                self._state.is_trained = True
                self._members, self._lost = tuple(self._workers.membership.members), ""
                # Those that have gone back come to the checkpoint's step once more.
                return any(position.saves and position.committed == self._state.step for position in positions)
            except GenerationOver:
                if not self._workers.options.may_change:
                    raise
                positions = self.meet()

    def copy_shards(self) -> None:
        """Copy the shards as of this step; all workers call this, between two steps.

        Raises:
            GenerationOver: a worker is gone.
        """
        self._state.deal_shards(self._state.step, has_state=True)
        self._keep_copies()

    def _keep_copies(self) -> None:
        """Make the copies that were just taken those to go back to, once all workers have them."""
        if self._state.keeps_copies:
            self._state.keep_beside_copies()
            self._workers.backend.barrier(call=STATE)
            self._state.forget_older_copies()

    def deal_shards(self, positions: Sequence[Position]) -> list[Position]:
        """Make parameters complete that are updated in part, after a committed step; return how far all workers are."""
        while True:
            try:
                self._deal_shards(positions)
                return list(positions)
            except GenerationOver:
                positions = self.meet(self.own_position(is_committed=True))

    def _deal_shards(self, positions: Sequence[Position]) -> None:
        generation = self._workers.membership.generation
        if not self._state.moves_shards or self._dealt_in == generation:
            return
        if any(position.has_state for position in positions):
            own = positions[self._workers.membership.rank]
            step, has_state = self._state.step, own.has_state
            if self._state.keeps_copies:
                # One may have forgotten older copies only if all have had newer ones: they have one in common.
                step = max(set.intersection(*(set(one.copied) for one in positions if one.has_state)))
                has_state = step in own.copied
                if has_state:
                    self._state.go_back(step)
            if not self._state.deal_shards(step, has_state=has_state):
                alive = {position.node for position in positions if position.has_state}
                members = next(position.members for position in positions if position.has_state)
                gone = [node for node in members if node not in alive]
                self._lost = (
                    f"the optimizer's state of {', '.join(gone) or 'a worker'} is lost: with zero=1 each worker has a "
                    "mirror of the shard of one other worker, and both are gone at once. There is no checkpoint to go "
                    "back to: use steps(save_every=…)"
                )
                self._state.is_trained = False
        self._dealt_in = generation

    def _send_state(self, positions: Sequence[Position]) -> None:
        lost = self._lost or next((position.lost for position in positions if position.lost), "")
        root = next((rank for rank, position in enumerate(positions) if position.has_state), None)
        if root is None or self._lost:
            root = 0
            self._state.restore(lost)
            self._state.copy_state(root)
            self._state.deal_shards(self._state.step, has_state=True)
        else:
            self._state.copy_state(root)
