"""The numbers that the parts of an experiment log, each with `env_steps`: in one process as in nodes."""

import time
from collections.abc import Callable, Mapping, Sequence

import lp_pipe as lp
from lp_pipe.rl.environment_loop import EnvironmentLoop
from lp_pipe.rl.observers import Observer
from lp_pipe.rl.rounds.evaluations import EvaluationDue
from lp_pipe.rl.rounds.experiment_table import Delivery, RoundStart
from lp_pipe.rl.rounds.rounds_learner import RoundsLearner

_LOG_EVERY_S = 1.0

Log = Callable[[Mapping[str, float], int], object]  # takes numbers by name, and the step


class ActorMetrics:
    """Logs what an actor does, at most once a second, after rounds in which an episode has ended.

    waited_s: seconds in which it had nothing to do; its owner adds to them.
    """

    def __init__(self, log: Log, observers: Sequence[Observer]) -> None:
        self._log, self._observers = log, observers
        self._limit = _OncePerSecond()
        self.waited_s = 0.0

    def add(self, loop: EnvironmentLoop, start: RoundStart, delivery: Delivery) -> None:
        if not delivery.episodes or not self._limit.is_due():
            return
        _, total, length = delivery.episodes[-1]
        seconds = {f"actor/{name}_s": value for name, value in {**loop.seconds, "wait": self.waited_s}.items()}
        observed = {name: value for one in self._observers for name, value in one.metrics().items()}
        own = {"episode_return": total, "episode_length": length, "env_steps": start.env_steps}
        self._log({**observed, **seconds, **own}, start.env_steps)


class LearnerMetrics:
    """Logs what a learner does, at most once a second and after the last round."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._limit = _OncePerSecond()

    def add(self, learner: RoundsLearner, counts: Mapping[str, int], weights_age: int, is_last: bool) -> None:
        """counts: after the round. weights_age: learner steps since the weights with which actors acted in it."""
        if not self._limit.is_due() and not is_last:
            return
        ratio = counts["samples"] / counts["inserts"] if counts["inserts"] else 0.0
        metrics = {f"learner/{name}": value for name, value in learner.metrics.items()}
        own = {"samples_per_insert": ratio, "weights_age": weights_age, "env_steps": counts["env_steps"]}
        self._log({**metrics, **own}, counts["learner_steps"])


def log_evaluation(log: Log, due: EvaluationDue, returns: Sequence[float]) -> None:
    env_steps = due.counts["env_steps"]
    log({"evaluator/return": sum(returns) / len(returns), "env_steps": env_steps}, env_steps)


class _OncePerSecond:
    """Says whether a second has passed since it last said so."""

    def __init__(self) -> None:
        self._last = -float("inf")

    def is_due(self) -> bool:
        now = time.monotonic()
        is_due = now >= self._last + _LOG_EVERY_S
        self._last = now if is_due else self._last
        return is_due


def log_in_node(metrics: Mapping[str, float], step: int) -> None:
    """Log numbers as those of the node that calls this."""
    lp.log_metrics(metrics, step=step)
