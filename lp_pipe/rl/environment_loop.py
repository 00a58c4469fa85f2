"""The loop of policy and environment: steps of a gymnasium.Env or VectorEnv become items. Needs neither of torch and
gymnasium."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.errors import Unrecoverable
from lp_pipe.rl.adders import Adder
from lp_pipe.rl.observers import Observer, TimeStep
from lp_pipe.rl.recorded_environment import EnvironmentCalls, RecordedEnvironment
from lp_pipe.rl.seeding import environment_seed, seed_sequence
from lp_pipe.rl.spaces import DoesNotFit, fitted
from lp_pipe.rl.tree import concatenated, row, stacked, tree_map
from lp_pipe.telemetry import waits

ActingPolicy = Callable[[Any, Any, np.random.Generator, Mapping[str, int]], tuple[Any, Any, Any]]
FAILURES_IN_A_ROW = 3  # of new environments before their first step: then a restart does not help


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


class EnvironmentFailed(Unrecoverable):
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


@dataclass(frozen=True)
class LoopState:
    """All that the rest of a loop's run depends on. The environments are played again from their calls."""

    values: Mapping[str, Any]
    adders: Any
    environments: Sequence[EnvironmentCalls]

    def after(self, earlier: "LoopState | None") -> "LoopState":
        """Return this state with all calls, from the state before it."""
        known = () if earlier is None else earlier.environments
        return replace(
            self,
            environments=[
                one if not one.first else one._replace(first=0, calls=known[place].calls[: one.first] + one.calls)
                for place, one in enumerate(self.environments)
            ],
        )


class EnvironmentLoop:
    """Lets a policy act in an environment, and gives an adder the steps.

    environment: a gymnasium.Env, a VectorEnv of any autoreset mode, or a list of Envs whose observations the policy
    gets as one batch. adder: copied for each environment. seed, role, index: of all randomness; environment i of the
    loop has the index `index · number of environments + i`. make: makes environment i anew, also from how often that
    was done before. restarts: does so after it failed. is_recording: `state` and `restore` are used. before_call: is
    told (actor steps, episode, step, seed) before each call of an environment.
    """

    _VALUES = (
        *("_observations", "_is_resetting", "_states", "_actions", "_episode", "_step", "_seeds", "_totals"),
        *("_is_first", "_policy_steps", "actor_steps", "restarts"),
    )

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
        make: Callable[[int, int], Any] | None = None,
        restarts: bool = False,
        is_recording: bool = False,
        before_call: Callable[[int, int, int, int], object] | None = None,
    ) -> None:
        environments = list(environment) if isinstance(environment, list | tuple) else [environment]
        self._is_recording = is_recording
        self._is_vector = hasattr(environment, "single_observation_space")
        self._environments = [RecordedEnvironment(one, 0, is_recording) for one in environments]
        self.size: int = environment.num_envs if self._is_vector else len(environments)
        self._mode = _autoreset_mode(environment) if self._is_vector else "DISABLED"
        first = environments[0]
        self._space = first.single_observation_space if self._is_vector else first.observation_space
        self._action_dtype = getattr(first.action_space, "dtype", None)
        self._policy, self._counter, self._observers = policy, counter, observers
        self._adders = [copy.deepcopy(adder) for _ in range(self.size)] if adder is not None else None
        self._seed, self._role, self._index = seed, role, index
        self._make, self._may_restart, self._before_call = make, restarts, before_call
        self._targets = [waits.Target(peer=f"environment {place} of {role}/{index}") for place in range(self.size)]
        self.seconds = {"act": 0.0, "env": 0.0}
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
                if not self._may_restart or failures >= FAILURES_IN_A_ROW:
                    raise
                self._make_anew(error.environment, done)
        done.items = concatenated(done.items)
        return done

    def flush(self) -> Any:
        """Return what is pending in the adders, as if the episodes were truncated here, or None."""
        return concatenated([adder.flush() for adder in self._adders or ()])

    def state(self) -> LoopState:
        """Return what `restore` needs, with those calls of the environments that were not in the last state."""
        values = {name: copy.copy(getattr(self, name)) for name in self._VALUES}
        return LoopState(values, self._adders, [one.new_calls() for one in self._environments])

    def restore(self, state: LoopState) -> None:
        """Continue from a state with all calls: new environments are played again to where they were.

        Raises:
            EnvironmentFailed: an environment raised, or returned something else than before.
        """
        assert self._make is not None
        for name, value in state.values.items():
            setattr(self, name, copy.copy(value))
        self._adders = state.adders
        for place, known in enumerate(state.environments):
            self._replace(place, known.life)
            is_same = self._guarded(place, self._environments[place].play_again, known)
            if not is_same:
                reason = (
                    "is not deterministic: played again with the same seed and actions, after its actor was started"
                )
                raise self._failure(place, "", f"{reason} again, it returned something else")

    def close(self) -> None:
        """Close the environments; an error of theirs does not matter any more."""
        for one in self._environments:
            with contextlib.suppress(Exception):
                one.environment.close()

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
            since = time.perf_counter()
            actions, states, more = self._policy(observations, states, generator, counts)
            self.seconds["act"] += time.perf_counter() - since
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
                first, _ = self._guarded(index, self._environments[index].reset, seed)
                self._begin(index, first, seed)
            return
        mask = np.isin(np.arange(self.size), due)
        options = None if self._is_first else {"reset_mask": mask}
        observations, _ = self._guarded(due[0], self._environments[0].reset, list(self._seeds), options)
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
        self.restarts += 1
        chosen = range(self.size) if self._is_vector else [index]
        place = 0 if self._is_vector else index
        self._replace(place, self._environments[place].life + 1)
        self._is_first = True
        for one in chosen:
            if self._adders is not None:
                done.items.append(self._adders[one].flush())
            self._episode[one] += self._is_beginning(one)  # another seed
            self._observations[one], self._is_resetting[one] = None, False

    def _replace(self, place: int, life: int) -> None:
        assert self._make is not None
        with contextlib.suppress(Exception):  # it may have failed
            self._environments[place].environment.close()
        self._environments[place] = RecordedEnvironment(self._make(place, life), life, self._is_recording)

    def _checked_step(self, index: int, observation: Any, reward: Any, terminated: Any, truncated: Any) -> TimeStep:
        if np.shape(reward) != () or not np.isfinite(reward):
            raise self._failure(index, "reward", f"is {reward!r}: it must be one finite number")
        observation = self._checked(index, observation)
        return TimeStep(self._actions[index], float(reward), bool(terminated), bool(truncated), observation)

    def _checked(self, index: int, observation: Any) -> Any:
        try:
            return fitted(self._space, observation, "observation")
        except DoesNotFit as error:
            raise self._failure(index, *error.args) from None

    def _guarded(self, index: int, call: Callable[..., Any], *arguments: Any) -> Any:
        place = self._place_of(index)
        if self._before_call is not None:
            self._before_call(self.actor_steps, *place)
        since = time.perf_counter()
        try:
            if not self._is_recording:
                return call(*arguments)
            episode, step, seed = place
            what = f"{call.__name__} in episode {episode} at step {step}, seed {seed}"  # for a report of hangs
            with waits.waiting(waits.OUTSIDE, self._targets[index], what):
                return call(*arguments)
        except Exception as error:
            raise self._failure(index, "", f"raised {type(error).__name__}: {error}") from error
        finally:
            self.seconds["env"] += time.perf_counter() - since

    def _failure(self, index: int, leaf: str, reason: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._role}/{self._index}", index, *self._place_of(index), leaf, reason)

    def _place_of(self, index: int) -> tuple[int, int, int]:
        """Return the episode, step and seed of an environment."""
        if self._is_beginning(index):
            return self._episode[index] + 1, 0, self._seeds[index]
        return self._episode[index], self._step[index], self._seeds[index]

    def _is_beginning(self, index: int) -> bool:
        """Return whether the environment is between two episodes."""
        return self._observations[index] is None or self._is_resetting[index]

    def _seed_of(self, index: int, episode: int) -> int:
        return environment_seed(self._seed, self._role, self._index * self.size + index, episode)

    def _of(self, index: int) -> Any:
        return self._environments[0 if self._is_vector else index].environment


def _autoreset_mode(environment: Any) -> str:
    mode = (environment.metadata or {}).get("autoreset_mode")
    return str(getattr(mode, "name", "NEXT_STEP"))  # a VectorEnv that does not say is of gymnasium's default mode
