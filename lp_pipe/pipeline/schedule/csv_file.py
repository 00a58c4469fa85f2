"""Schedules in files."""

import os
from pathlib import Path

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.schedule.ir import Schedule
from lp_pipe.pipeline.schedule.registry import schedules


def names_file(schedule: str) -> bool:
    """Whether what a user has given for a schedule is a path, and not a name."""
    return schedule not in schedules() and (schedule.endswith(".csv") or os.path.isfile(schedule))  # False if too long


def read_csv(path: str | Path, name: str | None = None) -> Schedule:
    """Read a file in torch's CSV format; the schedule is called like the file, if not otherwise.

    Raises:
        ScheduleError: the file cannot be read, or is something else; names it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(f"cannot read {path}: {error}") from error
    try:
        return Schedule.from_csv(text, Path(path).stem if name is None else name)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
