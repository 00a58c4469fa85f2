"""An experiment in rounds has the same result each time, takes exactly its steps, and refuses what does not fit."""

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from tests.rl.bandit import Bandit, BanditBuilder, config

gym = pytest.importorskip("gymnasium")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("actors", [1, 2, 4])
def test_two_runs_have_the_same_fingerprint(actors: int, lag: int) -> None:
    options: dict[str, Any] = {"order": rl.Rounds(steps=8, lag=lag), "envs_per_actor": 3}
    first = rl.run_experiment(config(**options), num_actors=actors)
    again = rl.run_experiment(config(**options), num_actors=actors)
    other = rl.run_experiment(config(**options, seed=1), num_actors=actors)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.counts == again.counts and first.counts["env_steps"] == 103 == first.counts["inserts"]
    assert first.curve == again.curve and first.curve[-1] == (103, first.score) and first.score == 3.0
    assert first.policy(np.array([0.5], dtype=np.float32)) == 1


def test_the_learner_does_the_steps_that_the_items_are_good_for() -> None:
    result = rl.run_experiment(config())
    # Rounds of 8 steps have 7 or 8 items: n-step items of a round's last step may come in the next one. The first
    # round has less than 10 items, and those are not carried.
    counts = result.counts
    assert counts["samples"] == 4 * counts["learner_steps"]
    assert counts["learner_steps"] in (int(95 * 1.5 / 4), int(96 * 1.5 / 4))


@pytest.mark.parametrize("lag", [0, 2])
def test_actors_act_with_the_weights_of_their_round(lag: int) -> None:
    builder = BanditBuilder(rl.Table(1_000, rl.Uniform(), rate_limiter=rl.SampleToInsertRatio(4.0, 1, 100.0)))
    rl.run_experiment(config(builder, order=rl.Rounds(steps=8, lag=lag), max_num_actor_steps=64), num_actors=2)
    rounds = [builder.counts_seen[16 * number : 16 * (number + 1)] for number in range(4)]
    assert [{counts["learner_steps"] for counts in one} == {0} for one in rounds] == [i <= lag for i in range(4)]
    for number, one in enumerate(rounds):
        # An actor adds its own steps to those at the round's start: it does not know of the others'.
        assert [counts["env_steps"] for counts in one] == [16 * number + step for step in range(8)] * 2


def test_an_experiment_stops_at_a_score_after_the_rounds_that_were_under_way() -> None:
    evaluation = rl.Evaluation(every=16, episodes=2, stop_at=3.0)
    late = rl.run_experiment(config(evaluation=evaluation, order=rl.Rounds(8, lag=2), max_num_actor_steps=10_000))
    reached = next(env_steps for env_steps, score in late.curve if score == 3.0)
    assert late.counts["env_steps"] == reached + 2 * 8 == late.curve[-1][0]


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_vector_environments_leave_out_what_would_be_too_much(mode: str) -> None:
    def make(seed: int) -> Any:
        return gym.vector.SyncVectorEnv([Bandit] * 3, autoreset_mode=gym.vector.AutoresetMode[mode])

    results = [rl.run_experiment(config(environment_factory=make), num_actors=2) for _ in range(2)]
    assert results[0].fingerprint == results[1].fingerprint
    assert results[0].counts["env_steps"] == 102 == results[0].counts["inserts"]


def test_an_environment_that_fails_names_actor_episode_step_and_seed() -> None:
    made: list[int] = []

    def make(seed: int) -> Bandit:
        made.append(seed)
        return Bandit(fault_at=8 if len(made) == 2 else -1)

    with pytest.raises(lp.NodeError) as caught:
        rl.run_experiment(config(environment_factory=make), num_actors=2)
    cause = caught.value.__cause__
    assert (caught.value.label, caught.value.index) == ("actor", 1) and isinstance(cause, rl.EnvironmentFailed)
    assert (cause.episode, cause.step) == (2, 1) and str(cause.seed) in str(caught.value)
    made.clear()
    result = rl.run_experiment(config(environment_factory=make, on_environment_error="restart"), num_actors=2)
    assert result.counts["environment_restarts"] == 1 and result.counts["env_steps"] == 103


def test_parts_that_do_not_fit_are_refused_before_any_step() -> None:
    with pytest.raises(TypeError, match="make_policy"):
        config(type("Half", (), {"batch_size": 1, "make_network": None})())
    with pytest.raises(ValueError):
        config(on_environment_error="ignore")
    with pytest.raises(ValueError, match="2"):
        rl.run_experiment(config(order=rl.Rounds(steps=2), envs_per_actor=3))
    with pytest.raises(ValueError, match="0"):
        rl.Evaluation(video_every=0)


def test_the_numpy_parts_do_not_import_torch() -> None:
    code = "import sys, lp_pipe.rl as rl; rl.run_experiment; assert not {'torch', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_network_that_does_not_fit_the_actions_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from examples.catch_dqn import experiment

    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(50, 4))
    with pytest.raises(ValueError, match="4"):
        rl.run_experiment(experiment(network_factory=lambda spec: network))


def test_dqn_learns_to_catch() -> None:
    pytest.importorskip("torch")
    from examples.catch_dqn import experiment

    evaluation = rl.Evaluation(every=1_000, episodes=20, stop_at=1.0)
    assert rl.run_experiment(experiment(0, 1_500, evaluation=evaluation), num_actors=2).score > 0.5


def test_two_runs_of_dqn_have_the_same_fingerprint_whatever_the_number_of_threads() -> None:
    torch = pytest.importorskip("torch")
    from examples.catch_dqn import experiment

    evaluation = rl.Evaluation(every=1_000, episodes=2)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(rl.run_experiment(experiment(0, 600, evaluation=evaluation), num_actors=2))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    assert found[0].fingerprint == found[1].fingerprint and found[0].counts["learner_steps"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dqn_catches_every_ball_within_10_000_steps(seed: int) -> None:
    pytest.importorskip("torch")
    from examples.catch_dqn import experiment

    one = dataclasses.replace(experiment(seed), evaluation=rl.Evaluation(every=1_000, episodes=100, stop_at=1.0))
    result = rl.run_experiment(one)
    assert result.score == 1.0 and result.counts["env_steps"] <= 10_000


@pytest.mark.parametrize("kind", ["envs", "DISABLED", "NEXT_STEP", "SAME_STEP"])
def test_an_interrupted_experiment_goes_on_from_its_checkpoint(kind: str, tmp_path: Any) -> None:
    faults: list[int] = []

    def make(seed: int) -> Any:
        fault = faults.pop() if faults else -1
        if kind == "envs":
            return Bandit(fault)
        mode = gym.vector.AutoresetMode[kind]
        return gym.vector.SyncVectorEnv([Bandit, Bandit, lambda: Bandit(fault)], autoreset_mode=mode)

    options = {"environment_factory": make, "envs_per_actor": 3, "checkpoint_every": 5}
    whole = rl.run_experiment(config(**options), num_actors=2)
    faults += [12]
    with pytest.raises(lp.NodeError):
        rl.run_experiment(config(**options), num_actors=2, run_dir=tmp_path)
    before = rl.load(tmp_path)
    assert 0 < before.counts["learner_steps"] < whole.counts["learner_steps"]
    after = rl.run_experiment(config(**options), num_actors=2, run_dir=tmp_path)
    assert after.fingerprint == whole.fingerprint == rl.load(tmp_path).fingerprint != before.fingerprint
    assert (after.counts, after.curve) == (whole.counts, whole.curve)


def test_an_environment_that_is_not_a_function_of_its_seed_is_found_when_it_is_played_again(tmp_path: Any) -> None:
    class Moody(Bandit):
        def reset(self, **options: Any) -> Any:
            return super().reset(**{**options, "seed": None})

    faults = [70]
    options = {"environment_factory": lambda seed: Moody(faults.pop() if faults else -1), "checkpoint_every": 1}
    with pytest.raises(lp.NodeError):
        rl.run_experiment(config(**options), run_dir=tmp_path)
    with pytest.raises(lp.NodeError) as caught:
        rl.run_experiment(config(**options), run_dir=tmp_path)
    cause = caught.value.__cause__
    assert isinstance(cause, rl.EnvironmentFailed) and (cause.actor, cause.environment) == ("actor/0", 0)


@pytest.mark.parametrize("table", ["ratio", "queue"])
@pytest.mark.parametrize("vector", [False, True])
def test_free_order_takes_exactly_its_steps_and_keeps_the_ratio(table: str, vector: bool) -> None:
    def make(seed: int) -> Any:
        return gym.vector.SyncVectorEnv([Bandit] * 3) if vector else Bandit()

    builder = BanditBuilder(None if table == "ratio" else rl.Table.queue(16))
    options = {"order": rl.Free(), "max_num_actor_steps": 1003, "environment_factory": make, "envs_per_actor": 3}
    counts = rl.run_experiment(config(builder, **options), num_actors=4).counts
    assert counts["env_steps"] == counts["inserts"] == (1002 if vector else 1003)
    wanted = 1.5 * (counts["inserts"] - 10) if table == "ratio" else counts["inserts"]
    assert abs(counts["samples"] - wanted) <= 4 == counts["samples"] / counts["learner_steps"]


def test_a_band_that_is_narrower_than_a_batch_is_refused() -> None:
    narrow = rl.Table(1_000, rate_limiter=rl.SampleToInsertRatio(1.5, 10, 3.0))
    with pytest.raises(ValueError, match=r"3 .*4"):
        rl.run_experiment(config(BanditBuilder(narrow)))
    with pytest.raises(ValueError, match=r"3 .*4"):
        rl.make_distributed_experiment(config(BanditBuilder(narrow)), num_actors=2)
