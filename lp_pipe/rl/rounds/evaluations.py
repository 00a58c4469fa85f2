"""The evaluations of an experiment: which are due, and what those that were done have found."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.rl.experiment import Evaluation


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
