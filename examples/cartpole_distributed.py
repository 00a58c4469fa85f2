"""PPO learns to balance a pole with four actors, as a program and in one process, with the same bits.

    python -m examples.cartpole_distributed
    lp_pipe launch examples/cartpole_distributed.py --run-dir=runs/pole -- --actors=4

The page docs/agents.md explains it.
"""

import tempfile
from typing import Any

import lp_pipe as lp
import lp_pipe.rl as rl


def experiment(steps: int = 30_000, actors: int = 4, seed: int = 0, **options: Any) -> rl.ExperimentConfig:
    settings: dict[str, Any] = {
        "evaluation": rl.Evaluation(every=2_500, episodes=10, stop_at=495.0),
        "order": rl.Rounds(steps=512 // actors, lag=0),  # one update a round
        "envs_per_actor": max(1, 8 // actors),
        "checkpoint_every": 100,
        **options,
    }
    return rl.ExperimentConfig(rl.PPOBuilder(), "CartPole-v1", steps, seed=seed, **settings)


def make_program(steps: int = 30_000, actors: int = 4, seed: int = 0) -> lp.Program:
    return rl.make_distributed_experiment(experiment(steps, actors, seed), num_actors=actors)


if __name__ == "__main__":
    with lp.launch(make_program(), mode="process", run_dir=tempfile.mkdtemp()) as run:
        run.wait()
    distributed, single = rl.load(run.run_dir), rl.run_experiment(experiment(), num_actors=4)
    for env_steps, score in distributed.curve:
        print(f"{env_steps:6d} steps: mean return {score:5.1f}")
    print(dict(distributed.counts))
    print(f"as a program {distributed.fingerprint[:16]}, in one process {single.fingerprint[:16]}")
