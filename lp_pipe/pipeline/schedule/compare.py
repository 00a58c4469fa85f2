"""Comparison of all named schedules for the same work, the fastest first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.auto import search_schedule
from lp_pipe.pipeline.schedule.costs import Divisible, Seconds
from lp_pipe.pipeline.schedule.ir import Schedule
from lp_pipe.pipeline.schedule.registry import check_sizes, default_chunks, make_schedule, schedules, takes_chunks
from lp_pipe.pipeline.schedule.simulate import Timeline, simulate
from lp_pipe.pipeline.schedule.verify import verify


@dataclass(frozen=True, slots=True)
class Compared:
    """A schedule's result in a comparison.

    peak_activations: the largest worker's, where one of a worker with c virtual stages counts 1/c.
    """

    name: str
    chunks: int
    timeline: Timeline
    peak_activations: float

    def as_json(self) -> dict[str, Any]:
        """Return seconds, shares and counts by name, for `lp_pipe schedule --json`."""
        return {
            "name": self.name,
            "chunks": self.chunks,
            "makespan_s": self.timeline.makespan,
            "bubble": self.timeline.bubble,
            "peak_activations": self.peak_activations,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    ranked: the schedules by makespan. left_out: by name, why others are not among them.
    """

    ranked: tuple[Compared, ...]
    left_out: Mapping[str, str]


def compare(
    stages: int,
    microbatches: int,
    costs: Divisible,
    *,
    chunks: int | None = None,
    links: float | None = None,
    memory: int | None = None,
    more: Sequence[Schedule] = (),
) -> Comparison:
    """Simulate every schedule that exists for these numbers, each with the same model on the same workers.

    A schedule with c virtual stages a worker cuts the model into c times as many stages (`Costs.cut_into`): with one
    number as costs each takes 1/c of it. "auto" is searched for every such c, with these costs.

    chunks: of the schedules that take any; without, what they usually have. memory: activations that a worker may
    stash, counted as in `Compared`. more: schedules that have no name to be made by.

    Raises:
        ScheduleError: no schedule at all exists for these numbers, or one of `more` is wrong.
    """
    check_sizes("a comparison", stages=stages, microbatches=microbatches, chunks=1 if chunks is None else chunks)
    ranked, left_out = [], {}
    for name, own_chunks, make in _parties(stages, microbatches, costs, chunks, links, memory):
        try:
            ranked.append(_compared(make(), name, stages, costs, links, memory))
        except ScheduleError as error:
            left_out[name if name != "auto" else f"auto, chunks={own_chunks}"] = str(error)
    ranked += [_compared(schedule, schedule.name, stages, costs, links, memory) for schedule in more]
    ranked.sort(key=lambda party: (party.timeline.makespan, party.peak_activations, party.chunks, party.name))
    return Comparison(tuple(ranked), left_out)


def _parties(
    stages: int, microbatches: int, costs: Divisible, chunks: int | None, links: float | None, memory: int | None
) -> Iterator[tuple[str, int, Callable[[], Schedule]]]:
    """Yield name, chunks, and a function that makes the schedule."""
    chunks_of = {
        name: chunks if chunks is not None and takes_chunks(name) else default_chunks(name)
        for name in schedules()
        if name != "auto"
    }
    for name, own_chunks in chunks_of.items():
        yield name, own_chunks, partial(make_schedule, name, stages, microbatches, own_chunks)
    for count in sorted(set(chunks_of.values())):
        limit = None if memory is None else memory * count
        yield "auto", count, partial(_searched, stages, microbatches, costs, count, limit, links)


def _searched(
    stages: int, microbatches: int, costs: Divisible, chunks: int, memory: int | None, links: Seconds | None
) -> Schedule:
    own_costs = costs.cut_into(stages * chunks, stages)
    return search_schedule(stages, microbatches, own_costs, chunks=chunks, memory=memory, links=links)


def _compared(
    schedule: Schedule, name: str, workers: int, costs: Divisible, links: float | None, memory: int | None
) -> Compared:
    if schedule.forward_only:
        raise ScheduleError(f"schedule {name!r} has no backwards: it does less than the others")
    chunks = max(1, round(schedule.stages / workers))
    verify(schedule, memory=None if memory is None else memory * chunks)
    timeline = simulate(schedule, costs.cut_into(schedule.stages, workers), links)
    return Compared(name, chunks, timeline, max(timeline.peak_activations) / chunks)
