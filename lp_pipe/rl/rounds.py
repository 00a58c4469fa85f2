"""An experiment in rounds, whose result is the same however it is distributed. Needs no torch.

The parts are a table that knows what each actor has done, a learner, and the evaluations. `run_experiment` drives them
in one thread, the nodes of `make_distributed_experiment` each in its own process.
"""

import copy
import hashlib
import math
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.errors import CheckpointError
from lp_pipe.rl.environment_loop import EnvironmentLoop, EpisodeReturn, LoopState, seed_sequence
from lp_pipe.rl.experiment import Builder, Evaluation, Free, Learner, Network, Rounds, Spec
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio
from lp_pipe.rl.replay.snapshot import Snapshots, read_snapshots
from lp_pipe.rl.replay.table import Sample, Table, TableState
from lp_pipe.rl.tree import concatenated, leaves_of, row


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


class RoundsTable(ExperimentTable):
    """A table that takes the items of one round at a time, in the order of the actors."""

    _STATE = (*ExperimentTable._STATE, "_carry", "_deliveries", "_steps_before", "_last")

    def __init__(self, options: ExperimentOptions) -> None:
        super().__init__(options)
        assert isinstance(options.order, Rounds)
        self._steps = options.order.steps
        self._carry = 0.0
        self._deliveries: dict[int, dict[int, Delivery]] = {}  # by round and actor
        self._steps_before = {1: 0}  # of rounds, where all actors' steps before them are known
        self._last = 0  # the number of the last round, once it is known

    def start_of(self, actor: int, number: int) -> RoundStart | None:
        options = self.options
        before = self._env_steps_before(number)
        if before is None:
            return None
        left = options.max_num_actor_steps - before
        if left == 0 or 0 < self._last < number:
            return RoundStart(number, 0, before, True)
        for other in range(actor if left < self._steps * options.num_actors else 0):
            delivery = self._deliveries.get(number, {}).get(other)
            if delivery is None and options.is_vector:
                return None
            left -= min(left, self._steps) if delivery is None else delivery.steps
        return RoundStart(number, min(left, self._steps), before)

    def deliver(self, actor: int, number: int, delivery: Delivery) -> None:
        if not self._is_new(actor, number, delivery):
            return
        deliveries = self._deliveries.setdefault(number, {})
        deliveries[actor] = delivery
        if len(deliveries) == self.options.num_actors:
            steps = sum(one.steps for one in deliveries.values())
            after = self._steps_before[number + 1] = self._steps_before[number] + steps
            if after == self.options.max_num_actor_steps or not steps:
                self._last = number

    def may_go_on(self, actor: int) -> bool:
        return True

    def is_ready(self, number: int) -> bool:
        return self.finished == number - 1 and len(self._deliveries.get(number, ())) == self.options.num_actors

    def learn_from(self, number: int) -> LearnerRound:
        assert self.is_ready(number)
        self._is_last = number == self._last
        before = self.table.inserts
        deliveries = self._deliveries.pop(number)
        for actor, delivery in sorted(deliveries.items()):
            self._count(delivery)
            pending = self._flushed(actor) if self._is_last else None
            for items in (delivery.items, pending):
                if items is not None:
                    self.table.insert(items)
        del self._steps_before[number]
        return self._sample(self._num_samples(self.table.inserts - before))

    def own_state(self) -> dict[str, Any]:
        deliveries = {number: dict(one) for number, one in self._deliveries.items()}  # those of a round still grow
        return {**super().own_state(), "_deliveries": deliveries}

    def _env_steps_before(self, number: int) -> int | None:
        """Return the steps of all actors before a round; None: not known yet."""
        if number in self._steps_before or self.options.is_vector:
            return self._steps_before.get(number)
        whole_rounds = (number - 1) * self._steps * self.options.num_actors
        return min(whole_rounds, self.options.max_num_actor_steps)

    def _num_samples(self, num_items: int) -> int:
        """Return how many batches the items of a round are good for."""
        limiter, table = self.options.table.rate_limiter, self.table
        if table.size < limiter.min_size:
            return 0
        due = self._carry + num_items * limiter.samples_per_insert / self.options.batch_size
        if self.options.table.max_times_sampled:  # a queue may have dropped some of a round's items
            due = min(due, table.size * self.options.table.max_times_sampled / self.options.batch_size)
        self._carry = due - math.floor(due)
        return math.floor(due)


class FreeTable(ExperimentTable):
    """A table that takes items as soon as its limiter admits them, and gives the samples that it admits.

    An actor is told a number of steps; the sum of these and of what was done is never above the experiment's. Samples
    do not run ahead of the ratio by more than a batch, so at the end the ratio is kept, and not just its band.
    """

    _STATE = (*ExperimentTable._STATE, "_granted", "_finished_actors", "_pending", "_is_flushed")

    def __init__(self, options: ExperimentOptions) -> None:
        super().__init__(options)
        self._granted: dict[int, int] = {}  # steps that an actor was told to do and has not delivered
        self._finished_actors: set[int] = set()
        self._pending: list[tuple[int, Any]] = []  # by actor, items that the limiter holds back, the oldest first
        self._is_flushed = False

    def start_of(self, actor: int, number: int) -> RoundStart | None:
        options, done = self.options, self._counts["env_steps"]
        if actor not in self._granted and actor not in self._finished_actors:
            left = options.max_num_actor_steps - done - sum(self._granted.values())
            if left == 0 and self._granted:
                return None  # another actor may do less than it was told
            if left == 0:
                self._leave(actor)
            else:
                self._granted[actor] = min(left, max(_FREE_STEPS, 4 * options.num_envs))
        return RoundStart(number, self._granted.get(actor, 0), done, actor in self._finished_actors)

    def deliver(self, actor: int, number: int, delivery: Delivery) -> None:
        if not self._is_new(actor, number, delivery):
            return
        self._granted.pop(actor, None)
        self._count(delivery)
        if delivery.items is not None:
            self._pending.append((actor, delivery.items))
        if not delivery.steps:  # too few are left for its VectorEnv
            self._leave(actor)
        self._insert_pending()

    def may_go_on(self, actor: int) -> bool:
        return all(other != actor for other, _ in self._pending)

    def is_ready(self, number: int) -> bool:
        return self.finished == number - 1 and (self._may_sample() or self._has_all_items())

    def learn_from(self, number: int) -> LearnerRound:
        assert self.is_ready(number)
        samples: list[Sample] = []
        keys: list[Any] = []
        while len(samples) < _MOST_BATCHES and self._may_sample():
            found = self._sample(1)
            samples += found.samples
            keys += self._sampled
            self._insert_pending()
        self._is_last = self._has_all_items() and not self._may_sample()
        last = self._sample(0)
        self._sampled = keys
        return last._replace(samples=samples)

    def _has_all_items(self) -> bool:
        return self._is_flushed and not self._pending

    def _may_sample(self) -> bool:
        limiter, table, batch_size = self.options.table.rate_limiter, self.table, self.options.batch_size
        is_behind = table.inserts * limiter.samples_per_insert - table.samples >= limiter.min_diff
        if isinstance(limiter, SampleToInsertRatio):
            middle = limiter.samples_per_insert * limiter.min_size
            is_behind = table.inserts * limiter.samples_per_insert - table.samples > middle
        elif self._has_all_items() and limiter.min_diff == -math.inf:
            return False  # it would sample for ever
        return is_behind and table.may_sample(batch_size)

    def _leave(self, actor: int) -> None:
        """Note that an actor has nothing more to do; the last one's leave lets all adders give what is pending."""
        self._finished_actors.add(actor)
        if len(self._finished_actors) == self.options.num_actors and not self._is_flushed:
            self._is_flushed = True
            flushed = [(one, self._flushed(one)) for one in range(self.options.num_actors)]
            self._pending += [(one, items) for one, items in flushed if items is not None]
            self._insert_pending()

    def _insert_pending(self) -> None:
        """Insert what the limiter admits, in the order in which it came; a large delivery also in parts."""
        while self._pending:
            actor, items = self._pending[0]
            total = next(len(leaf) for _, leaf in leaves_of(items))
            count = total
            while count and not self.table.may_insert(count):
                count //= 2
            if not count:
                return
            self.table.insert(row(items, slice(count)))
            self._pending = self._pending[1:]
            if count < total:
                self._pending.insert(0, (actor, row(items, slice(count, None))))


_FREE_STEPS = 32  # of an actor between two deliveries: of less, calls would be a large part of the time
_MOST_BATCHES = 16  # that a learner gets at once: it learns from them with priorities of before


class SavedTable:
    """A table as a part of checkpoints, which it writes itself. state: None before there is one.

    table: None if only the state is wanted.
    """

    def __init__(self, table: ExperimentTable | None = None) -> None:
        self._table = table
        self._snapshots = Snapshots()
        self.state: Any = None

    def save_async(self, path: Path) -> "Future[dict[str, str]]":
        """Take the state of this moment; write it in a thread."""
        assert self._table is not None
        own = pickle.loads(pickle.dumps(self._table.own_state(), protocol=5))  # the loops of this process change it
        self._snapshots.take(own, [self._table.table])
        return self._snapshots.write_in_thread(path)

    def load(self, path: Path) -> None:
        """Continue from the state in a folder; if there is no table, keep the state."""
        if self._table is not None:
            self._table.load(path)
        elif (table := read_table(path)) is not None:
            self.state = table.state_dict()


def read_table(path: Path) -> ExperimentTable | None:
    """Return the table in a folder of a checkpoint; None: there was no table yet."""
    own, _ = read_snapshots(path)
    if own is None:
        return None
    table = make_table(own["options"])
    table.load(path)
    return table


def make_table(options: ExperimentOptions) -> ExperimentTable:
    """Return the table for the order of an experiment."""
    return RoundsTable(options) if isinstance(options.order, Rounds) else FreeTable(options)


class RoundsLearner:
    """A learner that learns once a round, and keeps the weights that actors and evaluators still need.

    versions: the steps and weights after each learner round, the newest `lag + 1` of them; round 0 is the initial
    weights. An evaluation needs no older ones: a round does not begin before those of `lag + 1` rounds before are in.
    In free order: the newest and those in `pinned`.
    """

    def __init__(self, builder: Builder, network: Network, spec: Spec, seed: int, order: Rounds | Free) -> None:
        self._generator = generator_of(seed, "learner")
        self.learner: Learner = builder.make_learner(network, spec, self._generator)
        self._order = order
        self.round = 0
        self.steps = 0
        self.newest = 0, copy.deepcopy(self.learner.variables())  # learner steps and weights
        self.versions: dict[int, tuple[int, Any]] = {0: self.newest}
        self.pinned: set[int] = set()
        self.metrics: dict[str, float] = {}

    def version_for(self, number: int) -> tuple[int, Any]:
        """Return the learner steps and weights with which actors act in a round."""
        if isinstance(self._order, Free):
            return self.newest
        return self.versions[max(0, number - 1 - self._order.lag)]

    def learn(self, samples: Sequence[Sample], before_step: Callable[[int], object] | None = None) -> list[Any]:
        """Do a round's steps and return the priorities of each sample, or None where they stay as they are.

        before_step: is told how many steps of the round are done.
        """
        priorities = []
        for number, sample in enumerate(samples):
            if before_step is not None:
                before_step(number)
            update = self.learner.step(sample)
            priorities.append(update.priorities)
            self.metrics = {name: float(value) for name, value in update.metrics.items()}
        self.steps += len(samples)
        self.newest = self.versions[self.round + 1] = self.steps, copy.deepcopy(self.learner.variables())
        self.round += 1
        if isinstance(self._order, Rounds):
            self.versions.pop(self.round - self._order.lag - 1, None)
        else:
            for old in [number for number in self.versions if number < self.round and number not in self.pinned]:
                del self.versions[old]
        return priorities

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(),
            "generator": self._generator.bit_generator.state,
            "round": self.round,
            "steps": self.steps,
            "versions": dict(self.versions),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self._generator.bit_generator.state = state["generator"]
        self.round, self.steps, self.versions = state["round"], state["steps"], dict(state["versions"])
        self.newest, self.pinned = self.versions[self.round], set(self.versions) - {self.round}


class EvaluationDue(NamedTuple):
    """An evaluation of the weights after a learner round. counts: of the experiment then. is_filmed: to a video."""

    number: int
    counts: dict[str, int]
    is_filmed: bool = False


class Evaluations:
    """When an experiment's agent is evaluated, with what result, and whether that is good enough to end."""

    def __init__(self, options: Evaluation | None = None) -> None:
        """options: None if only what was evaluated is of interest."""
        self._options = options or Evaluation()
        self.counts = {"env_steps": 0, "episodes": 0, "environment_restarts": 0, "inserts": 0, "samples": 0}
        self.counts["learner_steps"] = 0
        self.round = 0
        self._due: dict[int, EvaluationDue] = {}
        self._returns: dict[int, tuple[int, list[float]]] = {}  # by round, after how many environment steps

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The environment steps and score of every evaluation."""
        return [(env_steps, float(np.mean(returns))) for _, (env_steps, returns) in sorted(self._returns.items())]

    @property
    def returns(self) -> list[list[float]]:
        """The returns of the episodes of every evaluation."""
        return [returns for _, (_, returns) in sorted(self._returns.items())]

    def add_round(self, number: int, counts: Mapping[str, int], is_last: bool) -> bool:
        """Take the counts after a round; return whether they make an evaluation due."""
        before, self.counts, self.round = self.counts["env_steps"], dict(counts), number
        is_due = is_last or counts["env_steps"] // self._options.every > before // self._options.every
        if is_due:
            self.request()
        return is_due

    def request(self) -> None:
        """Make an evaluation due after the newest round, unless there is one."""
        if self.round not in self._returns and self.round not in self._due:
            self._due[self.round] = EvaluationDue(self.round, self.counts, self._is_film_due())

    def _is_film_due(self) -> bool:
        every = self._options.video_every
        due = [one.counts["env_steps"] for one in self._due.values()]
        before = max([0, *due, *(env_steps for env_steps, _ in self._returns.values())])
        return every is not None and self.counts["env_steps"] // every > before // every

    def all_due(self) -> list[int]:
        """Return the rounds of the evaluations that were not done."""
        return sorted(self._due)

    def next_due(self) -> EvaluationDue | None:
        """Return the oldest evaluation that was not done."""
        return self._due[min(self._due)] if self._due else None

    def add(self, number: int, returns: Sequence[float]) -> None:
        """Take the returns of an evaluation; one that is there already stays."""
        due = self._due.pop(number, None)
        if due is not None:
            self._returns[number] = due.counts["env_steps"], list(returns)

    def are_in(self, number: int) -> bool:
        """Return whether no evaluation is to be done of those due up to a round."""
        return all(due > number for due in self._due)

    def is_good_enough(self, number: int) -> bool:
        """Return whether an evaluation up to a round has reached `stop_at`."""
        stop_at = self._options.stop_at
        scores = [float(np.mean(returns)) for at, (_, returns) in self._returns.items() if at <= number]
        return stop_at is not None and any(score >= stop_at for score in scores)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "round": self.round, "due": dict(self._due), "returns": dict(self._returns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self.round = dict(state["counts"]), state["round"]
        self._due, self._returns = dict(state["due"]), dict(state["returns"])


def act_round(loop: EnvironmentLoop, start: RoundStart, learner_steps: int) -> Delivery:
    """Let an actor take its steps of a round."""
    restarts = loop.restarts
    counts = {"env_steps": start.env_steps, "learner_steps": learner_steps}
    done = loop.run(num_steps=start.steps, counts=counts)
    return Delivery(done.steps, done.episodes, loop.restarts - restarts, done.items, loop.state())


def fingerprint_of(*trees: Any) -> str:
    """Return the sha256 of trees of arrays, tensors, numbers and strings: of structure, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tree in trees:
        _add_to(digest, tree)
    return digest.hexdigest()


def _add_to(digest: "hashlib._Hash", tree: Any) -> None:
    if isinstance(tree, Mapping):
        digest.update(b"{")
        for name in sorted(tree, key=repr):
            digest.update(repr(name).encode())
            _add_to(digest, tree[name])
        digest.update(b"}")
    elif isinstance(tree, tuple | list) and not (tree and all(type(value) is int for value in tree)):
        digest.update(b"[")
        for value in tree:
            _add_to(digest, value)
        digest.update(b"]")
    elif tree is None or isinstance(tree, bool | int | float | str | bytes | tuple | list):
        digest.update(f"{tree!r};".encode())
    else:
        array = np.asarray(_bytes_of(tree) if hasattr(tree, "detach") else tree)
        if array.dtype == object:
            raise TypeError(f"a fingerprint needs arrays, tensors, numbers and strings, got {type(tree).__name__}")
        digest.update(f"{array.dtype}{tuple(tree.shape)}:".encode())
        digest.update(np.ascontiguousarray(array).tobytes())


def _bytes_of(tensor: Any) -> Any:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return whole.view(sys.modules["torch"].uint8).numpy()  # numpy has no bfloat16


def generator_of(seed: int, role: str) -> np.random.Generator:
    """Return the generator of a part of which there is one in an experiment."""
    return np.random.default_rng(seed_sequence(seed, role, 0, 0))
