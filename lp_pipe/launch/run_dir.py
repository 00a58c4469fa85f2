"""The folder of a run: a new one among its user's, or the one that was asked for, if no other run is there."""

import logging
import os
import time
from functools import cache
from pathlib import Path

from lp_pipe.errors import LaunchError
from lp_pipe.launch.cleanup import prune_runs
from lp_pipe.launch.run_records import read_record
from lp_pipe.launch.user_folders import is_temporary, state_folder
from lp_pipe.telemetry.run_folder import RunFolder

_log = logging.getLogger(__name__)

_MOST_NAME_BYTES = 150  # of the program's name in its run's folder; file systems take 255 in all


def make_run_dir(name: str, asked: str | os.PathLike[str] | None) -> Path:
    """The folder of a run: what was asked for, or a new one.

    Raises:
        LaunchError: it cannot be made, or a run is there that has not ended.
    """
    folder = new_run_dir(_usual_runs_said(), name) if asked is None else Path(asked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a home folder that is not there or cannot be written, as in some containers
        hint = "set LP_PIPE_RUNS to one where runs may be, or say run_dir=" if asked is None else "give another one"
        raise LaunchError(f"the run's folder {folder} cannot be made ({error.strerror}): {hint}") from None
    folder = folder.resolve()
    if asked is None and not os.environ.get("LP_PIPE_RUNS"):  # a folder that the user chose is the user's to clean
        prune_runs(folder.parent)
    other = read_record(RunFolder(folder).record)
    # Both would write the same logs, and prune each other's checkpoints.
    if other is not None and other.control and other.is_live:
        raise LaunchError(
            f"run_dir {folder}: program {other.program!r} (process {other.pid}) still runs there: stop it, or give "
            "another folder"
        )
    return folder


def new_run_dir(parent: Path, name: str) -> Path:
    """A name for a run's folder that sorts by time and is new."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    safe = "".join(char if char.isalnum() or char in "-_" else "_" for char in name)
    safe = safe.encode()[:_MOST_NAME_BYTES].decode(errors="ignore")
    return parent / f"{safe}-{stamp}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"


def usual_runs() -> Path:
    """Return where a script's runs have their folders.

    Raises:
        LaunchError: as `state_folder`.
    """
    named = os.environ.get("LP_PIPE_RUNS")
    return Path(named) if named else state_folder() / "runs"


def _usual_runs_said() -> Path:
    folder = usual_runs()
    if is_temporary(folder):
        _say_that_runs_are_temporary(folder)
    return folder


@cache
def _say_that_runs_are_temporary(folder: Path) -> None:
    _log.warning(
        "there is no home folder that can be written: runs have their folders in %s, which the system may delete; "
        "set LP_PIPE_RUNS or XDG_STATE_HOME to have them elsewhere",
        folder,
    )
