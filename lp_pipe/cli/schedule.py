"""`lp_pipe schedule`: draw a schedule's timeline, or compare all of them, without a model."""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lp_pipe.cli.errors import UsageError
from lp_pipe.cli.output_files import output_path, write_file
from lp_pipe.cli.table import table
from lp_pipe.errors import PartitionError, ScheduleError
from lp_pipe.measuring.profile_costs import ProfileCosts, is_profile
from lp_pipe.pipeline.partitioning import Profile
from lp_pipe.pipeline.schedule import (
    Compared,
    Comparison,
    Costs,
    Schedule,
    Timeline,
    compare,
    default_chunks,
    make_schedule,
    names_file,
    schedules,
    search_schedule,
    simulate,
    to_svg,
    to_text,
    to_trace_events,
    verify,
)

_WRITERS: dict[str, Callable[[Schedule, Timeline], str]] = {
    ".svg": lambda schedule, timeline: to_svg(timeline, schedule.name),
    ".csv": lambda schedule, timeline: schedule.to_csv(),
    ".json": lambda schedule, timeline: to_trace_events({schedule.name: timeline}),
    ".txt": lambda schedule, timeline: to_text(timeline),
}
_COMPARISON_WRITERS = (".json", ".txt")
_MOST_ACTIONS = 20_000_000
_UNIT_COSTS = Costs(forward=1, backward_input=1, backward_weight=1)
EPILOG = """\
examples:
  lp_pipe schedule 1f1b --stages 4 --microbatches 8
  lp_pipe schedule zbv --stages 4 --microbatches 8 -o zbv.svg -o zbv.json     a picture, a trace for ui.perfetto.dev
  lp_pipe schedule auto --stages 4 --microbatches 8 --costs costs.json -o auto.csv
  lp_pipe schedule my.csv --costs costs.json
  lp_pipe schedule --compare --stages 4 --microbatches 8 --links 0.1
  lp_pipe schedule 1f1b --compare --stages 4 --microbatches 8     also shows each makespan relative to 1f1b's
  lp_pipe schedule --compare --stages 4 --microbatches 8 --costs profile.json

costs.json holds seconds, each a number or a list with one number per virtual stage:
  {"forward": 0.010, "backward_input": [0.010, 0.012, 0.010, 0.015], "backward_weight": 0.008}
It may also be a profile that `lp_pipe profile TARGET -o costs.json` has written: its layers are cut into stages that
are as equally slow as possible.
"""


HELP = "draw a schedule's timeline, or compare all schedules"
DESCRIPTION = "Simulate a step of a pipeline schedule and draw it; with --compare rank all of them."
USAGE = "lp_pipe schedule NAME|FILE.csv|--compare --stages P --microbatches M [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help=f"{', '.join(schedules())}, or a file in torch's CSV format")
    add("--stages", type=int, metavar="P", help="number of workers")
    add("--microbatches", type=int, metavar="M", help="number of micro-batches per step")
    add("--chunks", type=int, metavar="C", help="virtual stages per worker (default: what the schedule needs)")
    add("--costs", metavar="FILE.json", help="seconds of each action (see below), or a profile (default: 1 each)")
    add("--links", type=float, metavar="SECONDS", help="time of a message between two workers (default: 0)")
    add("--memory", type=int, metavar="N", help="activations that a worker may stash (default: no limit)")
    add("--compare", action="store_true", help="rank all schedules for these numbers; with NAME relative to it")
    add("--json", action="store_true", help="with --compare: print the table as JSON")
    add(
        "-o",
        "--output",
        type=partial(output_path, suffixes=_WRITERS),
        metavar="FILE",
        action="append",
        default=[],
        help=f"ends in {', '.join(_WRITERS)} (.json: trace events, for Perfetto); may be repeated",
    )


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print and write the timeline or the comparison.

    Raises:
        UsageError: there is no such schedule for these numbers, or a file cannot be read or written.
    """
    try:
        costs = _UNIT_COSTS if arguments.costs is None else _costs(arguments.costs)
        given = _read(arguments.name) if arguments.name and names_file(arguments.name) else None
        _check(arguments, given)
        _check_size(arguments)
        if arguments.compare:
            _compare(arguments, costs, given)
        else:
            _draw(arguments, costs, given or _make(arguments, costs))
    except (ScheduleError, PartitionError) as error:
        raise UsageError(str(error)) from error
    return 0


def _costs(path: str) -> Costs | ProfileCosts:
    """Read a file of costs or a profile."""
    return ProfileCosts(Profile.load(path)) if is_profile(path) else Costs.load(path)


def _of_stages(costs: Costs | ProfileCosts, stages: int, workers: int) -> Costs:
    """Return the costs of each virtual stage; a profile is cut into `stages`."""
    return costs if isinstance(costs, Costs) else costs.cut_into(stages, workers)


def _draw(arguments: argparse.Namespace, costs: Costs | ProfileCosts, schedule: Schedule) -> None:
    verify(schedule, memory=arguments.memory)
    timeline = simulate(schedule, _of_stages(costs, schedule.stages, len(schedule.workers)), arguments.links)
    for path in arguments.output:
        write_file(path, _WRITERS[path.suffix](schedule, timeline))
    print(to_text(timeline), end="")
    _say_wrote(arguments.output)


def _make(arguments: argparse.Namespace, costs: Costs | ProfileCosts) -> Schedule:
    name, stages, microbatches, chunks = arguments.name, arguments.stages, arguments.microbatches, arguments.chunks
    if name == "auto":
        own = _of_stages(costs, stages * (chunks or 1), stages)
        return search_schedule(stages, microbatches, own, chunks=chunks, memory=arguments.memory, links=arguments.links)
    return make_schedule(name, stages, microbatches, chunks)


def _compare(arguments: argparse.Namespace, costs: Costs | ProfileCosts, given: Schedule | None) -> None:
    comparison = compare(
        len(given.workers) if given else arguments.stages,
        given.microbatches if given else arguments.microbatches,
        costs,
        chunks=arguments.chunks,
        links=arguments.links,
        memory=arguments.memory,
        more=[given] if given else [],
    )
    named = _named(comparison, given.name if given else arguments.name)
    text = comparison_text(comparison, named)
    for path in arguments.output:
        write_file(path, text if path.suffix == ".txt" else comparison_trace(comparison))
    print(comparison_json(comparison, named) if arguments.json else text, end="")
    if not arguments.json:
        _say_wrote(arguments.output)


def _named(comparison: Comparison, name: str | None) -> Compared | None:
    """Return the schedule that the others are compared with; of several with that name the fastest."""
    if name is None:
        return None
    for party in comparison.ranked:
        if party.name == name:
            return party
    raise UsageError(next(reason for left, reason in comparison.left_out.items() if left.partition(",")[0] == name))


def _check(arguments: argparse.Namespace, given: Schedule | None) -> None:
    """Refuse missing and contradictory options."""
    if arguments.name is None and not arguments.compare:
        raise UsageError(f"no schedule is given: give one of {', '.join(schedules())}, a CSV file, or --compare")
    if arguments.json and not arguments.compare:
        raise UsageError("--json needs --compare; to write the trace of one schedule use -o FILE.json")
    if arguments.name and not given:
        default_chunks(arguments.name)  # raises if there is no such schedule
    for option in ("stages", "microbatches"):
        if given is None and getattr(arguments, option) is None:
            raise UsageError(f"--{option} is missing: give a number, such as --{option} 4")
    if given is not None:
        _check_own(arguments, given)
    for path in arguments.output:
        if arguments.compare and path.suffix not in _COMPARISON_WRITERS:
            raise UsageError(
                f"-o {path}: with --compare the file's name must end in {' or '.join(_COMPARISON_WRITERS)}"
            )


def _check_own(arguments: argparse.Namespace, given: Schedule) -> None:
    """Refuse options that contradict a CSV file's own numbers; in a comparison --chunks is for the other schedules."""
    workers = len(given.workers)
    for option, in_file in ("stages", workers), ("microbatches", given.microbatches):
        value = getattr(arguments, option)
        if value not in (None, in_file):
            raise UsageError(f"{arguments.name} has {option}={in_file}: leave out --{option}={value}")
    if not arguments.compare and arguments.chunks is not None and arguments.chunks * workers != given.stages:
        raise UsageError(
            f"{arguments.name} has {given.stages} virtual stages on {workers} workers: leave out "
            f"--chunks={arguments.chunks}"
        )


def _check_size(arguments: argparse.Namespace) -> None:
    """Refuse more actions than memory holds and a picture can show; the numbers are probably mistyped."""
    actions = 2 * (arguments.stages or 1) * (arguments.microbatches or 1) * (arguments.chunks or 1)
    if actions > _MOST_ACTIONS:
        raise UsageError(
            f"--stages {arguments.stages} and --microbatches {arguments.microbatches} make {actions:,} actions: "
            f"at most {_MOST_ACTIONS:,} are allowed"
        )


def _read(name: str) -> Schedule:
    stem = Path(name).stem
    return Schedule.from_csv(Path(name), Path(name).name if stem in schedules() else stem)  # distinct in a comparison


def _say_wrote(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"wrote {path}")


def comparison_text(comparison: Comparison, named: Compared | None = None) -> str:
    """Return a table, the fastest schedule first, and below it those that are left out and why.

    named: one of them; a column then shows each makespan relative to its makespan.
    """
    rows = [
        [
            party.name,
            str(party.chunks),
            f"{party.timeline.makespan:g} s",
            f"{_share(party, named):.1%}" if named else "",
            f"{party.timeline.bubble:.1%}",
            f"{party.peak_activations:g}",
        ]
        for party in comparison.ranked
    ]
    share = f"OF {named.name}" if named else ""
    lines = [
        table(["SCHEDULE", "CHUNKS", "MAKESPAN", share, "BUBBLE", "PEAK ACTIVATIONS"], rows),
        "All have the same model and workers: with c chunks, a chunk's time and activations count 1/c.",
        *(["", "Left out:"] if comparison.left_out else []),
        *(f"  {name}: {reason}" for name, reason in comparison.left_out.items()),
    ]
    return "\n".join(lines) + "\n"


def comparison_json(comparison: Comparison, named: Compared | None = None) -> str:
    """Return one JSON object in one line; with `named`, "of_named" is each makespan divided by that one's."""
    ranked = [
        {**party.as_json(), **({"of_named": _share(party, named)} if named else {})} for party in comparison.ranked
    ]
    return json.dumps({"ranked": ranked, "left_out": dict(comparison.left_out)}) + "\n"


def comparison_trace(comparison: Comparison) -> str:
    """Return trace events with a process for each schedule."""
    return to_trace_events({f"{party.name}, chunks={party.chunks}": party.timeline for party in comparison.ranked})


def _share(party: Compared, named: Compared) -> float:
    """Return party's makespan divided by named's; 1 if that is 0."""
    return party.timeline.makespan / named.timeline.makespan if named.timeline.makespan else 1.0
