"""Measure what the agents learn, in how many environment steps and CPU seconds.

    python -m benchmarks.rl_learning [--tasks catch_dqn ...] [--seeds 3] [--modes single thread process]
        [--parallel 2] [--quick] [--json FILE]

Each task has a bar for the mean return of 100 episodes on seeds that neither training nor evaluation used, reached
within a number of environment steps. CPU seconds are those of training with its evaluations, all processes together.
Modes thread and process are the distributed program with two actors: as many environment steps, the same bits.
"""

import argparse
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

import lp_pipe as lp
import lp_pipe.rl as rl
from benchmarks.report import machine, show_table, write_json
from examples import cartpole_ppo, catch_dqn, pendulum_sac
from lp_pipe.rl.agents.dqn import QNetwork

HELD_OUT = 100  # episodes
FIRST_SEED = 5_000_000_000  # beyond those of an experiment, which are below 2^31


class TMaze(gymnasium.Env[Any, Any]):
    """A corridor, at whose end the agent turns left or right; which of them pays is shown at its start only.

    Source: Bakker, "Reinforcement Learning with Long Short-Term Memory" (2001), with a reward of 1.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)  # the sign; in the corridor; at its end
    action_space = gymnasium.spaces.Discrete(3)  # forward, left, right

    def __init__(self, length: int = 10) -> None:
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._time, self._side = 0, 0, int(self.np_random.integers(2))
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._time += 1
        is_at_end = self._place == self._length
        if is_at_end and action != 0:
            return self._observed(), float(action - 1 == self._side), True, False, {}
        bumps = is_at_end or action != 0
        self._place += not bumps
        return self._observed(), -0.1 * bumps, False, self._time == 2 * self._length, {}

    def _observed(self) -> Any:
        sign = 2.0 * self._side - 1.0 if self._place == 0 else 0.0
        return np.array([sign, 0 < self._place < self._length, self._place == self._length], np.float32)


def make_t_maze(seed: int) -> TMaze:
    return TMaze()


def catch(builder: rl.Builder, order: rl.Rounds, envs_per_actor: int) -> Callable[[int], rl.ExperimentConfig]:
    evaluation = rl.Evaluation(every=1_000, episodes=100, stop_at=1.0)

    def make(seed: int) -> rl.ExperimentConfig:
        return rl.ExperimentConfig(
            builder,
            catch_dqn.make_catch,
            10_000,
            seed=seed,
            evaluation=evaluation,
            order=order,
            envs_per_actor=envs_per_actor,
        )

    return make


class PoleNetwork(QNetwork):
    """The values of the actions; the angle, which stays below 0.21, is as large for it as the other observations."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return super().forward(observations * torch.tensor([1.0, 1.0, 5.0, 1.0]))


def cartpole_dqn(seed: int) -> rl.ExperimentConfig:
    # A step of the learner for each of the environment: with half of it some seeds forget what they have learned.
    config = rl.DQNConfig(learning_rate=5e-4, target_every=250, samples_per_insert=64.0, epsilon_steps=4_000)
    return rl.ExperimentConfig(
        rl.DQNBuilder(config),
        "CartPole-v1",
        40_000,
        seed=seed,
        network_factory=PoleNetwork,
        evaluation=rl.Evaluation(every=500, episodes=20, stop_at=495.0),
        order=rl.Rounds(steps=64, lag=0),  # the weights that pass are the last ones
    )


def t_maze(lstm: int | None) -> Callable[[int], rl.ExperimentConfig]:
    config = rl.IMPALAConfig(lstm=lstm, samples_per_insert=8.0, max_queue_size=200, learning_rate=3e-3)
    evaluation = rl.Evaluation(every=5_000, episodes=100, stop_at=0.95)

    def make(seed: int) -> rl.ExperimentConfig:
        return rl.ExperimentConfig(
            rl.IMPALABuilder(config),
            make_t_maze,
            30_000 if lstm else 15_000,
            seed=seed,
            evaluation=evaluation,
            order=rl.Rounds(steps=320, lag=1),
            envs_per_actor=16,
        )

    return make


# With an entropy weight of 0.01 a policy may never try the column that it misses.
CATCH_IMPALA = rl.IMPALAConfig(
    sequence_length=9, samples_per_insert=16.0, max_queue_size=100, learning_rate=2e-3, entropy_weight=0.03
)


class Task(NamedTuple):
    """An experiment by seed, the bar for its return (from there on, or up to there), and for its CPU seconds.

    is_recurrent: `Result.policy` has no memory, so the last evaluation's return counts.
    """

    make: Callable[[int], rl.ExperimentConfig]
    bar: float
    is_at_most: bool = False
    is_recurrent: bool = False
    cpu_s: float | None = None


TASKS = {
    "catch_dqn": Task(catch_dqn.experiment, 1.0),
    "catch_ppo": Task(catch(rl.PPOBuilder(), rl.Rounds(256, 0), 8), 1.0),
    "catch_impala": Task(catch(rl.IMPALABuilder(CATCH_IMPALA), rl.Rounds(144, 0), 8), 1.0),
    "cartpole_dqn": Task(cartpole_dqn, 475.0),
    "cartpole_ppo": Task(cartpole_ppo.experiment, 475.0, cpu_s=15.0),
    "pendulum_sac": Task(pendulum_sac.experiment, -200.0),
    "t_maze_lstm": Task(t_maze(32), 0.9, is_recurrent=True),
    "t_maze_feed_forward": Task(t_maze(None), 0.6, is_at_most=True),
}


def held_out_return(experiment: rl.ExperimentConfig, policy: Callable[[Any], Any]) -> float:
    """Return the mean return of 100 episodes on seeds that the experiment does not have."""
    factory = experiment.environment_factory
    environment = gymnasium.make(factory) if isinstance(factory, str) else factory(FIRST_SEED)
    total = 0.0
    for number in range(HELD_OUT):
        observation, _ = environment.reset(seed=FIRST_SEED + number)
        is_over = False
        while not is_over:
            observation, reward, terminated, truncated, _ = environment.step(policy(observation))
            total += float(reward)
            is_over = terminated or truncated
    return total / HELD_OUT


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it has waited for."""
    return sum(os.times()[:4])


def run(name: str, seed: int, mode: str) -> dict[str, Any]:
    """Train, and prove what was learned."""
    torch.set_num_threads(1)
    task = TASKS[name]
    experiment = task.make(seed)
    before, start = cpu_seconds(), time.perf_counter()
    if mode == "single":
        result = rl.run_experiment(experiment)
    else:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # of nodes
            lp.launch(rl.make_distributed_experiment(experiment, num_actors=2), mode, run_dir=folder).wait()
            result = rl.load(folder)
    cpu_s, wall_s = cpu_seconds() - before, time.perf_counter() - start
    score = result.score if task.is_recurrent else held_out_return(experiment, result.policy)
    is_enough = score <= task.bar if task.is_at_most else score >= task.bar
    is_within = result.counts["env_steps"] <= experiment.max_num_actor_steps
    return {
        "seed": seed,
        "mode": mode,
        "return": score,
        "env_steps": result.counts["env_steps"],
        "learner_steps": result.counts["learner_steps"],
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "fingerprint": result.fingerprint,
        "curve": result.curve,
        "passed": is_enough and is_within and (task.cpu_s is None or mode != "single" or cpu_s <= task.cpu_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=["single", "thread", "process"], default=["single"])
    parser.add_argument("--parallel", type=int, default=2, help="experiments at a time, each in a process")
    parser.add_argument("--quick", action="store_true", help="one seed of the tasks on Catch")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.tasks = 1, [name for name in TASKS if name.startswith("catch")]
    jobs = [
        (name, seed, mode) for name in arguments.tasks for mode in arguments.modes for seed in range(arguments.seeds)
    ]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.tasks}
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.parallel, context, max_tasks_per_child=1) as pool:
        for (name, seed, mode), found in zip(jobs, pool.map(run, *zip(*jobs, strict=True)), strict=True):
            task = TASKS[name]
            runs[name].append(found)
            bar = f"{'≤' if task.is_at_most else '≥'} {task.bar:g}"
            steps = f"{found['env_steps']:,} of {task.make(seed).max_num_actor_steps:,}"
            seconds = f"{found['cpu_s']:.1f}" + ("" if task.cpu_s is None else f" of {task.cpu_s:g}")
            figures = [f"{found['return']:.2f}", bar, steps, seconds, f"{found['wall_s']:.1f}"]
            rows.append([f"{name}, seed {seed}, {mode}", *figures, "yes" if found["passed"] else "NO"])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    show_table("What agents learn", ["task", "return", "bar", "env steps", "CPU s", "wall s", "passed"], rows)
    write_json({"benchmark": "rl_learning", "machine": machine(), "tasks": runs}, arguments.json)
    if not all(one["passed"] for some in runs.values() for one in some):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
