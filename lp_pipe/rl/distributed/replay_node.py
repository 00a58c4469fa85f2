"""The node with the table of an experiment."""

from pathlib import Path
from typing import Any, NamedTuple

from lp_pipe.programs.generations import GenerationServer
from lp_pipe.rl.replay.snapshot import Snapshots
from lp_pipe.rl.rounds.experiment_table import ActorRecord, Delivery, ExperimentOptions, ExperimentTable, RoundStart
from lp_pipe.rl.rounds.saved_table import make_table, read_table
from lp_pipe.rl.tree import stacked


class JoinedActor(NamedTuple):
    """What an actor begins a generation with."""

    generation: str
    record: ActorRecord


class PackedRound(NamedTuple):
    """What a learner gets for a round, with the samples in one tree, whose leaves have a first axis of samples."""

    num_samples: int
    samples: Any
    counts: dict[str, int]
    is_last: bool


class ExperimentReplay(GenerationServer):
    """The node with the table, which also knows what each actor has done."""

    def __init__(self) -> None:
        super().__init__()
        self._table: ExperimentTable | None = None
        self._snapshots = Snapshots()

    async def open(self, generation: str, options: ExperimentOptions) -> bool:
        """Begin a generation; return whether the last round was learned."""
        if self._table is None:
            self._table = make_table(options)
        self._table.check(options)
        self._generation = generation
        self._changes.notify()
        return self._table.is_over

    async def join(self, actor: int, after: str | None) -> JoinedActor:
        """Wait for another generation than `after`, and return what the actor has done.

        Raises:
            StaleGeneration: the program stops.
        """
        generation = await self._until_opened(after)
        return JoinedActor(generation, self._opened.record_of(actor))

    async def start(self, generation: str, actor: int, number: int) -> RoundStart:
        """Wait until it is known what the actor does in a round."""
        found: list[RoundStart] = []

        def is_known() -> bool:
            start = self._opened.start_of(actor, number)
            found.extend([] if start is None else [start])
            return start is not None

        await self._until(generation, is_known)
        return found[0]

    async def deliver(self, generation: str, actor: int, number: int, delivery: Delivery) -> RoundStart:
        """Take what an actor has done in a round; wait until it is known what it does in the next one."""
        self._check(generation)
        self._opened.deliver(actor, number, delivery)
        self._changes.notify()
        await self._until(generation, lambda: self._opened.may_go_on(actor))
        return await self.start(generation, actor, number + 1)

    async def learn(self, generation: str, number: int) -> PackedRound:
        """Wait until all actors have delivered a round, and return the samples that it is good for."""
        await self._until(generation, lambda: self._opened.is_ready(number))
        samples, counts, is_last = self._opened.learn_from(number)
        self._changes.notify()
        return PackedRound(len(samples), stacked(samples) if samples else None, counts, is_last)

    async def finish(self, generation: str, number: int, priorities: list[Any]) -> None:
        """Take the priorities of a round's samples."""
        self._check(generation)
        self._opened.finish(number, priorities)
        self._changes.notify()

    async def info(self) -> dict[str, dict[str, int]]:
        """Return the counts of the table."""
        return {"replay": {} if self._table is None else self._table.table.info()}

    async def take_snapshot(self) -> None:
        """Take all that depends on the past as it is now, for `write_snapshot`."""
        table = self._table
        self._snapshots.take(None if table is None else table.own_state(), [] if table is None else [table.table])

    def write_snapshot(self, path: Path) -> dict[str, str]:
        """Write the snapshot into a new folder; return the sha256 of the files. The table goes on meanwhile."""
        return self._snapshots.write(path)

    async def load_state_dict(self, path: Path) -> None:
        """Continue from the state in a folder, in the next generation."""
        self._generation, self._table = None, None
        self._table = read_table(path)
        self._changes.notify()

    @property
    def _opened(self) -> ExperimentTable:
        assert self._table is not None, "calls with a generation come after `open`"
        return self._table
