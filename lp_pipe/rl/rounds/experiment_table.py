"""A table that knows what each actor has done, and what actors and learners exchange with it in a round."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.errors import CheckpointError
from lp_pipe.rl.environment_loop import EnvironmentLoop, EpisodeReturn, LoopState
from lp_pipe.rl.experiment import Free, Rounds
from lp_pipe.rl.replay.snapshot import read_snapshots
from lp_pipe.rl.replay.table import Sample, Table, TableState
from lp_pipe.rl.seeding import generator_of
from lp_pipe.rl.tree import concatenated


@dataclass(frozen=True)
class ExperimentOptions:
    """What the table must know of an experiment.

    num_envs: of an actor. is_vector: they are VectorEnvs, which may take fewer steps than they are told.
    """

    table: Table
    batch_size: int
    seed: int
    order: Rounds | Free
    max_num_actor_steps: int
    num_actors: int
    num_envs: int
    is_vector: bool


class RoundStart(NamedTuple):
    """What an actor needs to know of a round. steps: at most so many. env_steps: of all actors, before the round."""

    number: int
    steps: int
    env_steps: int
    is_over: bool = False


class Delivery(NamedTuple):
    """What an actor has done in a round, and its state after it. episodes: those that have ended."""

    steps: int
    episodes: list[EpisodeReturn]
    restarts: int
    items: Any
    state: LoopState


def act_round(loop: EnvironmentLoop, start: RoundStart, learner_steps: int) -> Delivery:
    """Let an actor take its steps of a round."""
    restarts = loop.restarts
    counts = {"env_steps": start.env_steps, "learner_steps": learner_steps}
    done = loop.run(num_steps=start.steps, counts=counts)
    return Delivery(done.steps, done.episodes, loop.restarts - restarts, done.items, loop.state())


class ActorRecord(NamedTuple):
    """The newest round that an actor has delivered, and its state after it."""

    number: int
    state: LoopState | None


class LearnerRound(NamedTuple):
    """What a learner gets at a time. counts: of all until then, without learner_steps."""

    samples: list[Sample]
    counts: dict[str, int]
    is_last: bool


class ExperimentTable(ABC):
    """A table that keeps what each actor has done.

    So it says how many steps an actor takes next, and what the successor of a dead actor begins with. "Rounds" are an
    actor's deliveries, and the times that the learner gets samples; both are numbered from 1.
    """

    _STATE: tuple[str, ...] = ("options", "finished", "_counts", "_records", "_is_last")

    def __init__(self, options: ExperimentOptions) -> None:
        self.options = options
        self.table = TableState(options.table, generator_of(options.seed, "table"))
        self.finished = 0  # the newest round that was learned, with its priorities
        self._counts = {"env_steps": 0, "episodes": 0, "environment_restarts": 0}  # of what was learned
        self._records = [ActorRecord(0, None)] * options.num_actors
        self._is_last = False  # the newest round that was learned is the last one
        self._sampled: list[Any] = []  # keys of the round that is being learned

    @abstractmethod
    def start_of(self, actor: int, number: int) -> RoundStart | None:
        """Return what an actor has to do in a round; None: that depends on others who have not delivered yet."""

    @abstractmethod
    def deliver(self, actor: int, number: int, delivery: Delivery) -> None:
        """Take what an actor has done. What was delivered before is left as it is: the reply may have been lost."""

    @abstractmethod
    def may_go_on(self, actor: int) -> bool:
        """Return whether the limiter lets an actor begin its next round."""

    @abstractmethod
    def is_ready(self, number: int) -> bool:
        """Return whether `learn_from` may be called for the learner's next round."""

    @abstractmethod
    def learn_from(self, number: int) -> LearnerRound:
        """Return the samples of the learner's next round."""

    @property
    def is_over(self) -> bool:
        """Whether the last round was learned."""
        return self._is_last

    def record_of(self, actor: int) -> ActorRecord:
        return self._records[actor]

    def finish(self, number: int, priorities: Sequence[Any]) -> None:
        """Take the priorities of a round's samples."""
        for keys, values in zip(self._sampled, priorities, strict=True):
            if values is not None:
                self.table.update_priorities(keys, np.asarray(values))
        self.finished = number

    def check(self, found: ExperimentOptions) -> None:
        """Compare the options with those of a checkpoint.

        Raises:
            CheckpointError: they differ.
        """
        own = self.options
        different = [name for name in vars(own) if getattr(found, name) != getattr(own, name)]
        if different:
            values = ", ".join(f"{name}={getattr(found, name)!r} and {getattr(own, name)!r}" for name in different)
            raise CheckpointError(f"the checkpoint and the program are of different experiments: {values}")

    def state_dict(self) -> dict[str, Any]:
        return {**self.own_state(), "table": self.table.state_dict()}

    def own_state(self) -> dict[str, Any]:
        """Return the state without the table's."""
        return {name: copy.copy(getattr(self, name)) for name in self._STATE}

    def load(self, path: Path) -> None:
        """Continue from the state in a folder.

        Raises:
            CheckpointError: it is of an experiment with other options.
        """
        own, tables = read_snapshots(path)
        self.check(own["options"])
        for name in self._STATE:
            if name != "options":
                setattr(self, name, own[name])
        self.table.load_segments(tables[0], path, 0)

    def _is_new(self, actor: int, number: int, delivery: Delivery) -> bool:
        """Keep the state of an actor after its next round; return False if it was delivered before."""
        record = self._records[actor]
        if number <= record.number:
            return False
        assert number == record.number + 1, f"actor {actor} skips from round {record.number} to {number}"
        self._records[actor] = ActorRecord(number, delivery.state.after(record.state))
        return True

    def _count(self, delivery: Delivery) -> None:
        self._counts["env_steps"] += delivery.steps
        self._counts["episodes"] += len(delivery.episodes)
        self._counts["environment_restarts"] += delivery.restarts

    def _sample(self, count: int) -> LearnerRound:
        samples = [self.table.sample(self.options.batch_size) for _ in range(count)]
        self._sampled = [sample.keys for sample in samples]
        counts = {**self._counts, "inserts": self.table.inserts, "samples": self.table.samples}
        return LearnerRound(samples, counts, self._is_last)

    def _flushed(self, actor: int) -> Any:
        """Return what is pending in an actor's adders after its last round."""
        state = self._records[actor].state
        return None if state is None else concatenated([adder.flush() for adder in state.adders or ()])
