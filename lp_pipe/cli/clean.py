"""`lp_pipe clean`: remove what killed runs of this user have left behind."""

import argparse
import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from lp_pipe.cli.errors import counted
from lp_pipe.launch.processes.proctree import kill_all, marked, owner_of
from lp_pipe.launch.processes.socket_dir import PREFIX
from lp_pipe.launch.processes.template import MARK
from lp_pipe.launch.registry import RunRecord, dead_entries


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "clean",
        help="remove what killed runs have left behind",
        description=(
            "For every run of yours on this host whose launcher is dead: end the processes that carry its mark, remove "
            "its socket folder and its entry. Nothing else is touched; folders with logs and checkpoints stay."
        ),
        usage="lp_pipe clean [--dry-run]",
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Clean up and say what was done."""
    dead = dead_entries()
    for path, record in dead.items():
        done = list(_clean(path, record, is_dry=arguments.dry_run))
        print(f"run {record.name}, whose launcher {record.pid} is dead: {', '.join(done)}")
    if not dead:
        print("nothing to clean: no killed run of yours has left anything on this host")
    return 0


def _clean(path: Path, record: RunRecord, is_dry: bool) -> Iterator[str]:
    """Do it (or not), and say what; the entry goes last, so that an interrupted cleaning can be done again."""
    pids = left_of(record)
    if pids:
        if not is_dry:
            kill_all(pids)
        yield f"{'would kill' if is_dry else 'killed'} {counted(len(pids), 'process')} ({', '.join(map(str, pids))})"
    verb = "would remove" if is_dry else "removed"
    if _is_ours(Path(record.socket_dir)):
        if not is_dry:
            shutil.rmtree(record.socket_dir, ignore_errors=True)
        yield f"{verb} {record.socket_dir}"
    if not is_dry:
        path.unlink(missing_ok=True)
    yield f"{verb} its entry"


def left_of(record: RunRecord) -> list[int]:
    """A dead run's processes that still live: with its mark, of this user, and not this very command.

    root can read the environment of all.
    """
    found = marked(MARK, record.mark) if record.mark else []
    return [pid for pid in found if pid != os.getpid() and owner_of(pid) == os.getuid()]


def _is_ours(folder: Path) -> bool:
    """A socket folder that is still what it was: no link, of this user, and by its name one of lp_pipe's."""
    with contextlib.suppress(OSError):
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and folder.name.startswith(PREFIX)
    return False
