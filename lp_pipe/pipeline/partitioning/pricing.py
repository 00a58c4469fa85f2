"""From the parts that a search has found to the stages of a plan, each with what it takes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lp_pipe.pipeline.partitioning.cost import CostModel, Memory
from lp_pipe.pipeline.partitioning.plan import Plan, PlannedStage
from lp_pipe.pipeline.partitioning.search import Part
from lp_pipe.pipeline.partitioning.states import States
from lp_pipe.pipeline.partitioning.topology import Level


class Priced(NamedTuple):
    """A stage on devices, between two states, with its replicas over all levels."""

    start: int
    end: int
    replicas: int
    seconds: float
    boundary_seconds: float


def priced(parts: Sequence[Part], states: States, levels: Sequence[Level], model: CostModel) -> list[Priced]:
    """The stages in order; one inside of a replicated stage takes part in its all-reduce, and has its replicas, too."""
    level = levels[-1]
    stages: list[Priced] = []
    for place, part in enumerate(parts):
        parameters = float(states.parameters[part.end] - states.parameters[part.start])

        def outside(seconds: float, part: Part = part, parameters: float = parameters) -> float:
            return float(model.stage(seconds, parameters, part.replicas, level))

        own = _own(part, states, levels, model)
        lifted = [
            Priced(
                stage.start,
                stage.end,
                stage.replicas * part.replicas,
                outside(stage.seconds),
                outside(stage.boundary_seconds) if stage.boundary_seconds else 0.0,
            )
            for stage in own
        ]
        if place:
            lifted[0] = _with_side(lifted[0], model.boundary(states.crossing[part.start], part.replicas, level))
        if place < len(parts) - 1:
            lifted[-1] = _with_side(lifted[-1], model.boundary(states.crossing[part.end], part.replicas, level))
        stages += lifted
    return stages


def as_plan(stages: Sequence[Priced], states: States, order: Sequence[int], names: Sequence[str], reason: str) -> Plan:
    """The plan, with the layers of each stage in an order in which they can run."""
    rank = {layer: place for place, layer in enumerate(order)}
    planned = tuple(
        PlannedStage(
            tuple(names[layer] for layer in sorted(states.layers(stage.start, stage.end), key=rank.__getitem__)),
            stage.replicas,
            stage.seconds,
            stage.boundary_seconds,
        )
        for stage in stages
    )
    return Plan(planned, slowest(stages), reason=reason)


def slowest(stages: Sequence[Priced]) -> float:
    """Seconds of the slowest stage or side of a boundary."""
    return max(max(stage.seconds, stage.boundary_seconds) for stage in stages)


def fits(stages: Sequence[Priced], states: States, memory: Memory) -> bool:
    """Whether each stage keeps to the limit."""
    return all(
        bytes_needed(stage, states, memory, len(stages) - place) <= memory.limit for place, stage in enumerate(stages)
    )


def bytes_needed(stage: Priced, states: States, memory: Memory, stages_from_here: int) -> float:
    """Of each of the stage's devices."""
    parameters = states.parameters[stage.end] - states.parameters[stage.start]
    activations = states.activations[stage.end] - states.activations[stage.start]
    return float(memory.needed(parameters, activations, states.crossing[stage.start], stages_from_here))


def with_runners_up(plan: Plan, others: Sequence[Plan]) -> Plan:
    """The others behind it, without those that are the same."""
    seen = {_shape(plan)}
    different: list[Plan] = []
    for other in sorted(others, key=lambda other: other.slowest_seconds):
        if _shape(other) not in seen:
            seen.add(_shape(other))
            different.append(other)
    return replace(plan, runners_up=tuple(different))


def _shape(plan: Plan) -> tuple[tuple[tuple[str, ...], int], ...]:
    return tuple((stage.layers, stage.replicas) for stage in plan.stages)


def _own(part: Part, states: States, levels: Sequence[Level], model: CostModel) -> list[Priced]:
    if len(levels) > 1:
        return priced(part.inside, states, levels[:-1], model)
    seconds = max(0.0, float(states.compute[part.end] - states.compute[part.start]))
    return [Priced(part.start, part.end, 1, seconds, 0.0)]


def _with_side(stage: Priced, seconds: float) -> Priced:
    return stage._replace(boundary_seconds=max(stage.boundary_seconds, float(seconds)))
