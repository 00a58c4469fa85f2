"""Runs an experiment in this process, in one thread, and reads what one has led to."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from lp_pipe.checkpoint import Checkpoints
from lp_pipe.errors import CheckpointError, NodeError
from lp_pipe.rl.environment_loop import EnvironmentFailed, EnvironmentLoop, environment_seed, fitted, seed_sequence
from lp_pipe.rl.experiment import ExperimentConfig, Network, Policy, Result, Rounds, Spec
from lp_pipe.rl.metrics import ActorMetrics, LearnerMetrics, Log, log_evaluation
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio
from lp_pipe.rl.replay.table import Table
from lp_pipe.rl.rounds import (
    EvaluationDue,
    Evaluations,
    ExperimentOptions,
    RoundsLearner,
    SavedTable,
    act_round,
    fingerprint_of,
    make_table,
)
from lp_pipe.rl.tree import row, stacked
from lp_pipe.rl.video import FilmedEnvironment, check_can_film
from lp_pipe.telemetry.metrics import MetricsLog, as_numbers
from lp_pipe.telemetry.run_folder import RunFolder


def run_experiment(experiment: ExperimentConfig, num_actors: int = 1, run_dir: Path | str | None = None) -> Result:
    """Run an experiment whose actors take turns, and return what it led to.

    run_dir: a folder for checkpoints, metrics.jsonl and videos. An experiment that was interrupted goes on from the
    newest checkpoint in it.

    Raises:
        NodeError: an environment failed; its message names actor, episode, step, seed and leaf.
        ValueError: the parts do not fit together, before any step of an environment.
        CheckpointError: the folder has checkpoints of another experiment.
    """
    if num_actors < 1:
        raise ValueError(f"run_experiment: num_actors must be at least 1, got {num_actors}")
    with one_torch_thread():
        return _Experiment(experiment, num_actors, None if run_dir is None else Path(run_dir)).run()


class _Experiment:
    """The parts of an experiment in one process."""

    def __init__(self, experiment: ExperimentConfig, num_actors: int, run_dir: Path | None) -> None:
        self._config = experiment
        environments = [make_environment(experiment, index) for index in range(num_actors)]
        parts = ExperimentParts(experiment, num_actors, environments[0])
        self._spec = spec = parts.spec
        self._acting, self._evaluated = copy.deepcopy(parts.network), copy.deepcopy(parts.network)
        self._table, self._learner = make_table(parts.options), parts.learner
        if experiment.evaluation.video_every is not None and run_dir is None:
            raise ValueError("run_experiment: video_every needs a folder for the videos: give run_dir")
        self._evaluations = Evaluations(experiment.evaluation)
        acting = experiment.builder.make_policy(self._acting, spec, False)
        self._actors = [make_loop(experiment, spec, acting, *actor) for actor in enumerate(environments)]
        self._evaluator = Evaluator(experiment, spec, self._evaluated, run_dir)
        self._checkpoints: Checkpoints | None = None
        self._metrics: MetricsLog | None = None
        self._actor_metrics = [
            ActorMetrics(self._log_of(f"actor/{index}"), experiment.observers) for index in range(num_actors)
        ]
        self._learner_metrics = LearnerMetrics(self._log_of("learner/0"))
        if run_dir is not None:
            keep_experiment(run_dir, experiment, spec)
            self._metrics = MetricsLog(RunFolder(run_dir).metrics)
            self._checkpoints = Checkpoints(self._parts(), run_dir / "checkpoints")
            if self._checkpoints.restore() is not None:
                for index, actor in enumerate(self._actors):
                    if (state := self._table.record_of(index).state) is not None:
                        with as_node_error("actor", index):
                            actor.restore(state)

    def run(self) -> Result:
        try:
            lag = self._config.order.lag if isinstance(self._config.order, Rounds) else 0
            while not self._table.is_over and not self._evaluations.is_good_enough(self._learner.round - lag):
                self._act()
                while self._table.is_ready(self._learner.round + 1) and not self._table.is_over:
                    self._learn(self._learner.round + 1)
            self._evaluations.request()
            self._evaluate()
            if self._checkpoints is not None:
                self._checkpoints.save(self._learner.round)
            parts: dict[str, Any] = {"learner": self._learner, "replay": self._table, "counter": self._evaluations}
            states = {name: part.state_dict() for name, part in parts.items()}
            return result_of(self._config, self._spec, states, self._evaluated)
        finally:
            for actor in self._actors:
                actor.close()
            if self._checkpoints is not None:
                self._checkpoints.wait_until_written()
            if self._metrics is not None:
                self._metrics.close()

    def _act(self) -> None:
        """Let the actors take turns, each in its next round."""
        for index, actor in enumerate(self._actors):
            number = self._table.record_of(index).number + 1
            start = self._table.start_of(index, number)
            if start is None or start.is_over or not self._table.may_go_on(index):
                continue
            learner_steps, weights = self._learner.version_for(number)
            self._acting.load_state_dict(weights)
            with as_node_error("actor", index):
                delivery = act_round(actor, start, learner_steps)
            if self._metrics is not None:
                self._actor_metrics[index].add(actor, start, delivery)
            self._table.deliver(index, number, delivery)

    def _learn(self, number: int) -> None:
        before, age = self._learner.steps, self._learner.steps - self._learner.version_for(number)[0]
        given = self._table.learn_from(number)
        self._table.finish(number, self._learner.learn(given.samples))
        counts = {**given.counts, "learner_steps": self._learner.steps}
        self._learner_metrics.add(self._learner, counts, age, given.is_last)
        self._evaluations.add_round(number, counts, given.is_last)
        self._evaluate()
        every = self._config.checkpoint_every
        if self._checkpoints is not None and self._learner.steps // every > before // every:
            self._checkpoints.save(number, wait=False)

    def _evaluate(self) -> None:
        """Do the evaluation that is due after the newest round, if there is one."""
        if (due := self._evaluations.next_due()) is not None:
            self._evaluated.load_state_dict(self._learner.versions[due.number][1])
            with as_node_error("evaluator", 0):
                returns = self._evaluator.returns(due)
            self._evaluations.add(due.number, returns)
            log_evaluation(self._log_of("evaluator/0"), due, returns)

    def _log_of(self, node: str) -> Log:
        """Return what takes the metrics of a part, which is a node of that name in a distributed experiment."""

        def log(metrics: Mapping[str, float], step: int) -> None:
            if self._metrics is not None:
                self._metrics.record(node, *as_numbers(metrics, step))

        return log

    def _parts(self) -> dict[str, Any]:
        return {"learner": self._learner, "replay": SavedTable(self._table), "counter": self._evaluations}


class ExperimentParts:
    """What an experiment is made of, besides the actors. environments: of an actor; they show whether all fits.

    Raises:
        ValueError: the parts do not fit together.
    """

    def __init__(self, experiment: ExperimentConfig, num_actors: int, environments: Any) -> None:
        is_vector = not isinstance(environments, list)
        self.spec = spec = spec_of(experiment, environments)
        size = environments.num_envs if is_vector else len(environments)
        order, builder = experiment.order, experiment.builder
        if isinstance(order, Rounds) and order.steps < size:
            raise ValueError(f"Rounds: steps={order.steps} is less than one step of an actor's {size} environments")
        self.network = make_network(experiment, spec)
        if experiment.evaluation.video_every is not None:
            filmed = make_one(experiment, 0, 0, "evaluation")
            check_can_film(filmed)
            filmed.close()
        table, batch_size, steps = builder.make_replay_table(spec), builder.batch_size, experiment.max_num_actor_steps
        check_band(table, batch_size)
        self.learner = RoundsLearner(builder, self.network, spec, experiment.seed, order)
        self.options = ExperimentOptions(table, batch_size, experiment.seed, order, steps, num_actors, size, is_vector)


def check_band(table: Table, batch_size: int) -> None:
    """Refuse a rate limiter under which actors and learner would wait for each other.

    Raises:
        ValueError: its error_buffer is below a batch.
    """
    limiter = table.rate_limiter
    if isinstance(limiter, SampleToInsertRatio) and (found := (limiter.max_diff - limiter.min_diff) / 2) < batch_size:
        raise ValueError(
            f"SampleToInsertRatio: error_buffer={found:g} is too narrow for batches of {batch_size}: it must be at "
            f"least {max(float(batch_size), limiter.samples_per_insert):g}"
        )


def make_loop(
    experiment: ExperimentConfig,
    spec: Spec,
    policy: Policy,
    index: int,
    environments: Any,
    before_call: Callable[[int, int, int, int], object] | None = None,
) -> EnvironmentLoop:
    """Return the loop of an actor."""
    return EnvironmentLoop(
        environments,
        policy,
        experiment.builder.make_adder(spec),
        None,
        experiment.observers,
        seed=experiment.seed,
        index=index,
        make=lambda place, life: make_one(experiment, index * experiment.envs_per_actor + place, life),
        restarts=experiment.on_environment_error == "restart",
        is_recording=True,
        before_call=before_call,
    )


def result_of(experiment: ExperimentConfig, spec: Spec, states: Mapping[str, Any], network: Network) -> Result:
    """Return what an experiment has led to, from the states of its parts. network: for the result's policy."""
    learner, table, evaluations = states["learner"], states["replay"], Evaluations()
    evaluations.load_state_dict(states["counter"])
    variables = learner["versions"][learner["round"]][1]
    counts = dict(evaluations.counts)
    restarts = counts.pop("environment_restarts")
    curve, returns = evaluations.curve, evaluations.returns
    fingerprint = fingerprint_of(variables, learner["learner"], table["table"], counts, curve, returns)
    network.load_state_dict(variables)
    policy = policy_of_one(experiment.builder.make_policy(network, spec, True), spec, experiment.seed)
    counts["environment_restarts"] = restarts
    return Result(policy, curve[-1][1] if curve else float("nan"), counts, curve, fingerprint)


def keep_experiment(run_dir: Path, experiment: ExperimentConfig, spec: Spec) -> None:
    """Write what `load` needs besides a checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _EXPERIMENT).write_bytes(cloudpickle.dumps((experiment, spec)))


def load(run_dir: Path | str) -> Result:
    """Return what an experiment in this folder has led to; of one that was stopped, until its newest checkpoint.

    Loading unpickles files: load only what you trust as you trust code.

    Raises:
        FileNotFoundError: the folder has no experiment.
        CheckpointError: it has no undamaged checkpoint.
    """
    folder = Path(run_dir)
    experiment, spec = cloudpickle.loads((folder / _EXPERIMENT).read_bytes())
    kept: dict[str, Any] = {"learner": _Kept(), "replay": SavedTable(), "counter": _Kept()}
    found = Checkpoints(kept, folder / "checkpoints").restore()
    if found is None or kept["replay"].state is None:
        raise CheckpointError(f"{folder} has no checkpoint yet: the experiment had just begun")
    states = {name: part.state for name, part in kept.items()}
    return result_of(experiment, spec, states, make_network(experiment, spec))


_EXPERIMENT = "experiment.pickle"


class _Kept:
    """A part that keeps the state that it gets."""

    state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def policy_of_one(policy: Policy, spec: Spec, seed: int) -> Callable[[Any], Any]:
    """Return the policy as a function of one observation; it starts each time from the initial state."""

    def act(observation: Any) -> Any:
        initial = getattr(policy, "initial_state", None)
        generator = np.random.default_rng(seed_sequence(seed, "result", 0, 0))
        batch = stacked([fitted(spec.observation_space, observation, "observation")])
        counts = {"env_steps": 0, "actor_steps": 0, "learner_steps": 0}
        actions, _, _ = policy(batch, None if initial is None else initial(1), generator, counts)
        return row(actions, 0)

    return act


class Evaluator:
    """Plays the episodes of an evaluation: the same seeds each time, none of which an actor has.

    run_dir: of videos; None if there are none.
    """

    def __init__(
        self,
        experiment: ExperimentConfig,
        spec: Spec,
        network: Network,
        run_dir: Path | None,
        before_call: Callable[[int, int, int, int], object] | None = None,
    ) -> None:
        self._experiment, self._run_dir = experiment, run_dir
        policy: Policy = experiment.builder.make_policy(network, spec, True)
        environment = self._environment = FilmedEnvironment(make_one(experiment, 0, 0, "evaluation"))
        seed = experiment.seed
        self._loop = EnvironmentLoop(environment, policy, seed=seed, role="evaluation", before_call=before_call)

    def returns(self, due: EvaluationDue) -> list[float]:
        """Play all episodes and return their sums of rewards; of a VectorEnv, each environment's first one counts."""
        found: list[float] = []
        if due.is_filmed:
            self._environment.begin()
        for number in range(-(-self._experiment.evaluation.episodes // self._loop.size)):
            self._loop.begin_at(number)
            first: dict[int, float] = {}
            while len(first) < self._loop.size:
                for episode in self._loop.run(num_episodes=1, counts=due.counts).episodes:
                    first.setdefault(episode.environment, episode.total)
            found += [first[index] for index in range(self._loop.size)]
            if number == 0 and due.is_filmed and self._run_dir is not None:
                self._environment.write(self._run_dir / "videos" / f"evaluation-{due.counts['env_steps']:09}.gif")
        return found[: self._experiment.evaluation.episodes]


def make_one(experiment: ExperimentConfig, index: int, life: int, role: str = "environment") -> Any:
    """Return the environment that the factory makes for a number, and for how often it was made before."""
    factory = experiment.environment_factory
    if isinstance(factory, str):
        import gymnasium  # an extra, which only names of environments need

        is_filmed = role == "evaluation" and experiment.evaluation.video_every is not None
        return gymnasium.make(factory, render_mode="rgb_array") if is_filmed else gymnasium.make(factory)
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
    make = experiment.network_factory or experiment.builder.make_network
    if torch is None:
        return make(spec)
    from lp_pipe.training.rng import generators_locked  # it loads torch, which is in use

    with generators_locked(), torch.random.fork_rng(devices=[]):  # other nodes may be threads of this process
        torch.manual_seed(environment_seed(experiment.seed, "network", 0, 0))
        return make(spec)


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
