"""Random numbers that depend on what is computed, and not on the process that computes it."""

import contextlib
import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch

# torch's default generator belongs to the process: two stages that are threads would draw from one stream.
_generator_lock = threading.RLock()

_STEP = struct.Struct("<4q")


class _Inside(threading.local):
    microbatch: int | None = None  # of the step_rng body that this thread is in


_inside = _Inside()


@contextmanager
def layer_rng(seed: int, index: int) -> Iterator[None]:
    """Draw the initial weights of layer `index` in the body; restores torch's generator."""
    with _SeededGenerators(b"layer" + struct.pack("<2q", seed, index)):
        yield


@contextmanager
def sample_rng(number: int) -> Iterator[None]:
    """Seed torch's CPU generator for a sample of a data set in the body; restores it."""
    with _generator_lock:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(number)
        try:
            yield
        finally:
            torch.set_rng_state(before)


def generators_locked() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no other thread of this process is in a `step_rng`."""
    return _generator_lock


class step_rng:  # a class: contextlib.contextmanager would double the cost
    """Draw layer `layer`'s dropout for one micro-batch of one step in the body; restores torch's generator.

    Use it in a plain loop too, around the call of each layer, to draw the same masks as a pipeline. A loss that draws
    counts as a layer behind the last one. An optimizer that draws (for stage worker s) counts as layer -1 - s, with the
    number of the update in the step in place of a micro-batch. A backward that draws counts as its stage's first layer
    in micro-batch -1 - j.

    Stages that are threads of one process enter such bodies one at a time.
    """

    __slots__ = ("_microbatch", "_outer", "_seeded")

    def __init__(self, seed: int, layer: int, step: int, microbatch: int) -> None:
        self._microbatch = microbatch
        self._seeded = _SeededGenerators(b"step" + _STEP.pack(seed, layer, step, microbatch))

    def __enter__(self) -> None:
        self._seeded.__enter__()
        self._outer = _inside.microbatch
        _inside.microbatch = self._microbatch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _inside.microbatch = self._outer
        self._seeded.__exit__(kind, error, trace)


class PausableRng:
    """A `step_rng` for a body that waits for other threads of this process, which may draw while it is paused."""

    def __init__(self, seed: int, layer: int, step: int, microbatch: int) -> None:
        self._seeded = _SeededGenerators(b"step" + _STEP.pack(seed, layer, step, microbatch))

    def __enter__(self) -> Self:
        self._seeded.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._seeded.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Give the generators back in the body; the numbers go on after it as if nothing had been drawn."""
        inside = [(generator, generator.get_state()) for generator in _generators()]
        self._seeded.__exit__(None, None, None)
        try:
            yield
        finally:
            self._seeded.__enter__()
            for generator, state in inside:
                generator.set_state(state)


def optimizer_place(stage: int) -> int:
    """Return the number that stands for a layer in `step_rng` while an optimizer draws.

    stage: the first stage of the optimizer's worker.
    """
    return -1 - stage


def change_place(first_layer: int) -> int:
    """Return the number that stands for a micro-batch in `step_rng` while a function of `apply` draws.

    first_layer: the first layer of the worker.
    """
    return -(1 << 20) - first_layer


def backward_place(microbatch: int) -> int:
    """Return the number that stands for a micro-batch in `step_rng` while a backward draws.

    The layer is then the first one of the backward's stage.
    """
    return -1 - microbatch


def current_microbatch() -> int:
    """Return the micro-batch of the `step_rng` body that this thread is in."""
    microbatch = _inside.microbatch
    assert microbatch is not None, "only layers ask, and they are called in such a body"
    return microbatch


class _SeededGenerators:
    """A context in which torch's generators start from a hash of `purpose`; restores them."""

    __slots__ = ("_before", "_seed")

    def __init__(self, purpose: bytes) -> None:
        self._seed = int.from_bytes(hashlib.blake2b(purpose, digest_size=8).digest(), "little")

    def __enter__(self) -> None:
        _generator_lock.acquire()
        try:
            self._before = [(generator, generator.get_state()) for generator in _generators()]
            for generator, _ in self._before:
                generator.manual_seed(self._seed)
        except BaseException:
            _generator_lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generator, state in self._before:
            generator.set_state(state)
        _generator_lock.release()


def _generators() -> list[torch.Generator]:
    """Return the generators that a layer may draw from here: the host's, and the current GPU's if one is in use."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
