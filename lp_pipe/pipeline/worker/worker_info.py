"""Where a stage worker runs. Needs no torch."""

from typing import NamedTuple


class WorkerInfo(NamedTuple):
    """Of a stage worker."""

    node: str
    host: str
    stages: tuple[int, ...]
