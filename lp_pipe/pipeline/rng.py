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
    generator = torch.default_generator
    with _generator_lock:
        before = generator.get_state()
        generator.manual_seed(int.from_bytes(digest, "little"))
        try:
            yield
        finally:
            generator.set_state(before)
