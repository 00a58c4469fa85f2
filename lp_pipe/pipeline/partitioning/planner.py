"""Decision how to cut and replicate a model: from its profile and a topology to a plan."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

from lp_pipe.errors import PartitionError
from lp_pipe.pipeline.partitioning.cost import (
    ACTION_SECONDS,
    ASYNCHRONOUS,
    RECOMPUTES,
    SCHEDULES,
    CostModel,
    Memory,
    checked_model,
)
from lp_pipe.pipeline.partitioning.equal_speeds import EqualSpeeds, evenly, near
from lp_pipe.pipeline.partitioning.fields import checked_count, checked_number
from lp_pipe.pipeline.partitioning.min_memory import min_memory, nested_min_memory
from lp_pipe.pipeline.partitioning.mixed_speeds import ORDERS, MixedSpeeds
from lp_pipe.pipeline.partitioning.plan import Plan
from lp_pipe.pipeline.partitioning.profile import Profile
from lp_pipe.pipeline.partitioning.reasons import reason, too_short, with_schedule_chosen
from lp_pipe.pipeline.partitioning.states import States, states_of
from lp_pipe.pipeline.partitioning.step_time import step_seconds
from lp_pipe.pipeline.partitioning.timed_stages import TimedStage, as_plan, fits, slowest, with_runners_up
from lp_pipe.pipeline.partitioning.topology import Topology

_MOST_STATES = 2500  # the size of tables grows with the square of the states
_MANY_CUTS = "this model has too many places to cut to search them all"
_REFINEMENTS = 1  # searches of the cuts near the best ones, where not all can be searched


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
    microbatches: int | None = None,
    action_seconds: float = ACTION_SECONDS,
    device_order: str = "any",
) -> Plan:
    """Return the plan with the fastest slowest stage, or side of a boundary; devices may stay idle.

    max_replicas: of a stage, over all levels. straight: no replicas at all. cost_model: "pipedream" adds compute and
    all-reduce, "overlap" takes the longer.
    Where the topology has a memory limit, a device's stage must fit: its weights in all versions that are in use,
    `optimizer_bytes_per_parameter_byte` times as much besides, and the activations that `schedule` stashes there with
    so many microbatches.
    schedule: "1f1b", "gpipe", "pipedream", "pipedream_2bw", or "auto": "1f1b" or "gpipe", whichever has the shorter
    step, its bubble included.
    recompute: "full" keeps the stages' inputs only, for one more forward (which counts as compute); "none"; "auto":
    "full" for those stages that would not fit otherwise.
    microbatches: of a step; default: as many as the profiled program has, or 8.
    action_seconds: what the engine takes for a forward or backward of one micro-batch on one stage, beside the compute.
    A UserWarning, which the plan keeps as `warning`, names a stage that is too short to be worth its cut.
    device_order: of devices with different speeds along the pipeline: "any", or as "given" in the topology.
    The plan is the best where its proven_gap is 0; where a model has too many places to cut, the reason says so.

    Raises:
        PartitionError: an option is wrong, or no plan fits the memory; says by how much.
    """
    if not isinstance(profile, Profile):
        raise PartitionError(f"profile={profile!r}: give a pp.Profile, of pp.profile(...) or pp.Profile.load(path)")
    if not isinstance(topology, Topology):
        raise PartitionError(f"topology={topology!r}: give a pp.Topology(levels=[…]), or pp.Topology.load(path)")
    if schedule not in (*SCHEDULES, *ASYNCHRONOUS, "auto"):
        known = ", ".join(map(repr, (*SCHEDULES, *ASYNCHRONOUS)))
        raise PartitionError(f"schedule={schedule!r}: use {known}, or 'auto', which takes '1f1b' or 'gpipe'")
    if recompute not in RECOMPUTES:
        raise PartitionError(f"recompute={recompute!r}: use one of {', '.join(map(repr, RECOMPUTES))}")
    checked_number(optimizer_bytes_per_parameter_byte, "optimizer_bytes_per_parameter_byte")
    checked_number(action_seconds, "action_seconds")
    microbatches = checked_count(profile.microbatches or 8 if microbatches is None else microbatches, "microbatches")
    most = 1 if straight else topology.devices
    if max_replicas is not None:
        most = min(most, checked_count(max_replicas, "max_replicas"))
    wanted = SCHEDULES if schedule == "auto" else (schedule,)
    memories: list[Memory | None] = [None]
    if topology.memory is not None:
        limit, bytes_ = topology.memory, optimizer_bytes_per_parameter_byte
        memories = [Memory(limit, bytes_, name, recompute, microbatches) for name in wanted]
    devices = _devices(topology, checked_model(cost_model), recompute, device_order)
    planner = _Partitioner(profile, topology, devices, most, recompute, action_seconds)
    found: list[Plan] = []
    problem: PartitionError | None = None
    for memory in memories:
        try:
            found += planner.plans(memory, wanted if memory is None else (memory.schedule,), microbatches)
        except PartitionError as error:
            problem = problem or error
    if problem is not None and not found:
        raise problem
    plan = with_schedule_chosen(found)
    if plan.warning:
        warnings.warn(plan.warning, stacklevel=2)
    return plan


def _devices(topology: Topology, model: CostModel, recompute: str, order: str) -> EqualSpeeds | MixedSpeeds:
    if order not in ORDERS:
        raise PartitionError(f"device_order={order!r}: use one of {', '.join(map(repr, ORDERS))}")
    level = topology.levels[0]
    if level.speeds is None or set(level.speeds) == {1.0}:
        return EqualSpeeds(topology.levels, model, recompute)
    if len(topology.levels) > 1:
        raise PartitionError(
            f"topology: levels[0].speeds: devices of different speeds need a topology of one level, and this has "
            f"{len(topology.levels)}: plan for the devices of one level, or leave the speeds out"
        )
    return MixedSpeeds(level, model, recompute, order)


class _Partitioner:
    """The state of one call of `partition`."""

    def __init__(
        self,
        profile: Profile,
        topology: Topology,
        devices: EqualSpeeds | MixedSpeeds,
        max_replicas: int,
        recompute: str,
        action_seconds: float,
    ) -> None:
        self._profile = profile
        self._topology = topology
        self._devices = devices
        self._max_replicas = max_replicas
        self._recompute = recompute
        self._action_seconds = action_seconds
        self._states = states_of(profile, recompute, _MOST_STATES)
        self._bounds: dict[tuple[int, Memory | None], float] = {}
        self._prefixes = self._states if self._states.is_chain else states_of(profile, recompute, 0)

    def plans(self, memory: Memory | None, schedules: Sequence[str], microbatches: int) -> list[Plan]:
        """Return the plan with the best stages for each of the schedules, within that memory."""
        self._check_memory(memory)
        stages, states, bound = self._searched(memory)
        plan = self._as_plan(stages, states, "")
        gap = max(0.0, plan.slowest_seconds / bound - 1) if bound else 0.0
        plan = with_runners_up(replace(plan, proven_gap=gap), self._others(memory))
        inexact = "" if states.is_complete else _MANY_CUTS
        text = reason(plan, self._profile, self._topology.devices, self._recompute, inexact or self._devices.inexact)
        timings = [stage.timing for stage in stages]
        warning = too_short(plan, timings, self._action_seconds)
        plan = replace(plan, reason=text, microbatches=microbatches, warning=warning)
        full_s = microbatches * plan.slowest_seconds  # of schedules that keep the pipeline full between steps
        return [
            replace(
                plan,
                schedule=name,
                step_seconds=full_s if name in ASYNCHRONOUS else step_seconds(name, timings, microbatches),
            )
            for name in schedules
        ]

    def _searched(self, memory: Memory | None) -> tuple[list[TimedStage], States, float]:
        """Return the best stages that fit, the states they are between, and the seconds that no plan beats."""
        if memory is None or self._devices.is_as_fast_within_memory(self._states, self._max_replicas):
            return self._bounded(memory)
        stages, states, bound = self._bounded(None)
        if fits(stages, states, memory):
            return stages, states, bound
        stages, states, within = self._bounded(memory)
        return stages, states, max(bound, within)

    def _bounded(self, memory: Memory | None) -> tuple[list[TimedStage], States, float]:
        stages, states = self._best(self._max_replicas, memory, self._devices.acceptable_gap(memory))
        is_exact = states.is_complete and not self._devices.inexact
        return stages, states, slowest(stages) if is_exact else self._bound(self._max_replicas, memory)

    def _check_memory(self, memory: Memory | None) -> None:
        if memory is None:
            return
        needed = min_memory(self._states, memory, self._topology.devices, self._max_replicas).most
        if needed > memory.limit:
            raise self._too_little(memory, needed)

    def _too_little(self, memory: Memory, needed: float) -> PartitionError:
        """Return an error that says how many bytes any plan needs.

        needed: bytes on one level, which is a bound for several.
        """
        states, levels = self._states, self._topology.levels
        can_search = self._devices.affordable(states.count, states.count, self._max_replicas, memory) is None
        if len(levels) > 1 and can_search:
            needed = nested_min_memory(states, levels, memory, self._max_replicas)
        again = ", recompute='auto'" if memory.recompute == "none" else ""
        found = "fits" if states.is_complete else f"that fits was found in one order of the layers ({_MANY_CUTS})"
        return PartitionError(
            f"memory: no plan {found}: on {self._topology.devices} devices the fullest needs at least {needed:,.0f} "
            f"bytes, {needed - memory.limit:,.0f} more than the topology's memory of "
            f"{memory.limit:,.0f}: use more devices{again}, or smaller micro-batches"
        )

    def _best(self, max_replicas: int, memory: Memory | None, acceptable_gap: float) -> tuple[list[TimedStage], States]:
        """Return the best stages, and the states they are between; where to search all takes too long, good ones.

        acceptable_gap: of plans that are good enough.
        """
        states, order = self._states, self._prefixes
        count = self._devices.affordable(states.count, order.count, max_replicas, memory)
        if count is None:
            stages = self._devices.searched(states, max_replicas, memory)
            if stages is None:
                assert memory is not None, "without a limit any plan fits"
                raise self._too_little(memory, memory.limit)
            return stages, states
        plan = self._devices.of_all_cuts(order, max_replicas, memory, lambda: self._bound(max_replicas, memory))
        found = [] if plan is None else [(plan.stages, order.only(range(order.count)))]
        if plan is None or plan.gap > acceptable_gap:
            found += self._among_some(order, count, max_replicas, memory)
        if not found:
            raise PartitionError(
                "memory: no plan that fits was found among some of the cuts, since to try all would take too long: use "
                "more memory, or a topology of one level"
            )
        return min(found, key=lambda stages: slowest(stages[0]))

    def _among_some(
        self, order: States, count: int, max_replicas: int, memory: Memory | None
    ) -> list[tuple[list[TimedStage], States]]:
        """Return the best stages between so many states of the order, and between states near to those."""
        found = []
        kept = self._some_cuts(order, count, memory)
        for _ in range(_REFINEMENTS + 1):
            states = order.only(kept)
            stages = self._devices.searched(states, max_replicas, memory)
            if stages is None:
                break
            found.append((stages, states))
            kept = near([kept[stage.end] for stage in stages], order.count, len(kept))
            if len(kept) == order.count:
                break
        return found

    def _bound(self, max_replicas: int, memory: Memory | None) -> float:
        """Return seconds that no plan beats."""
        key = max_replicas, memory
        if key not in self._bounds:
            self._bounds[key] = self._devices.lower_bound(self._states, self._profile, max_replicas, memory)
        return self._bounds[key]

    def _some_cuts(self, order: States, count: int, memory: Memory | None) -> list[int]:
        """Return so many places to cut.

        Those of a plan that fits are among them, so that a plan is found where there is one.
        """
        if memory is None or count == order.count:
            return evenly(order.count, count)
        thrifty = min_memory(order, memory, self._topology.devices, self._max_replicas).cuts
        return sorted({*evenly(order.count, max(2, count - len(thrifty))), *thrifty})

    def _others(self, memory: Memory | None) -> list[Plan]:
        """Return plans of simpler kinds that keep to the limits."""
        ends = self._states.only([0, self._states.count - 1])
        kinds: list[tuple[str, States, int]] = [("one device", ends, 1)]
        if self._max_replicas > 1:
            kinds.append(("all layers in one stage, data parallel", ends, self._max_replicas))
        found = [(text, states, self._devices.searched(states, replicas, None)) for text, states, replicas in kinds]
        if self._max_replicas > 1:
            straight, states = self._best(1, None, math.inf)
            found.append(("a straight pipeline, without replicas", states, straight))
        return [
            self._as_plan(stages, states, text)
            for text, states, stages in found
            if stages is not None and (memory is None or fits(stages, states, memory))
        ]

    def _as_plan(self, stages: Sequence[TimedStage], states: States, text: str) -> Plan:
        names = [layer.name for layer in self._profile.layers]
        return as_plan(stages, states, self._profile.order(), names, text)
