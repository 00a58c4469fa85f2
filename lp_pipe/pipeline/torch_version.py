"""The torch that pipelines need. Older ones lack functions that they call, and say so in a step, in torch's words."""

import re

from lp_pipe.errors import PipelineError

LEAST = (2, 11)
WANTED = f"torch>={LEAST[0]}.{LEAST[1]}"


def is_too_old(version: str) -> bool:
    """Whether this one (`2.13.0+cpu`, or `2.11.0a0+nv26`, a vendor's build) is not enough."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < LEAST


def refuse_too_old(version: str) -> None:
    """
    Raises:
        PipelineError: it is too old.
    """
    if is_too_old(version):
        raise PipelineError(f"pipelines need {WANTED}, and this is torch {version}: pip install --upgrade '{WANTED}'")
