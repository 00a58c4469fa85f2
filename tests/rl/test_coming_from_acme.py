"""The diff on the page for those who come from Acme makes a script like its run_dqn.py run, alone and distributed."""

from typing import Any

import pytest

from tests.data_parallel.test_pages import applied, diffs_of

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.usefixtures("no_leaks")

MOST_LINES = 9  # of the script that change
SCRIPT = """\
from acme.agents.jax import dqn
from acme.agents.jax.dqn import losses
from acme.jax import experiments
import launchpad as lp


def build_experiment(num_steps):
    config = dqn.DQNConfig(
        discount=0.99,
        eval_epsilon=0.0,
        learning_rate=1e-3,
        n_step=1,
        epsilon=0.05,
        target_update_period=100,
        min_replay_size=100,
        max_replay_size=10_000,
        samples_per_insert=8,
        batch_size=32,
    )
    loss_fn = losses.QLearning(discount=config.discount, max_abs_reward=1.0)
    builder = dqn.DQNBuilder(config, loss_fn=loss_fn)
    return experiments.ExperimentConfig(
        builder=builder,
        environment_factory=make_environment,
        network_factory=make_network,
        seed=0,
        max_num_actor_steps=num_steps,
    )


def main(num_steps, run_distributed):
    experiment = build_experiment(num_steps)
    if run_distributed:
        program = experiments.make_distributed_experiment(experiment=experiment, num_actors=2)
        lp.launch(program)
    else:
        experiments.run_experiment(experiment)
"""


def test_nine_changed_lines_run_an_experiment_of_acme(monkeypatch: pytest.MonkeyPatch) -> None:
    import lp_pipe as lp
    import lp_pipe.rl as rl
    from examples.catch_dqn import make_catch
    from lp_pipe.rl.agents.dqn import QNetwork

    (diff,) = diffs_of("coming_from_acme.md")
    assert max(sum(line.startswith(sign) for line in diff) for sign in "+-") == MOST_LINES
    names: dict[str, Any] = {"make_environment": make_catch, "make_network": QNetwork}
    exec(applied(diff, SCRIPT).replace('mode="process"', 'mode="thread"'), names)
    done: list[Any] = []

    def run_experiment(experiment: rl.ExperimentConfig) -> None:
        done.append(original(experiment))

    def launch(program: lp.Program, mode: str) -> lp.Run:
        done.append(program)
        return started(program, mode=mode)

    original, started = rl.run_experiment, lp.launch
    monkeypatch.setattr(rl, "run_experiment", run_experiment)
    monkeypatch.setattr(lp, "launch", launch)
    names["main"](200, run_distributed=False)
    assert done[0].counts["env_steps"] == 200 and done[0].counts["learner_steps"] > 0
    names["main"](200, run_distributed=True)
    assert set(done[1].groups) == {"learner", "replay", "counter", "actor", "evaluator"}
