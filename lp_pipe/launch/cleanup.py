"""Remove old folders of ended runs, and what killed runs could not remove, so that neither grows without bound.

A run for which no folder is given has one below the user's state folder. The newest KEPT_RUNS of these are kept. Older
ones are kept for a day if they have metrics, and for 30 days if they have checkpoints or other files of their nodes.
"""

import contextlib
import os
import random
import re
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from lp_pipe.connections.socket_dir import PREFIX, abandoned_socket_dirs
from lp_pipe.launch.processes.template import MARK
from lp_pipe.launch.run_records import RunRecord, dead_entries, entries, read_record
from lp_pipe.process_tree import marked, owner_of, start_time
from lp_pipe.telemetry.run_folder import RunFolder

KEPT_RUNS = 50
_DAY_S = 86400.0
_KEPT_METRICS_S, _KEPT_RESULTS_S = 1 * _DAY_S, 30 * _DAY_S
_KEPT_ENTRIES = 50  # entries of killed runs that are left to `lp_pipe clean`
_AT_MOST_S = 0.05  # the most that a launch spends on this; the next launch continues
_MADE_BY_LAUNCH = re.compile(r".+-\d{8}-\d{6}-(?P<pid>\d+)-\d{6}")


def old_runs(parent: Path, kept: int = KEPT_RUNS) -> list[Path]:
    """Return the folders of runs below `parent` that need not be kept, oldest first.

    Only those that `launch` has named and that belong to this user, and never that of a run that may still be live.
    """
    return [path for path in _beyond(parent, kept) if _is_old(path)]


def prune_runs(parent: Path) -> None:
    """Remove folders of old runs, as many as a launch has time for."""
    with contextlib.suppress(OSError):
        if len(os.listdir(parent)) <= KEPT_RUNS:
            return
    deadline = time.monotonic() + _AT_MOST_S
    paths = _beyond(parent, KEPT_RUNS)
    random.Random().shuffle(paths)  # otherwise checking those that must stay could use up the time of every launch
    for path in paths:
        if _is_old(path):
            shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            return


def prune_entries() -> None:
    """Remove all but the newest entries of killed runs, with their socket folders, if no process of them lives."""
    _remove_entries(dict(list(dead_entries().items())[:-_KEPT_ENTRIES]))


def remove_entries_of(run_dir: Path) -> None:
    """Remove the entries of killed runs in this folder, in which another run begins, if no process of them lives."""
    _remove_entries({path: record for path, record in dead_entries().items() if Path(record.run_dir) == run_dir})


def abandoned_folders() -> list[Path]:
    """Return this user's socket folders without a living process that no entry of a run names."""
    named = {record.socket_dir for record in entries().values()}
    return sorted(path for path in abandoned_socket_dirs() if str(path) not in named)


def _remove_entries(dead: Mapping[Path, RunRecord]) -> None:
    for path, record in dead.items():
        if not left_of(record):
            remove_socket_folder(record)
            path.unlink(missing_ok=True)


def left_of(record: RunRecord) -> list[int]:
    """Return the living processes of a dead run: those with its mark that belong to this user, without this process.

    The user is checked because root can read the environment of all processes.
    """
    found = marked(MARK, record.mark) if record.mark else []
    return [pid for pid in found if pid != os.getpid() and owner_of(pid) == os.getuid()]


def has_socket_folder(record: RunRecord) -> bool:
    """Return whether the run's socket folder is still a folder of this user, not a link, and named by lp_pipe."""
    with contextlib.suppress(OSError):
        found = os.lstat(record.socket_dir)
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        return is_ours and Path(record.socket_dir).name.startswith(PREFIX)
    return False


def remove_socket_folder(record: RunRecord) -> None:
    """Remove a dead run's socket folder, if it still exists."""
    if has_socket_folder(record):
        shutil.rmtree(record.socket_dir, ignore_errors=True)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that could not be launched, if it has neither a record nor results."""
    with contextlib.suppress(OSError):
        if not RunFolder(folder).record.exists() and not RunFolder(folder).results():
            shutil.rmtree(folder)


def _beyond(parent: Path, kept: int) -> list[Path]:
    """Return this user's folders that `launch` has named, without the `kept` newest ones, oldest first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _MADE_BY_LAUNCH.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # another launch has just removed it
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.getuid():
                        found.append((status.st_mtime, Path(entry.path)))
    return [path for _, path in sorted(found)[: max(0, len(found) - kept)]]


def _is_old(path: Path) -> bool:
    """Return whether the run in this folder has ended and its results are old enough to be removed."""
    try:
        if _may_be_live(path):
            return False
        results = RunFolder(path).results()
        changed = max([path.stat().st_mtime, *(one.lstat().st_mtime for one in results)])
    except OSError:  # the folder cannot be read, or another launch has just removed it
        return False
    has_metrics_only = results == [RunFolder(path).metrics]
    kept_s = _KEPT_METRICS_S if has_metrics_only else _KEPT_RESULTS_S
    return not results or time.time() - changed >= kept_s


def _may_be_live(path: Path) -> bool:
    """Return whether the run's launcher may live. Without a record, the pid in the folder's name decides."""
    record = read_record(RunFolder(path).record)
    if record is None:
        named = _MADE_BY_LAUNCH.fullmatch(path.name)
        return named is not None and start_time(int(named["pid"])) != 0
    # A run of another host that shares this folder may live unless its record says that it has ended.
    return record.is_live or (record.ended is None and not record.is_here)
