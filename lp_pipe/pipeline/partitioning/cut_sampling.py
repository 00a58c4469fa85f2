"""The choice of fewer cuts where a search of all of them would take too long."""

from collections.abc import Sequence

import numpy as np

from lp_pipe.pipeline.partitioning.cost import Memory
from lp_pipe.pipeline.partitioning.topology import Level

MOST_WORK = 2e8  # numbers that a search may compare, which takes a second or two


def work(states: int, levels: tuple[Level, ...], memory: Memory | None) -> float:
    """Return about how many numbers a search compares."""
    total = 0.0
    devices = 1
    for depth, level in enumerate(levels, start=1):
        is_top = depth == len(levels)
        inner, devices = devices, devices * level.count
        pairs = states**2 / 2 if is_top else states**3 / 6
        if memory is None:
            counts = [1] * level.count
        else:
            # By devices used and devices behind: how many devices the first stage may have with r replicas.
            tables = 1 if is_top else _behind(levels, depth)
            used = np.arange(1, devices + 1)
            counts = [tables * int(np.minimum(used // r, inner).sum()) for r in range(1, level.count + 1)]
        for r, count in enumerate(counts, start=1):
            columns = 1 if memory is not None and depth == 1 else level.count - r + 1
            # Each call of numpy costs as much as some thousand numbers.
            total += count * (pairs * columns + 2000 * states)
        if is_top and memory is None and depth == 1:
            total -= pairs * level.count * (level.count + 1) / 2  # where a window of the table is enough
    return total


def _behind(levels: tuple[Level, ...], depth: int) -> int:
    """Return how many numbers of devices may be behind each replica that the levels above `depth` make."""
    devices, copies = (int(np.prod([level.count for level in some])) for some in (levels, levels[depth:]))
    return sum(-(-devices // replicas) for replicas in range(1, copies + 1))


def affordable(states: int, most: int, levels: tuple[Level, ...], memory: Memory | None) -> int | None:
    """Return how many states can be searched in seconds; None: all `states` can.

    most: states that are each within the next, of which the result is a part.
    """
    most_work = MOST_WORK if memory is None else 2 * MOST_WORK  # tables of limited memory are small and fast
    if work(states, levels, memory) <= most_work:
        return None
    count = most
    while count > 2 and work(count, levels, memory) > most_work:
        count = max(2, int(count * 0.95))
    return count


def near(cuts: Sequence[int], count: int, kept: int) -> list[int]:
    """Return the `kept` of the first `count` numbers that are nearest to the cuts, with the first and the last."""
    distances = np.abs(np.arange(count)[:, None] - np.array(cuts)[None, :]).min(axis=1)
    distances[[0, -1]] = 0
    return sorted(int(number) for number in np.argsort(distances, kind="stable")[:kept])


def evenly(count: int, kept: int) -> list[int]:
    """Return `kept` of the first `count` numbers, evenly spaced, with the first and the last."""
    return [int(number) for number in np.linspace(0, count - 1, kept).astype(int)]
