"""The nodes that play episodes: actors, and the evaluator."""

import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import lp_pipe as lp
from lp_pipe.programs.generations import StaleGeneration, has_stopped
from lp_pipe.programs.waiting import until_the_stop
from lp_pipe.rl.distributed.inference import RemotePolicy
from lp_pipe.rl.distributed.repeated_deaths import RepeatedDeaths
from lp_pipe.rl.environment_loop import EnvironmentLoop
from lp_pipe.rl.evaluator import Evaluator
from lp_pipe.rl.experiment import ExperimentConfig, Spec
from lp_pipe.rl.experiment_parts import make_environment, make_loop, make_network
from lp_pipe.rl.metrics import ActorMetrics, log_evaluation, log_in_node
from lp_pipe.rl.rounds.experiment_table import Delivery, RoundStart, act_round


@until_the_stop()
def act(experiment: ExperimentConfig, spec: Spec, replay: Any, learner: Any, inference: Any) -> None:
    """Act in rounds, for one generation after another; the function of an actor's node."""
    actor = _Actor(experiment, spec, replay, learner, inference)
    while not lp.stop_event().is_set():
        try:
            actor.act_for_a_generation()
        except (StaleGeneration, lp.Unavailable):
            has_stopped()


class _Actor:
    """The actor of a node, in one generation after another."""

    def __init__(self, experiment: ExperimentConfig, spec: Spec, replay: Any, learner: Any, inference: Any) -> None:
        self._config, self._spec, self._replay, self._learner = experiment, spec, replay, learner
        self._inference = inference
        self._index = lp.context().index
        self._deaths = RepeatedDeaths(f"actor-{self._index}")
        with self._deaths.watched():
            self._network = make_network(experiment, spec)
        self._generation: str | None = None
        self._round = 0
        self._metrics = ActorMetrics(log_in_node, experiment.observers)

    def act_for_a_generation(self) -> None:
        """Act until the generation ends, which raises StaleGeneration or Unavailable."""
        generation, record = _result(self._replay.futures.join(self._index, self._generation))
        with self._deaths.watched():
            self._deaths.at(-1, -1)  # an environment may end the process
            environments = make_environment(self._config, self._index)
            policy = self._config.builder.make_policy(self._network, self._spec, False)
            if self._inference is not None:
                policy = RemotePolicy(policy, self._inference)
            loop = make_loop(self._config, self._spec, policy, self._index, environments, self._mark)
        try:
            if record.state is not None:
                with self._deaths.watched():
                    loop.restore(record.state)
            start = _result(self._replay.futures.start(generation, self._index, record.number + 1))
            while not start.is_over:
                begun = time.perf_counter()
                needs_weights = self._inference is None
                version = _result(self._learner.futures.begin(generation, start.number, needs_weights))
                if version is None:
                    break
                self._metrics.waited_s += time.perf_counter() - begun
                delivery = self._act(loop, start, *version)
                begun = time.perf_counter()
                start = _result(self._replay.futures.deliver(generation, self._index, start.number, delivery))
                self._metrics.waited_s += time.perf_counter() - begun
        finally:
            loop.close()
        self._generation = generation
        _result(self._replay.futures.outlive(generation))

    def _act(self, loop: EnvironmentLoop, start: RoundStart, learner_steps: int, weights: Any) -> Delivery:
        self._round = start.number
        with self._deaths.watched():
            if weights is not None:
                self._network.load_state_dict(weights)
            delivery = act_round(loop, start, learner_steps)
            self._metrics.add(loop, start, delivery)  # it calls observers, which may fail
        return delivery

    def _mark(self, actor_steps: int, episode: int, step: int, seed: int) -> None:
        self._deaths.at(self._round, actor_steps, episode, step, seed)


@until_the_stop()
def evaluate(experiment: ExperimentConfig, spec: Spec, learner: Any, counter: Any) -> None:
    """Do the evaluations that are due; the function of an evaluator's node."""
    deaths = RepeatedDeaths(f"evaluator-{lp.context().index}")
    number = 0
    with deaths.watched():
        network = make_network(experiment, spec)
        folder = Path(lp.context().run_dir)
        evaluator = Evaluator(experiment, spec, network, folder, lambda *place: deaths.at(number, *place))
    while not lp.stop_event().is_set():
        try:
            generation, due = _result(counter.futures.next_due())
            number = due.number
            weights = learner.weights(generation, number)
            with deaths.watched():
                network.load_state_dict(weights)
                returns = evaluator.returns(due)
            counter.add(generation, number, returns)
            log_evaluation(log_in_node, due, returns)
        except (StaleGeneration, lp.Unavailable):
            has_stopped()


def _result(call: "Future[Any]") -> Any:
    """Wait for a call that waits for what others do, which may take long: a wait for a future is no hang."""
    wait([call])
    return call.result()
