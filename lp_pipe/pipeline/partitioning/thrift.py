"""The plan that needs least memory, whatever time it takes: whether any fits, and where to cut so that one does."""

from typing import NamedTuple

import numpy as np

from lp_pipe.pipeline.partitioning.cost import Memory
from lp_pipe.pipeline.partitioning.search import memory_needed
from lp_pipe.pipeline.partitioning.states import States


class Thriftiest(NamedTuple):
    """bytes: of its fullest device. cuts: the states between its stages, with the first and the last."""

    bytes: float
    cuts: list[int]


def thriftiest(states: States, memory: Memory, devices: int) -> Thriftiest:
    """The one that needs least, without replicas; the first one that fits, if one does."""
    needs = np.full(states.count, np.inf)
    needs[-1] = 0
    best = Thriftiest(np.inf, [])
    ends = []  # by number of stages left: where the first of them ends, by where it starts
    for stages in range(1, min(devices, states.count - 1) + 1):
        needed = np.where(states.within, memory_needed(states, memory, stages), np.inf)
        fullest = np.maximum(needed, needs[None, :])
        ends.append(fullest.argmin(axis=1))
        needs = fullest.min(axis=1)
        if needs[0] < best.bytes:
            cuts = [0]
            for end in reversed(ends):
                cuts.append(int(end[cuts[-1]]))
            best = Thriftiest(float(needs[0]), cuts)
        if best.bytes <= memory.limit:
            break
    return best
