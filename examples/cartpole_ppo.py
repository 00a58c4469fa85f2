"""PPO learns to balance a pole, in a quarter of a minute: python -m examples.cartpole_ppo"""

from typing import Any

import lp_pipe.rl as rl


def experiment(seed: int = 0, max_num_actor_steps: int = 30_000, **options: Any) -> rl.ExperimentConfig:
    settings: dict[str, Any] = {
        "evaluation": rl.Evaluation(every=2_500, episodes=10, stop_at=495.0),
        "order": rl.Rounds(steps=512, lag=0),
        "envs_per_actor": 8,
        **options,
    }
    return rl.ExperimentConfig(rl.PPOBuilder(), "CartPole-v1", max_num_actor_steps, seed=seed, **settings)


if __name__ == "__main__":
    result = rl.run_experiment(experiment())
    for env_steps, score in result.curve:
        print(f"{env_steps:6d} steps: mean return {score:5.1f}")
    print(dict(result.counts), result.fingerprint[:16])
