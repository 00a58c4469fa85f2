"""The table of experiments in rounds, whose result is the same however it is distributed."""

import math
from typing import Any

from lp_pipe.rl.experiment import Rounds
from lp_pipe.rl.rounds.experiment_table import Delivery, ExperimentOptions, ExperimentTable, LearnerRound, RoundStart


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
