"""The randomness of each part of an experiment, from the experiment's seed."""

import numpy as np


def seed_sequence(seed: int, role: str, index: int, number: int) -> np.random.SeedSequence:
    """Return the randomness of one episode or step, number `number`, of one part of an experiment."""
    return np.random.SeedSequence((seed, int.from_bytes(role.encode(), "big"), index, number))


def environment_seed(seed: int, role: str, index: int, episode: int) -> int:
    """Return the seed of an episode, below 2^31. Those of evaluations are odd and all others even."""
    word = int(seed_sequence(seed, role, index, episode).generate_state(1)[0])
    return (word >> 2) * 2 + (role == "evaluation")


def generator_of(seed: int, role: str) -> np.random.Generator:
    """Return the generator of a part of which there is one in an experiment."""
    return np.random.default_rng(seed_sequence(seed, role, 0, 0))
