"""All named schedules for the same work, the fastest first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.costs import Costs, Seconds
from lp_pipe.pipeline.schedule.ir import Schedule
from lp_pipe.pipeline.schedule.registry import default_chunks, make_schedule, schedules
from lp_pipe.pipeline.schedule.simulate import Timeline, simulate
from lp_pipe.pipeline.schedule.verify import verify


@dataclass(frozen=True, slots=True)
class Compared:
    """One schedule's part in a comparison.

    peak_activations: the largest worker's, in activations of a stage of the schedule with one stage a worker: one of a
    virtual stage counts 1/chunks.
    """

    name: str
    chunks: int
    timeline: Timeline
    peak_activations: float

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "chunks": self.chunks,
            "makespan_s": self.timeline.makespan,
            "bubble": self.timeline.bubble,
            "peak_activations": self.peak_activations,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` returns: the schedules by makespan, and why others have no place among them."""

    ranked: tuple[Compared, ...]
    left_out: Mapping[str, str]


def compare(
    stages: int,
    microbatches: int,
    costs: Costs,
    *,
    chunks: int | None = None,
    links: Seconds | None = None,
    memory: int | None = None,
    more: Sequence[Schedule] = (),
) -> Comparison:
    """Simulate every schedule that exists for these numbers, each with the same model on the same workers.

    A schedule with c virtual stages a worker cuts the model into c times as many stages (`Costs.cut_into`): with one
    number as costs each takes 1/c of it. chunks: of those that take any; without, what they usually have.
    memory: activations that a worker may stash, in the unit of `Compared`. more: schedules without a name of theirs.
    """
    ranked, left_out = [], {}
    for name, own_chunks in _parties(chunks):
        try:
            schedule = make_schedule(name, stages, microbatches, own_chunks)
            ranked.append(_compared(schedule, name, stages, costs, links, memory))
        except ScheduleError as error:
            left_out[name] = str(error)
    for schedule in more:
        ranked.append(_compared(schedule, schedule.name, stages, costs, links, memory))
    ranked.sort(key=lambda party: (party.timeline.makespan, party.peak_activations, party.name))
    return Comparison(tuple(ranked), left_out)


def _parties(chunks: int | None) -> Iterator[tuple[str, int]]:
    for name in schedules():
        yield name, default_chunks(name) if chunks is None or not takes_chunks(name) else chunks


def _compared(
    schedule: Schedule, name: str, workers: int, costs: Costs, links: Seconds | None, memory: int | None
) -> Compared:
    if schedule.forward_only:
        raise ScheduleError(f"schedule {name!r} has no backwards: it does less than the others")
    chunks = max(1, round(schedule.stages / workers))
    verify(schedule, memory=None if memory is None else memory * chunks)
    timeline = simulate(schedule, costs.cut_into(schedule.stages, workers), links)
    return Compared(name, chunks, timeline, max(timeline.peak_activations) * workers / schedule.stages)
