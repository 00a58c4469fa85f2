"""An environment loop makes the same transitions of an Env and of a VectorEnv in each of its autoreset modes."""

from typing import Any

import numpy as np
import pytest

import lp_pipe.rl as rl

gym = pytest.importorskip("gymnasium")


class Corridor(gym.Env):
    """Walks by the action; terminates at 5, and is truncated after 7 steps. fault: what goes wrong at 3."""

    observation_space = gym.spaces.Dict({"place": gym.spaces.Box(-9, 9, (1,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, start: int = 0, fault: str = "") -> None:
        self.start, self.fault = start, fault

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.time = self.start, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.place += int(action)
        self.time += 1
        if self.place == 3 and self.fault == "raise":
            raise OSError("the simulator is gone")
        reward = np.nan if self.place == 3 and self.fault == "reward" else float(self.place)
        return self._observed(), reward, self.place >= 5, self.time >= 7, {}

    def _observed(self) -> Any:
        value: Any = np.array([self.place], dtype=np.float32)
        if self.place == 3:
            faults = {"nan": value * np.nan, "shape": np.zeros(2, np.float32), "dtype": value.astype(np.float64)}
            value = faults.get(self.fault, value)
        return {"place": value}


def policy(observations: Any, state: Any, generator: Any, counts: Any) -> Any:
    places = observations["place"][:, 0]
    return (places != 4).astype(np.int64), state, None  # stays at 4: truncated there


def fast(observations: Any, state: Any, generator: Any, counts: Any) -> Any:
    return np.ones(len(observations["place"]), dtype=np.int64), state, None


def transitions(environment: Any, acting: Any, steps: int = 60, n: int = 2) -> list[tuple[float, ...]]:
    """Return the transitions of the episodes that have ended, of all environments."""
    loop = rl.EnvironmentLoop(environment, acting, rl.NStepAdder(n, 0.5))
    items = loop.run(num_steps=steps).items
    columns = items.observation["place"][:, 0], items.action, items.reward, items.discount
    return list(zip(*columns, items.next_observation["place"][:, 0], strict=True))


@pytest.mark.parametrize("acting", [policy, fast])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_all_autoreset_modes_give_the_same_transitions(mode: str, acting: Any) -> None:
    starts = [0, 1, 2]
    single = {start: transitions(Corridor(start), acting, 70) for start in starts}
    vector = gym.vector.SyncVectorEnv(
        [lambda start=start: Corridor(start) for start in starts], autoreset_mode=gym.vector.AutoresetMode[mode]
    )
    found = transitions(vector, acting, 210)
    expected = [one for start in starts for one in single[start]]
    assert set(found) == set(expected)
    assert abs(len(found) - len(expected)) <= 2 * len(starts)  # pending ones


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_a_vector_environment_takes_no_step_too_many(mode: str) -> None:
    vector = gym.vector.SyncVectorEnv([Corridor] * 3, autoreset_mode=gym.vector.AutoresetMode[mode])
    counter = rl.Counter()
    done = rl.EnvironmentLoop(vector, fast, rl.NStepAdder(1, 1.0), counter).run(num_steps=100)
    assert done.steps == 99 == len(done.items.reward) == counter.get()["env_steps"]
    assert {episode.length for episode in done.episodes} == {5}
    assert {episode.total for episode in done.episodes} == {15.0}


def test_several_environments_take_exactly_the_steps_asked_for() -> None:
    counter = rl.Counter()
    loop = rl.EnvironmentLoop([Corridor(), Corridor(), Corridor()], fast, counter=counter)
    assert [loop.run(num_steps=steps).steps for steps in (100, 1, 7)] == [100, 1, 7]
    assert counter.get()["env_steps"] == 108


@pytest.mark.parametrize("fault", ["raise", "reward", "nan", "shape", "dtype"])
def test_an_environment_that_fails_is_named_with_the_leaf(fault: str) -> None:
    loop = rl.EnvironmentLoop(Corridor(fault=fault), fast, index=4)
    with pytest.raises(rl.EnvironmentFailed) as caught:
        loop.run(num_steps=10)
    error = caught.value
    leaf = {"raise": "", "reward": "reward"}.get(fault, "observation['place']")
    assert (error.actor, error.episode, error.step, error.leaf) == ("actor/4", 0, 2, leaf)
    assert str(error.seed) in str(error)


def test_an_environment_that_fails_is_made_anew() -> None:
    made: list[int] = []

    def make(index: int, life: int) -> Corridor:
        made.append(index)
        return Corridor()

    loop = rl.EnvironmentLoop(Corridor(fault="raise"), fast, rl.NStepAdder(3, 1.0), make=make, restarts=True)
    done = loop.run(num_steps=12)
    assert made == [0] and loop.restarts == 1 and done.steps == 12 == len(done.items.reward)


def test_what_others_did_before_one_failed_is_kept() -> None:
    class Counted(Corridor):
        steps = 0

        def step(self, action: Any) -> Any:
            result = super().step(action)
            self.steps += 1
            return result

    made: list[Counted] = [Counted(), Counted(fault="raise"), Counted()]

    def make(index: int, life: int) -> Counted:
        made.append(Counted())
        return made[-1]

    counter = rl.Counter()
    loop = rl.EnvironmentLoop(list(made), fast, rl.NStepAdder(1, 1.0), counter, make=make, restarts=True)
    done = loop.run(num_steps=50)
    assert sum(one.steps for one in made) == 50 == done.steps == counter.get()["env_steps"] == len(done.items.reward)
    items = done.items
    assert (items.next_observation["place"] == items.observation["place"] + 1).all()


def test_a_reset_that_fails_is_of_the_episode_that_was_to_begin() -> None:
    class Unwilling(Corridor):
        resets = 0

        def reset(self, **options: Any) -> Any:
            self.resets += 1
            if self.resets == 3:
                raise OSError("no more")
            return super().reset(**options)

    with pytest.raises(rl.EnvironmentFailed) as caught:
        rl.EnvironmentLoop(Unwilling(), fast).run(num_steps=30)
    assert (caught.value.episode, caught.value.step) == (2, 0)


def test_observers_see_every_step() -> None:
    seen: list[Any] = []

    class Watcher:
        def observe_first(self, env: Any, observation: Any) -> None:
            seen.append("first")

        def observe(self, env: Any, step: Any) -> None:
            seen.append(step.reward)

        def metrics(self) -> dict[str, float]:
            return {}

    rl.EnvironmentLoop(Corridor(), fast, observers=[Watcher()]).run(num_episodes=2)
    assert seen == ["first", 1.0, 2.0, 3.0, 4.0, 5.0] * 2
