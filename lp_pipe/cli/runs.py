"""`lp_pipe runs`: list the runs with folders here, and how each has ended."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lp_pipe.cli.errors import UsageError, whole_number
from lp_pipe.cli.find_run import FOLDER
from lp_pipe.cli.table import duration, table
from lp_pipe.launch.report import shown
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.launch.run_records import RunRecord, entries, record_in
from lp_pipe.telemetry.tracebacks import shortened

_SHOWN = 20
_FAILURE_LETTERS = 70


HELP = "list runs that have ended, and how"
DESCRIPTION = (
    "List the runs whose folders are in this folder, in ./runs, and where scripts make them "
    "($LP_PIPE_RUNS, or below your state folder), newest first; with FOLDER only the runs in that folder."
)
USAGE = "lp_pipe runs [FOLDER] [-n N] [--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="a folder of runs, or a run's own")
    parser.add_argument(
        "-n",
        "--number",
        type=whole_number("-n ", "runs", 50, least=1),
        default=_SHOWN,
        metavar="N",
        help=f"default: {_SHOWN}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line: the contents of run.json")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Print the table.

    Raises:
        UsageError: there is no such folder.
    """
    folder: Path | None = arguments.folder
    if folder is not None and not folder.is_dir():
        raise UsageError(f"folder {folder} does not exist")
    found = sorted(runs_in(folder), key=lambda record: record.started, reverse=True)
    chosen = found[: arguments.number]
    if arguments.json:
        for record in chosen:
            print(json.dumps({"name": record.name, "state": state_of(record), **asdict(record)}))
        return 0
    if not chosen:
        print(f"no runs in {folder or 'this folder, in ./runs, or in ' + str(usual_runs())}")
        return 0
    print(table(("PROGRAM", "MODE", "STARTED", "TOOK", "EXIT", "ENDED", "FOLDER"), [_row(one) for one in chosen]))
    if len(found) > len(chosen):
        print(f"… and {len(found) - len(chosen)} older runs: lp_pipe runs -n {len(found)}")
    return 0


def state_of(record: RunRecord) -> str:
    """Return running, done, stopped, failed, interrupted, killed (no end was recorded), or unknown (another host)."""
    if record.ended is not None:
        return record.outcome or "done"
    if not record.is_here:
        return "unknown"
    return "running" if record.is_live else "killed"


def runs_in(folder: Path | None) -> Iterator[RunRecord]:
    """Yield each run once; without a folder also runs that are live, or were killed, in other places."""
    places = [folder] if folder is not None else [Path(), FOLDER, usual_runs()]
    paths = [path for place in places for path in (place, *_folders_in(place))]
    if folder is None:
        paths += [Path(record.run_dir) for record in entries().values()]
    for path in dict.fromkeys(path.resolve() for path in paths):
        if (record := record_in(path)) is not None:
            yield record


def _folders_in(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []


def _row(record: RunRecord) -> tuple[str, ...]:
    until = record.ended or (time.time() if record.is_live else None)
    return (
        record.program,
        record.mode,
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started)),
        "" if until is None else duration(until - record.started),
        "" if record.exit_status is None else str(record.exit_status),
        _ending(record),
        str(shown(record.run_dir)),
    )


def _ending(record: RunRecord) -> str:
    state = state_of(record)
    if state == "killed":
        return "killed, no end recorded"
    if state == "unknown":
        return f"unknown: run this command on host {record.host}"
    return f"{state}: {shortened(record.failure, _FAILURE_LETTERS)}" if record.failure else state
