"""Evaluations are filmed every so many steps, without any influence on the result."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from tests.rl.bandit import Bandit, config

gym = pytest.importorskip("gymnasium")
pytest.importorskip("PIL")


class Lamp(Bandit):
    """Shows how many steps of its episode were taken."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 100}  # noqa: RUF012 - as gymnasium declares it

    def __init__(self, render_mode: str | None = "rgb_array", size: int = 60) -> None:
        super().__init__()
        self.render_mode, self.size = render_mode, size

    def render(self) -> Any:
        return np.full((self.size, 2 * self.size, 3), 60 * self.time, dtype=np.uint8)


def make_lamp(seed: int) -> Lamp:
    return Lamp(size=400)


def frames_of(path: Path) -> list[tuple[tuple[int, int], int, int]]:
    """Return size, brightness and duration of each frame."""
    from PIL import Image, ImageSequence

    frames = []
    with Image.open(path) as video:
        for frame in ImageSequence.Iterator(video):
            pixel: Any = frame.convert("RGB").getpixel((0, 0))
            frames.append((frame.size, pixel[0], frame.info["duration"]))
    return frames


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "videos").iterdir())


def test_one_episode_is_filmed_every_so_many_steps(no_leaks: None, tmp_path: Path) -> None:
    evaluation = rl.Evaluation(every=16, episodes=4, video_every=40)
    filmed = config(environment_factory=make_lamp, evaluation=evaluation)
    found = rl.run_experiment(filmed, 2, run_dir=tmp_path / "single")
    plain = rl.run_experiment(config(evaluation=rl.Evaluation(every=16, episodes=4)), 2)
    assert (found.fingerprint, found.counts) == (plain.fingerprint, plain.counts)
    assert names_in(tmp_path / "single") == ["evaluation-000000048.gif", "evaluation-000000080.gif"]
    assert [env_steps for env_steps, _ in found.curve] == [16, 32, 48, 64, 80, 96, 103]
    # At 100 steps a second every second one is shown, for 20 ms: those after 0 and 2 of the episode's 3 steps.
    assert frames_of(tmp_path / "single" / "videos" / "evaluation-000000048.gif") == [
        ((320, 160), b, 20) for b in (0, 120)
    ]
    with lp.launch(rl.make_distributed_experiment(filmed, 2), mode="thread", run_dir=tmp_path / "threads") as run:
        run.wait(60)
    assert names_in(tmp_path / "threads") == names_in(tmp_path / "single")
    assert rl.load(tmp_path / "threads").fingerprint == plain.fingerprint


def test_the_first_environment_of_a_vector_is_filmed(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        return gym.vector.SyncVectorEnv([Lamp] * 2)

    evaluation = rl.Evaluation(every=60, episodes=3, video_every=60)
    rl.run_experiment(config(environment_factory=make, evaluation=evaluation), run_dir=tmp_path)
    assert [brightness for _, brightness, _ in frames_of(next((tmp_path / "videos").iterdir()))] == [0, 120]


def test_what_cannot_be_filmed_is_refused_before_any_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    evaluation = rl.Evaluation(video_every=10)
    for make, error, words in (
        (lambda seed: Lamp(render_mode=None), ValueError, ("Lamp", "rgb_array", "None")),
        (lambda seed: Lamp(render_mode="human"), ValueError, ("Lamp", "human")),
        (lambda seed: Lamp(size=-1), ValueError, ("Lamp", "negative")),
    ):
        with pytest.raises(error) as caught:
            rl.make_distributed_experiment(config(environment_factory=make, evaluation=evaluation))
        assert all(word in str(caught.value) for word in words)
    filmed = config(environment_factory=make_lamp, evaluation=evaluation)
    with pytest.raises(ValueError, match="run_dir"):
        rl.run_experiment(filmed)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"lp_pipe\[video\]"):
        rl.make_distributed_experiment(filmed)
