"""DQN learns to catch a falling ball: python -m examples.catch_dqn"""

from typing import Any

import gymnasium
import numpy as np

import lp_pipe.rl as rl

ROWS, COLUMNS = 10, 5


class Catch(gymnasium.Env[Any, Any]):
    """A ball falls from a random column; the paddle in the last row moves left, stays or moves right."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (ROWS, COLUMNS), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._row, self._column, self._paddle = 0, int(self.np_random.integers(COLUMNS)), COLUMNS // 2
        return self._board(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._row += 1
        self._paddle = min(COLUMNS - 1, max(0, self._paddle + int(action) - 1))
        is_last = self._row == ROWS - 1
        reward = (1.0 if self._paddle == self._column else -1.0) if is_last else 0.0
        return self._board(), reward, is_last, False, {}

    def _board(self) -> Any:
        board = np.zeros((ROWS, COLUMNS), dtype=np.float32)
        board[self._row, self._column] = board[ROWS - 1, self._paddle] = 1.0
        return board


def make_catch(seed: int) -> Catch:
    return Catch()


def experiment(seed: int = 0, max_num_actor_steps: int = 10_000, **options: Any) -> rl.ExperimentConfig:
    evaluation = rl.Evaluation(every=1_000, episodes=100, stop_at=1.0)
    settings = {"evaluation": evaluation, "order": rl.Rounds(steps=64, lag=1), **options}
    return rl.ExperimentConfig(rl.DQNBuilder(rl.DQNConfig()), make_catch, max_num_actor_steps, seed=seed, **settings)


if __name__ == "__main__":
    result = rl.run_experiment(experiment())
    for env_steps, score in result.curve:
        print(f"{env_steps:6d} steps: mean return {score:5.2f}")
    print(dict(result.counts), result.fingerprint[:16])
