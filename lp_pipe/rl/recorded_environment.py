"""Records the calls of an environment, so that a new one can be brought to the same place."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lp_pipe.rl.tree import leaves_of


class EnvironmentCalls(NamedTuple):
    """The calls by which an environment has come to where it is, since its last full reset.

    life: how often it was made anew before. first: how many earlier calls are not in `calls`; 0: none. digest: of all
    that the environment has returned.
    """

    life: int
    first: int
    calls: list[tuple[Any, ...]]
    digest: str


class RecordedEnvironment:
    """An environment, with the calls since its last full reset, so that another one can be brought to the same place.

    is_recording: if not, it only passes calls on.
    """

    def __init__(self, environment: Any, life: int, is_recording: bool) -> None:
        self.environment, self.life, self._is_recording = environment, life, is_recording
        self._calls: list[tuple[Any, ...]] = []
        self._num_told = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def reset(self, seed: Any, options: Mapping[str, Any] | None = None) -> Any:
        given = {} if options is None else {"options": dict(options)}  # a VectorEnv takes the mask out of it
        if self._is_recording:
            if options is None or np.all(options["reset_mask"]):
                self._calls, self._num_told, self._digest = [], 0, hashlib.blake2b(digest_size=16)
            self._calls.append(("reset", seed, options))
        first, info = self.environment.reset(seed=seed, **given)
        self._add_to_digest(first)
        return first, info

    def step(self, action: Any) -> Any:
        if self._is_recording:
            self._calls.append(("step", action))
        result = self.environment.step(action)
        self._add_to_digest(result[:4])
        return result

    def new_calls(self) -> EnvironmentCalls:
        """Return the calls since the last time, and the digest."""
        first, self._num_told = self._num_told, len(self._calls)
        return EnvironmentCalls(self.life, first, self._calls[first:], self._digest.hexdigest())

    def play_again(self, known: EnvironmentCalls) -> bool:
        """Make the calls; return whether the environment has returned the same as then."""
        for name, *arguments in known.calls:
            getattr(self, name)(*arguments)
        self._num_told = len(self._calls)
        return self._digest.hexdigest() == known.digest

    def _add_to_digest(self, result: Any) -> None:
        if self._is_recording:
            for _, leaf in leaves_of(result):
                self._digest.update(np.ascontiguousarray(leaf).tobytes())
