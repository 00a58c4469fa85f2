"""The loop of policy and environment: steps of a gymnasium.Env or VectorEnv become items. Needs neither of torch and
gymnasium."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from lp_pipe.errors import LpPipeError
from lp_pipe.rl.adders import Adder
from lp_pipe.rl.tree import leaves_of, row, stacked, tree_map

ActingPolicy = Callable[[Any, Any, np.random.Generator, Mapping[str, int]], tuple[Any, Any, Any]]
FAILURES_IN_A_ROW = 3  # of new environments before their first step: then a restart does not help


class TimeStep(NamedTuple):
    """A step of one environment, as an observer gets it. observation: after the action."""

    action: Any
    reward: float
    terminated: bool
    truncated: bool
    observation: Any


class Observer(Protocol):
    """Watches the steps of an environment loop."""

    def observe_first(self, env: Any, observation: Any) -> None:
        """Take note of an episode's first observation."""

    def observe(self, env: Any, step: TimeStep) -> None:
        """Take note of a step."""

    def metrics(self) -> dict[str, float]:
        """Return numbers about what was observed."""


class Counter:
    """Counts by name, such as env_steps and episodes."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def increment(self, **counts: int) -> dict[str, int]:
        """Add to the counts; return all of them."""
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        return self.get()

    def get(self) -> dict[str, int]:
        """Return all counts."""
        return dict(self._counts)


class EpisodeReturn(NamedTuple):
    """An episode that has ended. environment: its index in the loop. total: the sum of its rewards."""

    environment: int
    total: float
    length: int


@dataclass
class LoopSteps:
    """What a loop has done. items: those the adder made, in order, as one tree with a leading axis, or None."""

    steps: int
    episodes: list[EpisodeReturn]
    items: Any


class EnvironmentFailed(LpPipeError, RuntimeError):
    """An environment raised an error, or returned something that does not fit its spaces.

    leaf: the path of what does not fit, such as `observation['image']`, or "". environment: index in the actor.
    """

    def __init__(self, actor: str, environment: int, episode: int, step: int, seed: int, leaf: str, reason: str):
        self.actor, self.environment, self.leaf, self.reason = actor, environment, leaf, reason
        self.episode, self.step, self.seed = episode, step, seed
        super().__init__(
            f"environment {environment} of {actor} failed in episode {episode} at step {step}, seed {seed}: "
            f"{leaf}{' ' if leaf else ''}{reason}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        values = (self.actor, self.environment, self.episode, self.step, self.seed, self.leaf, self.reason)
        return type(self), values


class _DoesNotFit(Exception):
    """A value that does not fit its space; args: the path of the leaf, and the reason."""


def seed_sequence(seed: int, role: str, index: int, number: int) -> np.random.SeedSequence:
    """Return the randomness of one episode or step, number `number`, of one part of an experiment."""
    return np.random.SeedSequence((seed, int.from_bytes(role.encode(), "big"), index, number))


def environment_seed(seed: int, role: str, index: int, episode: int) -> int:
    """Return the seed of an episode, below 2^31. Those of evaluations are odd and all others even."""
    word = int(seed_sequence(seed, role, index, episode).generate_state(1)[0])
    return (word >> 2) * 2 + (role == "evaluation")


class EnvironmentLoop:
    """Lets a policy act in an environment, and gives an adder the steps.

    environment: a gymnasium.Env, a VectorEnv of any autoreset mode, or a list of Envs whose observations the policy
    gets as one batch. adder: copied for each environment. seed, role, index: of all randomness; environment i of the
    loop has the index `index · number of environments + i`. restart: makes environment i anew after it failed.
    """

    def __init__(
        self,
        environment: Any,
        policy: ActingPolicy,
        adder: Adder | None = None,
        counter: Counter | None = None,
        observers: Sequence[Observer] = (),
        *,
        seed: int = 0,
        role: str = "actor",
        index: int = 0,
        restart: Callable[[int], Any] | None = None,
    ) -> None:
        self._is_vector = hasattr(environment, "single_observation_space")
        self._environments = list(environment) if isinstance(environment, list | tuple) else [environment]
        self.size: int = environment.num_envs if self._is_vector else len(self._environments)
        self._mode = _autoreset_mode(environment) if self._is_vector else "DISABLED"
        first = self._environments[0]
        self._space = first.single_observation_space if self._is_vector else first.observation_space
        self._action_dtype = getattr(first.action_space, "dtype", None)
        self._policy, self._counter, self._observers = policy, counter, observers
        self._adders = [copy.deepcopy(adder) for _ in range(self.size)] if adder is not None else None
        self._seed, self._role, self._index, self._restart = seed, role, index, restart
        self.actor_steps = 0
        self.restarts = 0
        self._policy_steps = 0
        self.begin_at(0)

    def begin_at(self, episode: int) -> None:
        """Begin anew: each environment's next episode has this number."""
        size = self.size
        self._observations: list[Any] = [None] * size  # None: needs a reset
        self._is_resetting = [False] * size  # its next step is its reset (NEXT_STEP)
        self._states: list[Any] = [None] * size
        self._actions: list[Any] = [None] * size
        self._episode = [episode - 1] * size
        self._step = [0] * size
        self._seeds = [0] * size
        self._totals = [0.0] * size
        self._is_first = True
        self._policy_steps = 0

    def run(
        self,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        *,
        counts: Mapping[str, int] | None = None,
    ) -> LoopSteps:
        """Act for so many steps, over all environments, or until so many episodes have ended.

        A VectorEnv steps as a whole: its last step is left out if it would be too many. counts: what the policy gets,
        to which the loop adds its own steps; None: those of the counter.

        Raises:
            EnvironmentFailed: an environment raised, or returned NaN, a wrong shape or a wrong dtype.
            ValueError: not exactly one of the two numbers is given.
        """
        if (num_steps is None) == (num_episodes is None):
            raise ValueError("run: give num_steps or num_episodes")
        known = {**(self._counter.get() if counts is None and self._counter is not None else counts or {})}
        done = LoopSteps(0, [], [])
        failures = 0
        while num_episodes is None or len(done.episodes) < num_episodes:
            left = None if num_steps is None else num_steps - done.steps
            try:
                rows = self._rows(left)
                if left == 0 or rows is None:
                    break
                self._turn(rows, known, done)
                failures = 0
            except EnvironmentFailed as error:
                failures += 1
                if self._restart is None or failures >= FAILURES_IN_A_ROW:
                    raise
                self._make_anew(error.environment, done)
        done.items = _concatenated(done.items)
        return done

    def flush(self) -> Any:
        """Return what is pending in the adders, as if the episodes were truncated here, or None."""
        return _concatenated([adder.flush() for adder in self._adders or ()])

    def _rows(self, left: int | None) -> list[int] | None:
        """Return the environments that step next, after the resets that are due; None: a step would be too many."""
        if left == 0:
            return None
        due = [index for index in range(self.size) if self._observations[index] is None]
        due = due if self._is_vector or left is None else [index for index in due if index < left]
        if due:
            self._reset(due)
        rows = [index for index in range(self.size) if not self._is_resetting[index]]
        if left is None or len(rows) <= left:
            return rows
        return None if self._is_vector else rows[:left]

    def _turn(self, rows: list[int], known: dict[str, int], done: LoopSteps) -> None:
        """Take one step in each of these environments."""
        extras: list[Any] = [None] * self.size
        after: list[Any] = list(self._states)
        if rows:
            steps = {"env_steps": known.get("env_steps", 0) + done.steps, "actor_steps": self.actor_steps}
            counts = {"learner_steps": 0, **known, **steps}
            number = self._episode[0] if self._role == "evaluation" else self._index
            role = f"{self._role} policy"
            generator = np.random.default_rng(seed_sequence(self._seed, role, number, self._policy_steps))
            self._policy_steps += 1
            observations = stacked([self._observations[index] for index in rows])
            states = stacked([self._states[index] for index in rows])
            actions, states, more = self._policy(observations, states, generator, counts)
            for place, index in enumerate(rows):
                self._actions[index] = row(actions, place)
                after[index], extras[index] = row(states, place), row(more, place)
        for index, step, following in self._stepped(rows):
            done.steps += 1
            self.actor_steps += 1
            self._step[index] += 1
            self._totals[index] += step.reward
            self._observations[index] = step.observation
            if self._adders is not None:
                flags = step.reward, step.terminated, step.truncated
                items = self._adders[index].add(
                    step.action, *flags, step.observation, extras[index], self._states[index]
                )
                done.items.append(items)
            self._states[index] = after[index]
            for observer in self._observers:
                observer.observe(self._of(index), step)
            is_last = step.terminated or step.truncated
            if self._counter is not None:
                self._counter.increment(env_steps=1, episodes=int(is_last))
            if is_last:
                done.episodes.append(EpisodeReturn(index, self._totals[index], self._step[index]))
                self._observations[index] = None
                self._is_resetting[index] = self._mode == "NEXT_STEP"
                if self._mode == "NEXT_STEP":
                    self._observations[index] = step.observation  # a place holder until the reset
                elif following is not None:
                    self._begin(index, following, self._seeds[index])

    def _stepped(self, rows: list[int]) -> Iterator[tuple[int, TimeStep, Any]]:
        """Step; yield, for each of these environments, its step and the first observation of its next episode.

        That is None where the loop has to reset the environment. Of a list, each one steps when it is asked for: if one
        fails, the steps before it are done.
        """
        if not self._is_vector:
            for index in rows:
                values = self._guarded(index, self._environments[index].step, self._actions[index])
                yield index, self._checked_step(index, *values[:4]), None
            return
        actions = tree_map(lambda leaf: np.asarray(leaf, self._action_dtype), stacked(self._actions))
        observations, rewards, terminated, truncated, info = self._guarded(0, self._environments[0].step, actions)
        for index in range(self.size):
            observation, following = row(observations, index), None
            if self._is_resetting[index]:
                self._begin(index, observation, self._seeds[index])
                self._is_resetting[index] = False
                continue
            if self._mode == "SAME_STEP" and (terminated[index] or truncated[index]):
                following, observation = observation, row(info["final_obs"], index)
            step = self._checked_step(index, observation, rewards[index], terminated[index], truncated[index])
            yield index, step, following

    def _reset(self, due: list[int]) -> None:
        for index in due:
            self._seeds[index] = self._seed_of(index, self._episode[index] + 1)
        if not self._is_vector:
            for index in due:
                seed = self._seeds[index]
                first, _ = self._guarded(index, self._environments[index].reset, seed=seed)
                self._begin(index, first, seed)
            return
        mask = np.isin(np.arange(self.size), due)
        options = {} if self._is_first else {"options": {"reset_mask": mask}}
        observations, _ = self._guarded(due[0], self._environments[0].reset, seed=list(self._seeds), **options)
        self._is_first = False
        for index in due:
            self._begin(index, row(observations, index), self._seeds[index])

    def _begin(self, index: int, observation: Any, seed: int) -> None:
        self._observations[index] = self._checked(index, observation)
        self._episode[index] += 1
        self._step[index], self._totals[index], self._seeds[index] = 0, 0.0, seed
        initial = getattr(self._policy, "initial_state", None)
        self._states[index] = None if initial is None else row(initial(1), 0)
        if self._adders is not None:
            self._adders[index].add_first(self._observations[index])
        for observer in self._observers:
            observer.observe_first(self._of(index), self._observations[index])

    def _make_anew(self, index: int, done: LoopSteps) -> None:
        """Replace an environment that failed; what is pending of its episode ends as if it were truncated."""
        assert self._restart is not None
        self.restarts += 1
        chosen = range(self.size) if self._is_vector else [index]
        self._environments[0 if self._is_vector else index] = self._restart(index)
        self._is_first = True
        for one in chosen:
            if self._adders is not None:
                done.items.append(self._adders[one].flush())
            self._episode[one] += self._is_beginning(one)  # another seed
            self._observations[one], self._is_resetting[one] = None, False

    def _checked_step(self, index: int, observation: Any, reward: Any, terminated: Any, truncated: Any) -> TimeStep:
        if np.shape(reward) != () or not np.isfinite(reward):
            raise self._failure(index, "reward", f"is {reward!r}: it must be one finite number")
        observation = self._checked(index, observation)
        return TimeStep(self._actions[index], float(reward), bool(terminated), bool(truncated), observation)

    def _checked(self, index: int, observation: Any) -> Any:
        try:
            return fitted(self._space, observation, "observation")
        except _DoesNotFit as error:
            raise self._failure(index, *error.args) from None

    def _guarded(self, index: int, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except Exception as error:
            raise self._failure(index, "", f"raised {type(error).__name__}: {error}") from error

    def _failure(self, index: int, leaf: str, reason: str) -> EnvironmentFailed:
        actor = f"{self._role}/{self._index}"
        episode, step = self._episode[index], self._step[index]
        if self._is_beginning(index):
            episode, step = episode + 1, 0
        return EnvironmentFailed(actor, index, episode, step, self._seeds[index], leaf, reason)

    def _is_beginning(self, index: int) -> bool:
        """Return whether the environment is between two episodes."""
        return self._observations[index] is None or self._is_resetting[index]

    def _seed_of(self, index: int, episode: int) -> int:
        return environment_seed(self._seed, self._role, self._index * self.size + index, episode)

    def _of(self, index: int) -> Any:
        return self._environments[0 if self._is_vector else index]


def fitted(space: Any, value: Any, path: str) -> Any:
    """Return an observation as a tree of arrays of its space's shapes and dtypes; whole numbers may be Python's.

    Raises:
        _DoesNotFit: it has another structure, shape or dtype, or contains NaN.
    """
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(spaces):
            raise _DoesNotFit(path, f"must be a dict with the keys {sorted(spaces)}, got {_described(value)}")
        return {name: fitted(spaces[name], value[name], f"{path}[{name!r}]") for name in sorted(spaces)}
    if isinstance(spaces, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(spaces):
            raise _DoesNotFit(path, f"must be a tuple of {len(spaces)}, got {_described(value)}")
        return tuple(fitted(one, part, f"{path}[{i}]") for i, (one, part) in enumerate(zip(spaces, value, strict=True)))
    leaf = np.asarray(value)
    is_number = np.issubdtype(space.dtype, np.integer) and isinstance(value, int) and not isinstance(value, bool)
    leaf = leaf.astype(space.dtype) if is_number else leaf
    if leaf.shape != space.shape or leaf.dtype != space.dtype:
        raise _DoesNotFit(path, f"has shape {leaf.shape} and dtype {leaf.dtype}, not {space.shape} and {space.dtype}")
    if leaf.dtype.kind == "f" and np.isnan(leaf).any():
        raise _DoesNotFit(path, "contains NaN")
    return leaf.copy()


def _described(value: Any) -> str:
    return f"a dict with the keys {sorted(value)}" if isinstance(value, Mapping) else type(value).__name__


def _autoreset_mode(environment: Any) -> str:
    mode = (environment.metadata or {}).get("autoreset_mode")
    return str(getattr(mode, "name", "NEXT_STEP"))  # a VectorEnv that does not say is of gymnasium's default mode


def _concatenated(trees: Sequence[Any]) -> Any:
    """Return one tree of all leaves' rows, or None if there are none."""
    found = [tree for tree in trees if tree is not None and any(True for _ in leaves_of(tree))]
    if not found:
        return None
    return tree_map(lambda *leaves: np.concatenate(leaves), found[0], *found[1:])
