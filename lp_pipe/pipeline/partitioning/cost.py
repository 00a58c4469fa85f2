"""A cost model: the seconds and bytes of a stage, and the seconds of a boundary between stages.

Legend: C seconds of compute, W bytes of parameters, A bytes that cross a boundary, r replicas, B bytes per second.

    stage     (C + 4(r-1)W/(rB)) / r     replicas share the micro-batches, and all-reduce W bytes of gradients
    boundary  2A/(B·r)                   an activation one way and its gradient the other; on both sides

Source: PipeDream (Narayanan et al., SOSP 2019), section 3.1, as its published optimizer computes it.
"""

from typing import Any, NamedTuple

import numpy as np

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.partitioning.states import Floats, States
from lp_pipe.pipeline.partitioning.topology import Level

ACTION_SECONDS = 1e-4  # of the engine, for one action of a schedule; measured between processes of one host
COST_MODELS = ("pipedream", "overlap")
SCHEDULES = ("1f1b", "gpipe")  # of equal ones "auto" takes the first
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
RECOMPUTES = ("none", "full", "auto")
Index = Any  # of states: a number, or an array of them
Values = Any  # a number or an array of float64; with arrays each operation works on all pairs of cuts at once


class CostModel(NamedTuple):
    """The seconds of stages and boundaries.

    name: "pipedream" adds a stage's compute and its all-reduce, "overlap" takes the longer of the two.
    """

    name: str

    def stage(self, compute: Values, parameters: Values, replicas: Values, level: Level) -> Values:
        """Return the seconds per micro-batch of a stage with replicas that are linked by `level`."""
        exchange = self.exchange(parameters, replicas, level)
        return (np.maximum(compute, exchange) if self.name == "overlap" else compute + exchange) / replicas

    def exchange(self, parameters: Values, replicas: Values, level: Level) -> Values:
        """Return the seconds of a ring all-reduce of that many bytes of gradients."""
        others = replicas - 1
        return 4 * others * parameters / (replicas * level.bandwidth) + 2 * others * level.latency

    def boundary(self, crossing: Values, replicas: Values, level: Level) -> Values:
        """Return the seconds per micro-batch on a side of the boundary that has so many replicas."""
        return (2 * crossing / level.bandwidth + 2 * level.latency * (crossing > 0)) / replicas

    def message(self, crossing: float, level: Level) -> float:
        """Return the seconds of one way over a boundary.

        Half of the bandwidth is for the other way, whether or not that is used.
        """
        return 2 * crossing / level.bandwidth + level.latency * (crossing > 0)


class Waiting(NamedTuple):
    """The most that a replica holds of a stage: micro-batches that wait for their backward, and versions of weights.

    versions: with the newest.
    """

    microbatches: Values
    versions: Values


class Memory(NamedTuple):
    """The memory limit of a device, and the bytes that a stage holds on it.

    A stage holds its weights with what the optimizer keeps for them, and the activations of the micro-batches that wait
    for their backward. A recomputed stage keeps only its input of each, and all activations of one while that runs
    again. With recompute "auto" a stage is recomputed where it would not fit otherwise.
    """

    limit: float
    optimizer_bytes_per_parameter_byte: float
    schedule: str
    recompute: str
    microbatches: int

    def waiting(self, behind: Values, own: Values) -> Waiting:
        """Return what a replica holds that has `own` of a step's micro-batches.

        behind: devices in later stages, for each replica of this one.
        1F1B keeps all devices from a stage on busy: each replica has its share of their micro-batches, rounded up
        (schedule/updates.py: in_flight). The asynchronous schedules are never drained, so that a step's number of
        micro-batches is no limit; PipeDream has a version of the weights for each, 2BW two.
        """
        return {
            "gpipe": Waiting(own, 1),
            "1f1b": Waiting(np.minimum(1 + behind, own), 1),
            "pipedream": Waiting(1 + behind, 1 + behind),
            "pipedream_2bw": Waiting(1 + behind, 2),
        }[self.schedule]

    def waiting_on(self, replicas: Values, devices_behind: Values) -> Waiting:
        """Return what each of so many replicas holds, with so many devices in all later stages together."""
        return self.waiting(-(-devices_behind // replicas), -(-self.microbatches // replicas))

    def alike(self, behind: int, own: int, devices: int) -> tuple[int, int]:
        """Return numbers with which `waiting` says the same of any stages on so many devices.

        Wherever possible they are the same numbers, so that fewer tables are needed.
        """
        if self.schedule == "gpipe":
            return 0, own
        if self.schedule in ASYNCHRONOUS:
            return behind, 0
        own = min(own, behind + devices)
        return min(behind, own - 1), own

    def needed(self, parameters: Values, activations: Values, entering: Values, waiting: Waiting) -> Values:
        """Return the bytes of a stage's device; with recompute "auto" in the way that needs less.

        entering: bytes that cross the boundary before the stage.
        """
        kept = self.kept(parameters, activations, waiting)
        if self.recompute == "none":
            return kept
        recomputed = self.needed_to_recompute(parameters, activations, entering, waiting)
        return recomputed if self.recompute == "full" else np.minimum(kept, recomputed)

    def needed_to_recompute(
        self, parameters: Values, activations: Values, entering: Values, waiting: Waiting
    ) -> Values:
        """Return the bytes of a stage's device where the stage keeps its inputs only."""
        return parameters * self._copies(waiting) + waiting.microbatches * entering + activations

    def kept(self, parameters: Values, activations: Values, waiting: Waiting) -> Values:
        """Return the bytes of a stage's device where nothing is recomputed."""
        return parameters * self._copies(waiting) + waiting.microbatches * activations

    def _copies(self, waiting: Waiting) -> Values:
        """Return how many copies of the parameters there are: versions in use, and what the optimizer keeps."""
        return waiting.versions + self.optimizer_bytes_per_parameter_byte


UNLIMITED = Memory(np.inf, 0.0, "gpipe", "none", 1)


def checked_model(cost_model: str) -> CostModel:
    """Return the cost model of that name.

    Raises:
        PartitionError: there is none.
    """
    if cost_model not in COST_MODELS:
        raise PartitionError(f"cost_model={cost_model!r}: use one of {', '.join(map(repr, COST_MODELS))}")
    return CostModel(cost_model)


def between(values: Floats, start: Index, ends: Index) -> Floats:
    """Return the sums of the layers between states, without negative ones, which rounding may make."""
    differences: Floats = np.maximum(values[ends] - values[start], 0)
    return differences


def seconds_on_device(states: States, memory: Memory | None, start: Index, ends: Index, waiting: Waiting) -> Floats:
    """Return the seconds of stages from one state to others on a device; inf: the stage does not fit.

    waiting: what the device holds of the stage.
    """
    seconds = between(states.compute, start, ends)
    if memory is None:
        return seconds
    if memory.recompute == "auto":
        parameters, activations = between(states.parameters, start, ends), between(states.activations, start, ends)
        does_fit = memory.kept(parameters, activations, waiting) <= memory.limit
        seconds = seconds + np.where(does_fit, 0.0, between(states.forward, start, ends))
    return np.where(bytes_on_device(states, memory, start, ends, waiting) <= memory.limit, seconds, np.inf)


def bytes_on_device(states: States, memory: Memory, start: Index, ends: Index, waiting: Waiting) -> Floats:
    """Return the bytes that a device needs for stages from one state to others."""
    parameters, activations = between(states.parameters, start, ends), between(states.activations, start, ends)
    needed: Floats = memory.needed(parameters, activations, states.crossing[start], waiting)
    return needed
