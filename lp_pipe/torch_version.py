"""The torch versions that pipelines need, and those they were tested with. Importing this imports no torch."""

import re

from lp_pipe.errors import PipelineError

OLDEST, NEWEST = (2, 11), (2, 14)
_AFTER_NEWEST = (NEWEST[0], NEWEST[1] + 1)
WANTED = f"torch>={OLDEST[0]}.{OLDEST[1]},<{_AFTER_NEWEST[0]}.{_AFTER_NEWEST[1]}"


def is_too_old(version: str) -> bool:
    """Return whether torch of this version (`2.13.0+cpu`, a vendor's `2.11.0a0+nv26`) lacks what pipelines need."""
    found = _numbers(version)
    return found is not None and found < OLDEST


def is_tested(version: str) -> bool:
    """Return whether the tests of lp_pipe have passed with torch of this version."""
    found = _numbers(version)
    return found is not None and OLDEST <= found <= NEWEST


def refuse_too_old(version: str) -> None:
    """Refuse a torch that lacks what pipelines need.

    Raises:
        PipelineError: torch of this version is too old.
    """
    if is_too_old(version):
        raise PipelineError(
            f"torch {version} is too old for pipelines, which need {WANTED}: pip install --upgrade '{WANTED}'"
        )


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
