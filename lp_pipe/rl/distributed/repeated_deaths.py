"""Tells a node that dies again and again at the same place, which no restart mends, from one that is killed."""

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import lp_pipe as lp
from lp_pipe.errors import Unrecoverable
from lp_pipe.programs.generations import StaleGeneration

_PLACE = struct.Struct("<6q")  # whether there is one, round, steps, episode, step, seed
_NONE = (0, 0, 0, 0, 0, 0)


class DiesRepeatedly(Unrecoverable):
    """A node of an experiment has died twice in a row at the same round and step."""


class RepeatedDeaths:
    """Where the node is in its work, in a file in the run's folder, which outlives the node's process."""

    def __init__(self, name: str) -> None:
        """Raises:
        DiesRepeatedly: the last two lives of the node ended at the same place.
        """
        folder = Path(lp.context().run_dir) / "places"
        folder.mkdir(parents=True, exist_ok=True)
        # All lives of a node in one launch have the same template process, or are threads of one process. The end of a
        # whole program is no death of its nodes.
        is_thread = threading.current_thread() is not threading.main_thread()
        launch = os.getpid() if is_thread else os.getppid()
        descriptor = os.open(folder / f"{name}-{launch}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, 2 * _PLACE.size)
            self._memory = mmap.mmap(descriptor, 2 * _PLACE.size)
        finally:
            os.close(descriptor)
        place = self._now()
        if place == self._last_death() != _NONE:
            self.leave()
            raise DiesRepeatedly(f"the node has died twice at the same place: {_described(place)}")
        if place != _NONE:
            _PLACE.pack_into(self._memory, _PLACE.size, *place)
        self.leave()

    def at(self, number: int, steps: int, episode: int = -1, step: int = -1, seed: int = -1) -> None:
        """Note the place of the next piece of work: if the node dies, that is where."""
        _PLACE.pack_into(self._memory, 0, 1, number, steps, episode, step, seed)

    def leave(self, number: int = -1) -> None:
        """Note that the node waits: a death is not due to its work. number: the round in which an error may occur."""
        self._number = number
        _PLACE.pack_into(self._memory, 0, *_NONE)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count an error in the body.

        Raises:
            DiesRepeatedly: the node has ended with an error or a death at the same place before.
        """
        try:
            yield
        except (Unrecoverable, lp.Unavailable, StaleGeneration):
            self.leave()
            raise
        except Exception as error:
            if self._now() == _NONE:
                self.at(self._number, -1)
            place = self._now()
            if place == self._last_death():
                self.leave()
                raise DiesRepeatedly(
                    f"{type(error).__name__}: {error}\nThis was raised twice at the same place: {_described(place)}"
                ) from error
            raise  # the place stays: the node's next life reads it
        self.leave(self._number)

    def _now(self) -> tuple[int, ...]:
        return _PLACE.unpack_from(self._memory, 0)

    def _last_death(self) -> tuple[int, ...]:
        return _PLACE.unpack_from(self._memory, _PLACE.size)


def _described(place: tuple[int, ...]) -> str:
    _, number, steps, episode, step, seed = place
    if number < 0:
        return "before its first step"
    text = f"round {number}" if steps < 0 else f"round {number}, step {steps}"
    return text if episode < 0 else f"{text} (episode {episode}, its step {step}, seed {seed})"
