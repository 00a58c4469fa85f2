"""Runs an experiment in this process, in one thread."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from lp_pipe.errors import NodeError
from lp_pipe.rl.environment_loop import (
    Counter,
    EnvironmentFailed,
    EnvironmentLoop,
    LoopSteps,
    environment_seed,
    fitted,
    seed_sequence,
)
from lp_pipe.rl.experiment import ExperimentConfig, Network, Policy, Result, Spec
from lp_pipe.rl.rounds import RoundsLearner, fingerprint_of
from lp_pipe.rl.tree import row, stacked


def run_experiment(experiment: ExperimentConfig, num_actors: int = 1) -> Result:
    """Run an experiment whose actors take turns, and return what it led to.

    Raises:
        NodeError: an environment failed; its message names actor, episode, step, seed and leaf.
        ValueError: the parts do not fit together, before any step of an environment.
    """
    if num_actors < 1:
        raise ValueError(f"run_experiment: num_actors must be at least 1, got {num_actors}")
    with one_torch_thread():
        return _Experiment(experiment, num_actors).run()


class _Experiment:
    """The parts of an experiment in one process."""

    def __init__(self, experiment: ExperimentConfig, num_actors: int) -> None:
        self._config = experiment
        environments = [make_environment(experiment, index) for index in range(num_actors)]
        self._spec = spec = spec_of(experiment, environments[0])
        network = make_network(experiment, spec)
        self._acting, self._evaluated = copy.deepcopy(network), copy.deepcopy(network)
        self._learner = RoundsLearner(experiment.builder, network, spec, experiment.seed, experiment.order.lag)
        self._counter = Counter()
        self._counter.increment(env_steps=0, episodes=0)
        self._actors = [self._loop(index, one) for index, one in enumerate(environments)]
        if experiment.order.steps < self._actors[0].size:
            raise ValueError(
                f"Rounds: steps={experiment.order.steps} is less than one step of an actor's {self._actors[0].size} "
                "environments"
            )
        self._evaluator = Evaluator(experiment, spec, self._evaluated)
        self._curve: list[tuple[int, float]] = []
        self._returns: list[list[float]] = []
        self._scores: dict[int, float] = {}  # by the number of the round after which it was due

    def run(self) -> Result:
        number, is_last = 0, False
        while not is_last and not self._is_good_enough_before(number + 1):
            number += 1
            before = self._counter.get()["env_steps"]
            is_last = self._run_round(number)
            every = self._config.evaluation.every
            if is_last or self._counter.get()["env_steps"] // every > before // every:
                self._evaluate(number)
        if number not in self._scores:
            self._evaluate(number)
        return self._result()

    def _run_round(self, number: int) -> bool:
        """Act and learn; return whether it was the last round."""
        learner_steps, weights = self._learner.version_for(number)
        self._acting.load_state_dict(weights)
        counts = {**self._counter.get(), "learner_steps": learner_steps}
        left = self._config.max_num_actor_steps - counts["env_steps"]
        done: list[LoopSteps] = []
        for index, actor in enumerate(self._actors):
            with as_node_error("actor", index):
                done.append(actor.run(num_steps=min(left, self._config.order.steps), counts=counts))
            left -= done[-1].steps
        is_last = left == 0 or not any(steps.steps for steps in done)
        items = [steps.items for steps in done]
        if is_last:
            items = [one for pair in zip(items, [actor.flush() for actor in self._actors], strict=True) for one in pair]
        self._learner.learn(items)
        return is_last

    def _is_good_enough_before(self, number: int) -> bool:
        """Return whether an evaluation reached `stop_at`, of those that are in when a round begins."""
        stop_at = self._config.evaluation.stop_at
        due = number - 1 - self._config.order.lag
        return stop_at is not None and any(score >= stop_at for at, score in self._scores.items() if at <= due)

    def _evaluate(self, number: int) -> None:
        steps, weights = self._learner.versions[self._learner.round]
        self._evaluated.load_state_dict(weights)
        counts = {**self._counter.get(), "learner_steps": steps}
        with as_node_error("evaluator", 0):
            returns = self._evaluator.returns(counts)
        self._scores[number] = float(np.mean(returns))
        self._returns.append(returns)
        self._curve.append((counts["env_steps"], self._scores[number]))

    def _result(self) -> Result:
        table = self._learner.table
        learned = {"learner_steps": self._learner.steps, "inserts": table.inserts, "samples": table.samples}
        counts = {**self._counter.get(), **learned}
        learner = self._learner.learner
        parts = learner.variables(), learner.state_dict(), table.state_dict(), counts, self._curve, self._returns
        fingerprint = fingerprint_of(*parts)
        counts["environment_restarts"] = sum(actor.restarts for actor in self._actors)
        return Result(self._evaluator.policy_of_one(), self._curve[-1][1], counts, list(self._curve), fingerprint)

    def _loop(self, index: int, environments: Any) -> EnvironmentLoop:
        builder, config = self._config.builder, self._config
        size = len(environments) if isinstance(environments, list) else environments.num_envs
        lives = [0] * size

        def restart(place: int) -> Any:
            lives[place] += 1
            return make_one(config, index * size + place, lives[place])

        return EnvironmentLoop(
            environments,
            builder.make_policy(self._acting, self._spec, False),
            builder.make_adder(self._spec),
            self._counter,
            config.observers,
            seed=config.seed,
            index=index,
            restart=restart if config.on_environment_error == "restart" else None,
        )


class Evaluator:
    """Plays the episodes of an evaluation: the same seeds each time, none of which an actor has."""

    def __init__(self, experiment: ExperimentConfig, spec: Spec, network: Network) -> None:
        self._experiment = experiment
        self._spec = spec
        self._policy: Policy = experiment.builder.make_policy(network, spec, True)
        environment = make_one(experiment, 0, 0, "evaluation")
        self._loop = EnvironmentLoop(environment, self._policy, seed=experiment.seed, role="evaluation")

    def returns(self, counts: dict[str, int]) -> list[float]:
        """Play all episodes and return their sums of rewards; of a VectorEnv, each environment's first one counts."""
        found: list[float] = []
        for number in range(-(-self._experiment.evaluation.episodes // self._loop.size)):
            self._loop.begin_at(number)
            first: dict[int, float] = {}
            while len(first) < self._loop.size:
                for episode in self._loop.run(num_episodes=1, counts=counts).episodes:
                    first.setdefault(episode.environment, episode.total)
            found += [first[index] for index in range(self._loop.size)]
        return found[: self._experiment.evaluation.episodes]

    def policy_of_one(self) -> Callable[[Any], Any]:
        """Return the policy as a function of one observation; it starts each time from the initial state."""
        policy, space, seed = self._policy, self._spec.observation_space, self._experiment.seed

        def act(observation: Any) -> Any:
            initial = getattr(policy, "initial_state", None)
            generator = np.random.default_rng(seed_sequence(seed, "result", 0, 0))
            batch = stacked([fitted(space, observation, "observation")])
            counts = {"env_steps": 0, "actor_steps": 0, "learner_steps": 0}
            actions, _, _ = policy(batch, None if initial is None else initial(1), generator, counts)
            return row(actions, 0)

        return act


def make_one(experiment: ExperimentConfig, index: int, life: int, role: str = "environment") -> Any:
    """Return the environment that the factory makes for a number, and for how often it was made before."""
    factory = experiment.environment_factory
    if isinstance(factory, str):
        import gymnasium  # an extra, which only names of environments need

        return gymnasium.make(factory)
    return factory(environment_seed(experiment.seed, role, index, life))


def make_environment(experiment: ExperimentConfig, actor: int) -> Any:
    """Return an actor's environments: a VectorEnv, or a list.

    Raises:
        ValueError: envs_per_actor is neither 1 nor the number of a VectorEnv.
    """
    wanted = experiment.envs_per_actor
    first = make_one(experiment, actor * wanted, 0)
    if not hasattr(first, "single_observation_space"):
        return [first, *(make_one(experiment, actor * wanted + place, 0) for place in range(1, wanted))]
    if wanted not in (1, first.num_envs):
        raise ValueError(f"envs_per_actor must be 1 or {first.num_envs}, as the VectorEnv has; got {wanted}")
    return first


def spec_of(experiment: ExperimentConfig, environments: Any) -> Spec:
    """Return the spaces of one environment, with the builder's discount."""
    discount = float(getattr(experiment.builder, "discount", 1.0))
    if isinstance(environments, list):
        return Spec(environments[0].observation_space, environments[0].action_space, discount)
    return Spec(environments.single_observation_space, environments.single_action_space, discount)


def make_network(experiment: ExperimentConfig, spec: Spec) -> Network:
    """Return the learner's network, made with torch seeded if torch is in use."""
    torch = sys.modules.get("torch")
    isolated: AbstractContextManager[Any] = nullcontext() if torch is None else torch.random.fork_rng(devices=[])
    with isolated:
        if torch is not None:
            torch.manual_seed(environment_seed(experiment.seed, "network", 0, 0))
        return (experiment.network_factory or experiment.builder.make_network)(spec)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread, if it is in use: sums, and so fingerprints, must not depend on the number of cores."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    if torch is not None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


@contextmanager
def as_node_error(label: str, index: int) -> Iterator[None]:
    """Raise an environment's failure as the error of a node."""
    try:
        yield
    except EnvironmentFailed as error:
        raise NodeError(label, index, type(error).__name__, str(error)) from error
