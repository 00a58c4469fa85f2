"""Makes the parts of an experiment, and refuses those that do not fit together."""

import sys
from collections.abc import Callable
from typing import Any

from lp_pipe.rl.environment_loop import EnvironmentLoop
from lp_pipe.rl.experiment import ExperimentConfig, Network, Policy, Rounds, Spec
from lp_pipe.rl.replay.rate_limiter import SampleToInsertRatio
from lp_pipe.rl.replay.table import Table
from lp_pipe.rl.rounds.experiment_table import ExperimentOptions
from lp_pipe.rl.rounds.rounds_learner import RoundsLearner
from lp_pipe.rl.seeding import environment_seed
from lp_pipe.rl.video import check_can_film


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


def make_one(experiment: ExperimentConfig, index: int, life: int, role: str = "environment") -> Any:
    """Return the environment that the factory makes for a number, and for how often it was made before."""
    factory = experiment.environment_factory
    if isinstance(factory, str):
        import gymnasium  # an extra, which only names of environments need

        is_filmed = role == "evaluation" and experiment.evaluation.video_every is not None
        return gymnasium.make(factory, render_mode="rgb_array") if is_filmed else gymnasium.make(factory)
    return factory(environment_seed(experiment.seed, role, index, life))


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
