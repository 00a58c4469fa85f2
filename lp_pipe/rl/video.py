"""Films an episode of an evaluation: what its environment renders becomes an animated GIF."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_LONGER_SIDE = 320  # pixels
_MOST_FRAMES = 600  # all are in memory until the file is written
_SHORTEST_FRAME_S = 0.02  # browsers show shorter ones for 0.1 s
_DEFAULT_FPS = 30.0


class FilmedEnvironment:
    """An environment that passes calls on, and keeps a picture after each one of an episode that is filmed.

    Of a VectorEnv, its first environment is filmed. Rendering must not change what the environment returns.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._is_vector = hasattr(environment, "single_observation_space")
        self._film: _Film | None = None
        self._is_filming = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, **given: Any) -> Any:
        result = self._environment.reset(**given)
        self._take()
        return result

    def step(self, action: Any) -> Any:
        result = self._environment.step(action)
        is_end = bool(np.ravel(result[2])[0] or np.ravel(result[3])[0])
        if not (is_end and self._is_vector):  # it may show the next episode by now
            self._take()
        self._is_filming = self._is_filming and not is_end
        return result

    def begin(self) -> None:
        """Film the episode that begins with the next reset."""
        self._film, self._is_filming = _Film(_fps_of(self._environment)), True

    def write(self, path: Path) -> None:
        """Write the episode that was filmed. A file that is there is replaced as a whole."""
        assert self._film is not None, "comes after `begin`"
        self._film.write(path)
        self._film, self._is_filming = None, False

    def _take(self) -> None:
        if self._is_filming and self._film is not None:
            self._film.add(lambda: picture_of(self._environment))


class _Film:
    """The pictures of an episode. Of a long one every second, fourth, … is kept, so that it passes more quickly."""

    def __init__(self, fps: float) -> None:
        self._every = math.ceil(fps * _SHORTEST_FRAME_S)
        self._frame_s = self._every / fps
        self._seen = 0
        self._images: list[Any] = []

    def add(self, render: Callable[[], Any]) -> None:
        """Take the next picture, if it is one of those that are kept."""
        if self._seen % self._every == 0:
            self._images.append(_small(render()))
            if len(self._images) == _MOST_FRAMES:
                self._images = self._images[::2]
                self._every *= 2
        self._seen += 1

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}")
        first, *others = self._images
        duration = round(1_000 * self._frame_s)
        first.save(unfinished, format="GIF", save_all=True, append_images=others, duration=duration, loop=0)
        unfinished.replace(path)


def check_can_film(environment: Any) -> None:
    """Check that an environment renders pictures, and that they can be written. It is reset.

    Raises:
        ImportError: pillow is not installed.
        ValueError: the environment has another render_mode than "rgb_array", or its render() fails.
    """
    _pillow()
    name = getattr(getattr(environment, "spec", None), "id", None) or type(environment).__name__
    mode = getattr(environment, "render_mode", None)
    if mode != "rgb_array":
        raise ValueError(
            f"Evaluation: video_every needs an environment with render_mode='rgb_array', but {name} has "
            f"render_mode={mode!r}: environment_factory must give it that"
        )
    try:
        environment.reset(seed=0)
        picture_of(environment)
    except Exception as error:
        raise ValueError(
            f"Evaluation: video_every needs pictures of {name}, whose render() failed: {type(error).__name__}: {error}"
        ) from error


def picture_of(environment: Any) -> Any:
    """Return what an environment, or the first one of a VectorEnv, renders: uint8 [height, width, 3].

    Raises:
        ValueError: it renders something else.
    """
    found = environment.render()
    picture = np.asarray(found[0] if hasattr(environment, "single_observation_space") and found is not None else found)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueError(f"render() must return uint8 [height, width, 3], got {picture.dtype} {list(picture.shape)}")
    return picture


def _small(picture: Any) -> Any:
    """Return a picture of at most so many pixels as an image of 256 colours."""
    pillow = _pillow()
    image = pillow.fromarray(picture)
    image.thumbnail((_LONGER_SIDE, _LONGER_SIDE))
    return image.quantize(dither=pillow.Dither.NONE)


def _fps_of(environment: Any) -> float:
    return float((environment.metadata or {}).get("render_fps") or _DEFAULT_FPS)


def _pillow() -> Any:
    try:
        from PIL import Image  # an extra, which only videos need
    except ImportError as error:
        raise ImportError("Evaluation: video_every needs pillow: pip install 'lp_pipe[video]'") from error
    return Image
