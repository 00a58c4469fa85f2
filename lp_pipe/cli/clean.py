"""`lp_pipe clean`: remove the leftovers of this user's killed runs, and folders of old runs."""

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from lp_pipe.cli.errors import UsageError, counted, whole_number
from lp_pipe.launch.cleanup import (
    KEPT_RUNS,
    abandoned_folders,
    has_socket_folder,
    left_of,
    old_runs,
    remove_socket_folder,
)
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.launch.run_records import RunRecord, dead_entries
from lp_pipe.process_tree import kill_all

HELP = "remove leftovers of killed runs, and old runs"
DESCRIPTION = (
    "For every run of yours on this host whose launcher is dead: kill its remaining processes, and remove its "
    "socket folder and its entry in the list of live runs. Also remove socket folders that killed agents left "
    "on this host. With --runs also remove folders of old runs."
)
USAGE = "lp_pipe clean [--runs[=FOLDER]] [--keep=N] [--dry-run]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--runs",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        const=usual_runs(),
        help="remove the folders of ended runs in FOLDER (default: where scripts make them), except for the newest; "
        "folders with metrics after a day, folders with checkpoints or files of nodes after 30 days without a change",
    )
    parser.add_argument(
        "--keep",
        type=whole_number("--keep=", "runs", 10),
        metavar="N",
        help=f"--runs: how many of the newest runs stay (default: {KEPT_RUNS})",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Clean up and print what was done.

    Raises:
        UsageError: --keep without --runs, or there is no such folder.
    """
    folder: Path | None = arguments.runs
    if folder is None and arguments.keep is not None:
        raise UsageError("--keep needs --runs: it is the number of runs that stay")
    if folder is not None and folder != usual_runs() and not folder.is_dir():
        raise UsageError(f"--runs={folder}: there is no such folder")
    dead = dead_entries()
    for path, record in dead.items():
        done = list(_clean(path, record, is_dry=arguments.dry_run))
        print(f"run {record.name}, whose launcher {record.pid} is dead: {', '.join(done)}")
    abandoned = abandoned_folders()
    for path in abandoned:
        if not arguments.dry_run:
            shutil.rmtree(path, ignore_errors=True)
        verb = "would remove" if arguments.dry_run else "removed"
        print(f"{verb} {path}, the socket folder of a run whose processes on this host were all killed")
    if not dead and not abandoned:
        print("nothing to clean: there are no leftovers of killed runs of yours on this host")
    if folder is not None:
        _clean_runs(folder, KEPT_RUNS if arguments.keep is None else arguments.keep, is_dry=arguments.dry_run)
    return 0


def _clean_runs(folder: Path, kept: int, is_dry: bool) -> None:
    old = old_runs(folder, kept)
    for path in old:
        if not is_dry:
            shutil.rmtree(path, ignore_errors=True)
    verb = "would remove" if is_dry else "removed"
    print(f"{verb} {counted(len(old), 'old run')} in {folder}", *(f"  {path.name}" for path in old), sep="\n")


def _clean(path: Path, record: RunRecord, is_dry: bool) -> Iterator[str]:
    """Remove a dead run's leftovers (unless `is_dry`) and yield what was done.

    The entry is removed last, so that an interrupted cleaning can be repeated.
    """
    pids = left_of(record)
    if pids:
        if not is_dry:
            kill_all(pids)
        yield f"{'would kill' if is_dry else 'killed'} {counted(len(pids), 'process')} ({', '.join(map(str, pids))})"
    verb = "would remove" if is_dry else "removed"
    if has_socket_folder(record):
        if not is_dry:
            remove_socket_folder(record)
        yield f"{verb} {record.socket_dir}"
    if not is_dry:
        path.unlink(missing_ok=True)
    yield f"{verb} its entry"
