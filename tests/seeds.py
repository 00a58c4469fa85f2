"""Random numbers of tests, which can be repeated."""

import os
import random


def random_numbers(seed: int) -> random.Random:
    """Return random numbers from the seed in the variable TEST_SEED, or else from `seed`, and print which."""
    chosen = int(os.environ.get("TEST_SEED", seed))
    print(f"TEST_SEED={chosen}")
    return random.Random(chosen)
