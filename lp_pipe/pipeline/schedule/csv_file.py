"""Whether a schedule is in a file."""

from pathlib import Path

from lp_pipe.pipeline.schedule.ir import is_path
from lp_pipe.pipeline.schedule.registry import schedules


def names_file(schedule: str | Path) -> bool:
    """Whether what a user has given for a schedule is a path, and not a name."""
    return schedule not in schedules() and is_path(schedule)
