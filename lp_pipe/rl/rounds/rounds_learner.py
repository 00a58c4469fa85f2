"""A learner that keeps the weights that actors and evaluators still need."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lp_pipe.rl.experiment import Builder, Free, Learner, Network, Rounds, Spec
from lp_pipe.rl.replay.table import Sample
from lp_pipe.rl.seeding import generator_of


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
