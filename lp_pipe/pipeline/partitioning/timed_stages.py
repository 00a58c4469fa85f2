"""Conversion of the stages that a search has found to those of a plan, each with its seconds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from lp_pipe.pipeline.partitioning.cost import CostModel, Memory, Waiting
from lp_pipe.pipeline.partitioning.dynamic_program import NestedStage
from lp_pipe.pipeline.partitioning.plan import Plan, PlannedStage
from lp_pipe.pipeline.partitioning.states import States
from lp_pipe.pipeline.partitioning.step_time import StageTiming
from lp_pipe.pipeline.partitioning.topology import Level


class TimedStage(NamedTuple):
    """A stage on devices, between two states, with its replicas over all levels.

    forward_s, backward_s: of one micro-batch on one replica. link_s: one way over the boundary before it.
    exchange_s: an all-reduce of its replicas. devices: which, where they are unequal. hosts: of each replica, if known.
    """

    start: int
    end: int
    replicas: int
    seconds: float
    boundary_seconds: float
    forward_s: float
    backward_s: float
    link_s: float = 0.0
    exchange_s: float = 0.0
    is_recomputed: bool = False
    devices: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()

    @property
    def timing(self) -> StageTiming:
        return StageTiming(self.forward_s, self.backward_s, self.replicas, self.link_s, self.exchange_s)


StageEnds = frozenset[tuple[int, int]]  # stages on devices, each by its two states


def recomputed(parts: Sequence[NestedStage], states: States, memory: Memory | None, recompute: str) -> StageEnds:
    """Return the stages that run their forward again: all, none, or those that would not fit otherwise."""
    leaves = list(_leaves(parts))
    if recompute == "full":
        return frozenset((leaf.start, leaf.end) for leaf in leaves)
    if recompute == "none" or memory is None:
        return frozenset()
    waiting = _waiting([leaf.replicas for leaf in leaves], memory)
    return frozenset(
        (leaf.start, leaf.end)
        for leaf, held in zip(leaves, waiting, strict=True)
        if _kept(leaf.start, leaf.end, states, memory, held) > memory.limit
    )


def timed_stages(
    parts: Sequence[NestedStage], states: States, levels: Sequence[Level], model: CostModel, again: StageEnds
) -> list[TimedStage]:
    """Return the stages in order, each with its seconds.

    A stage inside of a replicated stage takes part in its all-reduce, and has its replicas, too.
    again: those that are recomputed.
    """
    level = levels[-1]
    stages: list[TimedStage] = []
    for place, part in enumerate(parts):
        inside = (
            timed_stages(part.inside, states, levels[:-1], model, again)
            if len(levels) > 1
            else [_alone(part, states, again)]
        )
        lifted = [_replicated(stage, part, states, level, model) for stage in inside]
        if place:
            lifted[0] = _with_side(lifted[0], model.boundary(states.crossing[part.start], part.replicas, level))
            lifted[0] = lifted[0]._replace(link_s=model.message(float(states.crossing[part.start]), level))
        if place < len(parts) - 1:
            lifted[-1] = _with_side(lifted[-1], model.boundary(states.crossing[part.end], part.replicas, level))
        stages += lifted
    return stages


def as_plan(
    stages: Sequence[TimedStage], states: States, order: Sequence[int], names: Sequence[str], reason: str
) -> Plan:
    """Return the plan, with the layers of each stage in an order in which they can run."""
    rank = {layer: place for place, layer in enumerate(order)}
    planned = tuple(
        PlannedStage(
            tuple(names[layer] for layer in sorted(states.layers(stage.start, stage.end), key=rank.__getitem__)),
            stage.replicas,
            stage.seconds,
            stage.boundary_seconds,
            "full" if stage.is_recomputed else "none",
            stage.devices,
            stage.hosts,
        )
        for stage in stages
    )
    return Plan(planned, slowest(stages), reason=reason)


def slowest(stages: Sequence[TimedStage]) -> float:
    """Return the seconds of the slowest stage or side of a boundary."""
    return max(max(stage.seconds, stage.boundary_seconds) for stage in stages)


def fits(stages: Sequence[TimedStage], states: States, memory: Memory) -> bool:
    """Return whether each stage keeps to the limit."""
    waiting = _waiting([stage.replicas for stage in stages], memory)
    return all(
        _bytes_needed(stage, states, memory, held) <= memory.limit for stage, held in zip(stages, waiting, strict=True)
    )


def with_runners_up(plan: Plan, others: Sequence[Plan]) -> Plan:
    """Return the plan with the others behind it, without those that are the same."""
    seen = {_shape(plan)}
    different: list[Plan] = []
    for other in sorted(others, key=lambda other: other.slowest_seconds):
        if _shape(other) not in seen:
            seen.add(_shape(other))
            different.append(other)
    return replace(plan, runners_up=tuple(different))


def _shape(plan: Plan) -> tuple[tuple[tuple[str, ...], int], ...]:
    return tuple((stage.layers, stage.replicas) for stage in plan.stages)


def _leaves(parts: Sequence[NestedStage], copies: int = 1) -> Iterator[NestedStage]:
    """Yield the innermost stages, with their replicas over all levels.

    copies: of the whole of them, over the levels above.
    """
    for part in parts:
        replicas = copies * part.replicas
        yield from _leaves(part.inside, replicas) if part.inside else [NestedStage(part.start, part.end, replicas, [])]


def _waiting(replicas: Sequence[int], memory: Memory) -> list[Waiting]:
    """Return what each stage's replicas hold."""
    from_here = reversed(list(accumulate(reversed(replicas))))
    return [memory.waiting_on(own, total - own) for own, total in zip(replicas, from_here, strict=True)]


def _bytes_needed(stage: TimedStage, states: States, memory: Memory, waiting: Waiting) -> float:
    """Return the bytes of each of the stage's devices."""
    if not stage.is_recomputed:
        return _kept(stage.start, stage.end, states, memory, waiting)
    parameters = states.parameters[stage.end] - states.parameters[stage.start]
    activations = states.activations[stage.end] - states.activations[stage.start]
    return float(memory.needed(parameters, activations, states.crossing[stage.start], waiting))


def _kept(start: int, end: int, states: States, memory: Memory, waiting: Waiting) -> float:
    parameters = states.parameters[end] - states.parameters[start]
    return float(memory.kept(parameters, states.activations[end] - states.activations[start], waiting))


def _alone(part: NestedStage, states: States, again: StageEnds) -> TimedStage:
    """Return the stage on one device."""
    is_recomputed = (part.start, part.end) in again
    forward, seconds = states.seconds(part.start, part.end, is_recomputed)
    return TimedStage(part.start, part.end, 1, seconds, 0.0, forward, seconds - forward, is_recomputed=is_recomputed)


def _replicated(stage: TimedStage, part: NestedStage, states: States, level: Level, model: CostModel) -> TimedStage:
    """Return a stage inside of a part that has replicas on this level."""
    parameters = float(states.parameters[part.end] - states.parameters[part.start])
    own = float(states.parameters[stage.end] - states.parameters[stage.start])

    def outside(seconds: float) -> float:
        return float(model.stage(seconds, parameters, part.replicas, level))

    return stage._replace(
        replicas=stage.replicas * part.replicas,
        seconds=outside(stage.seconds),
        boundary_seconds=outside(stage.boundary_seconds) if stage.boundary_seconds else 0.0,
        exchange_s=stage.exchange_s + float(model.exchange(own, part.replicas, level)),
    )


def _with_side(stage: TimedStage, seconds: float) -> TimedStage:
    return stage._replace(boundary_seconds=max(stage.boundary_seconds, float(seconds)))
