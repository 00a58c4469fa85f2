"""SAC learns to swing a pendulum up and to hold it there, in half a minute: python -m examples.pendulum_sac"""

from typing import Any

import lp_pipe.rl as rl


def experiment(seed: int = 0, max_num_actor_steps: int = 8_000, **options: Any) -> rl.ExperimentConfig:
    settings: dict[str, Any] = {
        "evaluation": rl.Evaluation(every=2_000, episodes=20, stop_at=-160.0),
        "order": rl.Rounds(steps=64, lag=1),
        **options,
    }
    return rl.ExperimentConfig(rl.SACBuilder(), "Pendulum-v1", max_num_actor_steps, seed=seed, **settings)


if __name__ == "__main__":
    result = rl.run_experiment(experiment())
    for env_steps, score in result.curve:
        print(f"{env_steps:6d} steps: mean return {score:7.1f}")
    print(dict(result.counts), result.fingerprint[:16])
