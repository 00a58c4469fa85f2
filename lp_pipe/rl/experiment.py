"""What an experiment with agents consists of: the options, and what an agent's builder makes. Needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from lp_pipe.rl.adders import Adder
from lp_pipe.rl.observers import Observer
from lp_pipe.rl.replay.table import Sample, Table


class Spec(NamedTuple):
    """The spaces of one environment, and the discount of the agent."""

    observation_space: Any
    action_space: Any
    discount: float


class Update(NamedTuple):
    """What a learner returns for a sample. priorities: of the sample's items, or None to leave them as they are."""

    priorities: Any = None
    metrics: Mapping[str, float] = {}


class Network(Protocol):
    """Anything with a state, such as a torch module."""

    def state_dict(self) -> Any:
        """Return the weights."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take these weights."""


class Policy(Protocol):
    """Chooses actions for a batch. `initial_state(n)`, if it has that, is the state at the start of n episodes."""

    def __call__(
        self, observations: Any, state: Any, generator: np.random.Generator, counts: Mapping[str, int]
    ) -> tuple[Any, Any, Any]:
        """Return actions, the next state, and what the adder shall store with the actions.

        counts: env_steps, actor_steps and learner_steps. All randomness comes from the generator.
        """


class Learner(Protocol):
    """Learns from samples: a function of its state, the sample and its generator."""

    def step(self, sample: Sample) -> Update:
        """Learn from a sample."""

    def variables(self) -> Any:
        """Return what the `load_state_dict` of acting networks takes."""

    def state_dict(self) -> Any:
        """Return all that later steps depend on."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""


class Builder(Protocol):
    """Makes the parts of an agent. `discount`, if it has that, is the one of the spec."""

    batch_size: int

    def make_network(self, spec: Spec) -> Network:
        """Return a network for these spaces. torch is seeded."""

    def make_replay_table(self, spec: Spec) -> Table:
        """Return the options of the table; its rate limiter says how much is learned."""

    def make_adder(self, spec: Spec) -> Adder:
        """Return an adder for one environment."""

    def make_policy(self, network: Any, spec: Spec, evaluation: bool) -> Policy:
        """Return a policy that acts with this network, whose weights change between calls."""

    def make_learner(self, network: Any, spec: Spec, generator: np.random.Generator) -> Learner:
        """Return a learner of this network.

        Raises:
            ValueError: the network does not fit the spaces.
        """


BUILDER_PARTS = ("batch_size", "make_network", "make_replay_table", "make_adder", "make_policy", "make_learner")


@dataclass(frozen=True)
class Evaluation:
    """When an agent is evaluated: every so many environment steps and at the end, on seeds that no actor has.

    stop_at: the experiment ends at this mean return. video_every: the first evaluation after every so many environment
    steps films its first episode, as run_dir/videos/evaluation-STEPS.gif; the environment must render "rgb_array".
    """

    every: int = 1_000
    episodes: int = 100
    stop_at: float | None = None
    video_every: int | None = None

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is below 1.
        """
        if self.every < 1 or self.episodes < 1 or (self.video_every is not None and self.video_every < 1):
            raise ValueError(
                "Evaluation: every, episodes and video_every must be at least 1, got "
                f"every={self.every}, episodes={self.episodes}, video_every={self.video_every}"
            )


@dataclass(frozen=True)
class Rounds:
    """The order that makes every run the same: all actors take `steps` steps, then the learner learns.

    lag: actors use weights this many rounds older than the newest that they could have.
    """

    steps: int = 64
    lag: int = 1

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range.
        """
        if self.steps < 1 or self.lag < 0:
            raise ValueError(
                f"Rounds: steps must be at least 1 and lag at least 0, got steps={self.steps}, lag={self.lag}"
            )


@dataclass(frozen=True)
class Free:
    """The order in which every part works as fast as the table's rate limiter lets it.

    Two runs differ. What holds: the counts, the limiter's band, and that actors get weights of one version.
    """


@dataclass(frozen=True)
class Inference:
    """A node that acts for all actors, in batches: the network is in one place, which may have a GPU.

    batch_size: requests of actors in a batch; None: one of each actor. timeout: seconds after which a batch that is not
    full starts. Source: Espeholt et al., "SEED RL" (2020), section 3.
    """

    batch_size: int | None = None
    timeout: float = 0.005

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is out of range.
        """
        if (self.batch_size is not None and self.batch_size < 1) or self.timeout < 0:
            raise ValueError(
                "Inference: batch_size must be at least 1 and timeout at least 0, got "
                f"batch_size={self.batch_size}, timeout={self.timeout}"
            )


@dataclass(frozen=True)
class ExperimentConfig:
    """An agent, its environment, and how long it learns.

    environment_factory: a name for `gymnasium.make`, or a function of a seed that returns an Env or a VectorEnv.
    network_factory: makes the network instead of the builder. checkpoint_every: learner steps between two checkpoints.
    on_environment_error: "stop", or "restart", which makes a new environment.
    """

    builder: Builder
    environment_factory: str | Callable[[int], Any]
    max_num_actor_steps: int
    network_factory: Callable[[Spec], Network] | None = None
    seed: int = 0
    evaluation: Evaluation = field(default_factory=Evaluation)
    order: Rounds | Free = field(default_factory=Rounds)
    checkpoint_every: int = 1_000
    envs_per_actor: int = 1
    observers: Sequence[Observer] = ()
    on_environment_error: Literal["stop", "restart"] = "stop"

    def __post_init__(self) -> None:
        """Raises:
        TypeError: the builder lacks a part.
        ValueError: a number is out of range, or on_environment_error is neither "stop" nor "restart".
        """
        missing = [name for name in BUILDER_PARTS if not hasattr(self.builder, name)]
        if missing:
            raise TypeError(f"the builder {type(self.builder).__name__} has no {', '.join(missing)}")
        numbers = {name: getattr(self, name) for name in ("max_num_actor_steps", "envs_per_actor", "checkpoint_every")}
        numbers["batch_size"] = self.builder.batch_size
        if min(numbers.values()) < 1 or self.seed < 0:
            given = ", ".join(f"{name}={number}" for name, number in numbers.items())
            raise ValueError(
                f"ExperimentConfig: numbers must be at least 1 and seed at least 0, got {given}, seed={self.seed}"
            )
        if self.on_environment_error not in ("stop", "restart"):
            raise ValueError(f"on_environment_error must be stop or restart, got {self.on_environment_error!r}")


@dataclass(frozen=True)
class Result:
    """What an experiment led to.

    policy: from an observation to the action. score: mean return of the last evaluation. counts: env_steps, episodes,
    learner_steps, inserts, samples and environment_restarts. curve: (env_steps, score) of every evaluation.
    fingerprint: sha256 over weights, optimizer, table, counts (without restarts) and evaluations.
    """

    policy: Callable[[Any], Any]
    score: float
    counts: Mapping[str, int]
    curve: Sequence[tuple[int, float]]
    fingerprint: str


class VariableClient:
    """Gets the weights of a learner, at every `period`-th call of `update`."""

    def __init__(self, learner: Any, period: int = 1) -> None:
        """Raises:
        ValueError: the period is below 1.
        """
        if period < 1:
            raise ValueError(f"VariableClient: period must be at least 1, got {period}")
        self._learner, self._period, self._calls = learner, period, 0
        self.variables: Any = None

    def update(self) -> bool:
        """Fetch all weights, as of one version, if it is time; return whether it was."""
        is_due = self._calls % self._period == 0
        self._calls += 1
        if is_due:
            self.variables = self._learner.variables()
        return is_due
