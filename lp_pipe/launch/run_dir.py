"""Choose and make the folder of a run."""

import logging
import os
import time
from functools import cache
from pathlib import Path

from lp_pipe.errors import LaunchError
from lp_pipe.launch.cleanup import prune_runs, remove_entries_of
from lp_pipe.launch.run_records import read_record
from lp_pipe.telemetry.run_folder import RunFolder
from lp_pipe.user_folders import is_temporary, state_folder

_log = logging.getLogger(__name__)

_MOST_NAME_BYTES = 150  # of the program's name in its run's folder; file systems allow names of 255 bytes


def make_run_dir(name: str, asked: str | os.PathLike[str] | None) -> Path:
    """Make the folder of a run, `asked` or a new one, and return its absolute path.

    Raises:
        LaunchError: the folder cannot be made, or a run in it has not ended.
    """
    folder = new_run_dir(_usual_runs_with_warning(), name) if asked is None else Path(asked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as a missing or read-only home folder, as in some containers
        hint = "set LP_PIPE_RUNS to a writable folder, or give run_dir=" if asked is None else "give another one"
        raise LaunchError(f"cannot make the run's folder {folder} ({error.strerror}): {hint}") from None
    folder = folder.resolve()
    if asked is None and not os.environ.get("LP_PIPE_RUNS"):  # folders that the user has chosen are not cleaned
        prune_runs(folder.parent)
    other = read_record(RunFolder(folder).record)
    # Two runs in one folder would write the same logs and remove each other's checkpoints.
    if other is not None and other.control and other.is_live:
        raise LaunchError(
            f"run_dir {folder} is in use: program {other.program!r} (process {other.pid}) still runs there: stop it, "
            "or give another folder"
        )
    if other is not None and other.ended is None:
        remove_entries_of(folder)
    return folder


def new_run_dir(parent: Path, name: str) -> Path:
    """Return the path of a new folder for a run. Its name sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    safe = "".join(char if char.isalnum() or char in "-_" else "_" for char in name)
    safe = safe.encode()[:_MOST_NAME_BYTES].decode(errors="ignore")
    return parent / f"{safe}-{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"


def usual_runs() -> Path:
    """Return the parent folder of runs for which no folder is given.

    Raises:
        LaunchError: as `state_folder`.
    """
    named = os.environ.get("LP_PIPE_RUNS")
    return Path(named) if named else state_folder() / "runs"


def _usual_runs_with_warning() -> Path:
    folder = usual_runs()
    if is_temporary(folder):
        _warn_that_runs_are_temporary(folder)
    return folder


@cache
def _warn_that_runs_are_temporary(folder: Path) -> None:
    _log.warning(
        "there is no writable home folder: folders of runs are in %s, which the system may delete; set LP_PIPE_RUNS or "
        "XDG_STATE_HOME to keep them elsewhere",
        folder,
    )
