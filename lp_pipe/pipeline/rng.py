"""Random numbers that depend on what is computed, never on which process computes it."""

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# torch's default generator belongs to the process: two stages in threads would draw from each other's stream.
_generator_lock = threading.RLock()

_inside = threading.local()  # .microbatch: that of the step_rng body in which this thread is


@contextmanager
def layer_rng(seed: int, index: int) -> Iterator[None]:
    """Draw the initial weights of layer `index` in the body; afterwards torch's generator is as it was before."""
    with _seeded(b"layer", seed, index):
        yield


@contextmanager
def step_rng(seed: int, layer: int, step: int, microbatch: int) -> Iterator[None]:
    """Draw layer `layer`'s dropout for one micro-batch of one step in the body; restores torch's generator.

    Use it in a plain loop too, around the call of each layer, to get the very masks that a pipeline draws.
    Stages that are threads take turns in such bodies.
    """
    outer = getattr(_inside, "microbatch", None)
    _inside.microbatch = microbatch
    try:
        with _seeded(b"step", seed, layer, step, microbatch):
            yield
    finally:
        _inside.microbatch = outer


def current_microbatch() -> int:
    """The micro-batch of the `step_rng` body that this thread is in."""
    microbatch: int = _inside.microbatch
    return microbatch


@contextmanager
def _seeded(purpose: bytes, *numbers: int) -> Iterator[None]:
    digest = hashlib.blake2b(purpose + struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    with _generator_lock:
        generators = _generators()
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def _generators() -> list[torch.Generator]:
    """torch's own that a layer may draw from here: the host's, and the current GPU's if one is in use."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
