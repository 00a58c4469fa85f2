"""Decide how to cut and replicate a model: from its profile and a topology to a plan."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.partitioning.bounds import affordable, evenly, flat, lower_bound, near
from lp_pipe.pipeline.partitioning.cost import RECOMPUTES, CostModel, Memory, checked_model
from lp_pipe.pipeline.partitioning.fields import checked_count, checked_number
from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.pipeline.partitioning.pricing import (
    Priced,
    as_plan,
    fits,
    priced,
    recomputed,
    slowest,
    with_runners_up,
)
from lp_pipe.pipeline.partitioning.profile import Profile
from lp_pipe.pipeline.partitioning.reasons import reason, with_schedule_chosen
from lp_pipe.pipeline.partitioning.search import Search, smallest_memory
from lp_pipe.pipeline.partitioning.states import States, states_of
from lp_pipe.pipeline.partitioning.step_time import step_seconds
from lp_pipe.pipeline.partitioning.topology import Level, Topology

SCHEDULES = ("1f1b", "gpipe")  # of equal ones "auto" takes the first
_MOST_STATES = 2500  # tables grow with their square
_WINDOWED = 200  # states from which on it pays to know a plan before the search
_REFINEMENTS = 1  # searches of the cuts near the best ones, where not all can be searched
_ROUNDING = 1 + 1e-9


def partition(
    profile: Profile,
    topology: Topology,
    *,
    max_replicas: int | None = None,
    straight: bool = False,
    cost_model: str = "pipedream",
    schedule: str = "1f1b",
    recompute: str = "none",
    optimizer_bytes_per_parameter_byte: float = 2.0,
    microbatches: int = 8,
) -> Plan:
    """The plan whose slowest stage, or side of a boundary, is as fast as can be; devices may stay idle.

    max_replicas: of a stage, over all levels. straight: no replicas at all. cost_model: "pipedream" adds compute and
    all-reduce, "overlap" takes the longer. Where the topology has a memory limit, a device's stage must fit: its
    weights, `optimizer_bytes_per_parameter_byte` times as much besides, and the activations that `schedule`, "1f1b" or
    "gpipe" with so many microbatches, stashes there; "auto": the one with the shorter step, its bubble included.
    recompute: "full" keeps the stages' inputs only, for one more forward (which counts as compute); "none"; "auto":
    "full" for those stages that would not fit otherwise.
    Exact where the plan's proven_gap is 0; where a model has too many places to cut, the reason says so.

    Raises:
        PartitionError: an option is wrong, or no plan fits the memory; says by how much.
    """
    if schedule not in (*SCHEDULES, "auto"):
        raise PartitionError(f"schedule={schedule!r}: plans are made for {', '.join(map(repr, SCHEDULES))}, or 'auto'")
    if recompute not in RECOMPUTES:
        raise PartitionError(f"recompute={recompute!r}: plans are made for {', '.join(map(repr, RECOMPUTES))}")
    checked_number(optimizer_bytes_per_parameter_byte, "optimizer_bytes_per_parameter_byte")
    checked_count(microbatches, "microbatches")
    most = 1 if straight else topology.devices
    if max_replicas is not None:
        most = min(most, checked_count(max_replicas, "max_replicas"))
    wanted = SCHEDULES if schedule == "auto" else (schedule,)
    memories: list[Memory | None] = [None]
    if topology.memory is not None:
        limit, bytes_ = topology.memory, optimizer_bytes_per_parameter_byte
        memories = [Memory(limit, bytes_, name, recompute, microbatches) for name in wanted]
    planner = _Planner(profile, topology, checked_model(cost_model), most, recompute)
    found: list[Plan] = []
    problem: PartitionError | None = None
    for memory in memories:
        try:
            found += planner.plans(memory, wanted if memory is None else (memory.schedule,), microbatches)
        except PartitionError as error:
            problem = problem or error
    if problem is not None and not found:
        raise problem
    return with_schedule_chosen(found)


class _Planner:
    """One call of `partition`."""

    def __init__(
        self, profile: Profile, topology: Topology, model: CostModel, max_replicas: int, recompute: str
    ) -> None:
        self._profile = profile
        self._topology = topology
        self._model = model
        self._max_replicas = max_replicas
        self._recompute = recompute
        self._states = states_of(profile, recompute, _MOST_STATES)
        self._prefixes = self._states if self._states.is_chain else states_of(profile, recompute, 0)

    def plans(self, memory: Memory | None, schedules: Sequence[str], microbatches: int) -> list[Plan]:
        """The plan with the best stages, for each of the schedules, which the memory is for."""
        self._check_memory(memory)
        stages, states = self._best(self._max_replicas, None)
        bound = slowest(stages) if states.is_complete else None
        if memory is not None and not fits(stages, states, memory):
            stages, states = self._best(self._max_replicas, memory)
            bound = slowest(stages) if states.is_complete else bound
        if bound is None:
            bound = self._lower_bound()
        plan = self._as_plan(stages, states, "")
        gap = max(0.0, plan.slowest_seconds / bound - 1) if bound else 0.0
        plan = with_runners_up(replace(plan, proven_gap=gap), self._others(memory))
        text = reason(plan, self._profile, self._topology.devices, self._recompute)
        plan = replace(plan, reason=text, microbatches=microbatches)
        timings = [stage.timing for stage in stages]
        return [
            replace(plan, schedule=name, step_seconds=step_seconds(name, timings, microbatches)) for name in schedules
        ]

    def _check_memory(self, memory: Memory | None) -> None:
        if memory is None:
            return
        needed = smallest_memory(self._states, memory, self._topology.devices)
        if needed > memory.limit:
            again = ", recompute='auto'" if memory.recompute == "none" else ""
            raise PartitionError(
                f"memory: no plan fits: on {self._topology.devices} devices the fullest needs at least {needed:,.0f} "
                f"bytes, {needed - memory.limit:,.0f} more than the topology's memory of "
                f"{memory.limit:,.0f}; use more devices{again}, or smaller micro-batches"
            )

    def _best(self, max_replicas: int, memory: Memory | None) -> tuple[list[Priced], States]:
        """The best stages, and the states they are between: fewer than there are, where all would take too long."""
        states, order = self._states, self._prefixes
        count = affordable(states.count, order.count, self._topology.levels, memory)
        stages = None
        if count is None:
            stages = self._searched(states, max_replicas, memory)
        else:
            kept = evenly(order.count, count)
            for _ in range(_REFINEMENTS + 1):
                states = order.only(kept)
                stages = self._searched(states, max_replicas, memory)
                if stages is None:
                    break
                kept = near([kept[stage.end] for stage in stages], order.count, count)
        if stages is None:
            raise PartitionError(
                "memory: no plan was found that fits, among fewer cuts than there are, since to try all would take too "
                "long; use more memory or a topology of one level"
            )
        return stages, states

    def _searched(self, states: States, max_replicas: int, memory: Memory | None) -> list[Priced] | None:
        levels = self._topology.levels
        upper = self._upper(states, levels, max_replicas) if memory is None and len(levels) == 1 else np.inf
        search = Search(states, levels, self._model, max_replicas, memory, upper)
        if not np.isfinite(search.seconds()[-1]):
            return None
        parts = search.parts(levels[-1].count)
        return priced(parts, states, levels, self._model, recomputed(parts, states, memory, self._recompute))

    def _lower_bound(self) -> float:
        """Seconds that no plan beats, where not all cuts could be searched."""
        levels = self._topology.levels
        bound = lower_bound(self._states, levels, self._model, self._max_replicas, self._profile)
        if self._states.is_complete:
            one_level = (flat(levels),)
            upper = self._upper(self._states, one_level, self._max_replicas)
            search = Search(self._states, one_level, self._model, self._max_replicas, upper=upper)
            bound = max(bound, search.seconds()[-1])
        return bound

    def _upper(self, states: States, levels: tuple[Level, ...], max_replicas: int) -> float:
        """Seconds of a plan that is found fast: without replicas, and with few places to cut."""
        if states.count <= _WINDOWED:
            return np.inf
        straight = Search(states, levels, self._model, 1).seconds()[-1] * _ROUNDING
        if max_replicas == 1:
            return straight
        few = states.only(evenly(states.count, _WINDOWED))
        return min(straight, Search(few, levels, self._model, max_replicas, upper=straight).seconds()[-1] * _ROUNDING)

    def _others(self, memory: Memory | None) -> list[Plan]:
        """Plans of simpler kinds that keep to the limits."""
        ends = self._states.only([0, self._states.count - 1])
        kinds: list[tuple[str, States, int]] = [("one device", ends, 1)]
        if self._max_replicas > 1:
            kinds.append(("all layers in one stage, data parallel", ends, self._max_replicas))
        found = [(text, states, self._searched(states, replicas, None)) for text, states, replicas in kinds]
        if self._max_replicas > 1:
            straight, states = self._best(1, None)
            found.append(("a straight pipeline, without replicas", states, straight))
        return [
            self._as_plan(stages, states, text)
            for text, states, stages in found
            if stages is not None and (memory is None or fits(stages, states, memory))
        ]

    def _as_plan(self, stages: Sequence[Priced], states: States, text: str) -> Plan:
        names = [layer.name for layer in self._profile.layers]
        return as_plan(stages, states, self._profile.order(), names, text)
