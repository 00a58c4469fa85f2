"""The table of experiments in free order, in which every part works as fast as the limiter lets it."""

import math
from typing import Any

from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio
from lp_pipe.rl.replay.table import Sample
from lp_pipe.rl.rounds.experiment_table import Delivery, ExperimentOptions, ExperimentTable, LearnerRound, RoundStart
from lp_pipe.rl.tree import leaves_of, row

_FREE_STEPS = 32  # of an actor between two deliveries: of less, calls would be a large part of the time
_MOST_BATCHES = 16  # that a learner gets at once: it learns from them with priorities of before


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
