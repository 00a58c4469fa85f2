"""The examples with agents run; in full, marked slow, they learn what they say."""

from pathlib import Path

import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
import lp_pipe.search as ls

pytest.importorskip("gymnasium")
pytest.importorskip("torch")

SHORT = rl.Evaluation(every=10_000, episodes=1)


def test_the_examples_run() -> None:
    from examples import cartpole_ppo, pendulum_sac

    pole = rl.run_experiment(cartpole_ppo.experiment(0, 1_024, evaluation=SHORT))
    assert pole.counts["env_steps"] == 1_024 and pole.counts["learner_steps"] >= 2
    pendulum = rl.run_experiment(pendulum_sac.experiment(0, 600, evaluation=SHORT))
    assert pendulum.counts["env_steps"] == 600 and pendulum.counts["learner_steps"] >= 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_full_the_pole_stands_and_the_pendulum_swings_up() -> None:
    from examples import cartpole_ppo, pendulum_sac

    assert rl.run_experiment(cartpole_ppo.experiment()).score >= 475.0
    assert rl.run_experiment(pendulum_sac.experiment()).score >= -200.0


def test_an_experiment_is_a_trial_of_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import search_catch

    monkeypatch.setenv("LP_PIPE_RUNS", str(tmp_path))
    lp.launch(search_catch.make_program(trials=2, slots=1, env_steps=600), mode="thread").wait(60.0)
    trials = ls.open("search_catch").trials()
    assert [one.state for one in trials] == ["finished"] * 2 and len({one.params["lr"] for one in trials}) == 2


def test_the_distributed_example_has_the_bits_of_one_process(tmp_path: Path) -> None:
    from examples import cartpole_distributed

    short = cartpole_distributed.experiment(512, actors=2, evaluation=SHORT)
    with lp.launch(rl.make_distributed_experiment(short, 2), mode="thread", run_dir=tmp_path) as run:
        run.wait(60)
    assert rl.load(tmp_path).fingerprint == rl.run_experiment(short, 2).fingerprint
