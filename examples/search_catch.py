"""A search for the learning rate with which DQN learns to catch soonest: each trial is an experiment.

lp_pipe launch examples/search_catch.py
lp_pipe experiment best search_catch
"""

import dataclasses

import lp_pipe as lp
import lp_pipe.rl as rl
import lp_pipe.search as ls
from examples.catch_dqn import experiment

STEPS = 2_000


def trial(t: ls.Trial) -> None:
    builder = rl.DQNBuilder(rl.DQNConfig(learning_rate=t.params["lr"], n_step=t.params["n_step"]))
    evaluation = rl.Evaluation(every=500, episodes=50)
    one = dataclasses.replace(experiment(t.seed, t.params["env_steps"], evaluation=evaluation), builder=builder)
    for _ in t.steps():  # one: the whole experiment, which goes on from its own checkpoints after a kill
        result = rl.run_experiment(one, run_dir=t.folder / "experiment")
        t.report({"return": result.score, "mean_of_curve": sum(score for _, score in result.curve) / len(result.curve)})


def make_program(trials: int = 8, slots: int = 2, env_steps: int = STEPS) -> lp.Program:
    return ls.experiment(
        "search_catch",
        trial,
        space={"lr": ls.log(1e-4, 1e-2), "n_step": ls.choice(1, 3), "env_steps": env_steps},
        searcher=ls.Random("mean_of_curve", max_trials=trials, max_steps=1, mode="max"),
        slots=slots,
    )


if __name__ == "__main__":
    lp.launch(make_program(), mode="process").wait()
