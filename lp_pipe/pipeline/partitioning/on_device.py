"""What a stage takes, and holds, on one of its devices."""

from typing import Any

import numpy as np

from lp_pipe.pipeline.partitioning.cost import Memory, Waiting
from lp_pipe.pipeline.partitioning.states import Floats, States

Index = Any  # of states: a number, or an array of them


def between(values: Floats, start: Index, ends: Index) -> Floats:
    """Sums of the layers between states; none is negative, though sums of numbers that are not exact may be."""
    differences: Floats = np.maximum(values[ends] - values[start], 0)
    return differences


def seconds_on_device(states: States, memory: Memory | None, start: Index, ends: Index, waiting: Waiting) -> Floats:
    """Of a device of stages from one state to others, which holds so much of them; inf: they do not fit."""
    seconds = between(states.compute, start, ends)
    if memory is None:
        return seconds
    if memory.recompute == "auto":
        parameters, activations = between(states.parameters, start, ends), between(states.activations, start, ends)
        does_fit = memory.kept(parameters, activations, waiting) <= memory.limit
        seconds = seconds + np.where(does_fit, 0.0, between(states.forward, start, ends))
    return np.where(bytes_on_device(states, memory, start, ends, waiting) <= memory.limit, seconds, np.inf)


def bytes_on_device(states: States, memory: Memory, start: Index, ends: Index, waiting: Waiting) -> Floats:
    """Of a device of stages from one state to others."""
    parameters, activations = between(states.parameters, start, ends), between(states.activations, start, ends)
    needed: Floats = memory.needed(parameters, activations, states.crossing[start], waiting)
    return needed
