"""The activities of one process of a program, as the launcher sees them."""

from typing import NamedTuple

from lp_pipe.telemetry.waits import Activity, PoolStatus


class View(NamedTuple):
    """The waits and servers of one process, as it reported them last.

    activities: thread by thread, the outermost of each first.
    positions: where its stage workers are in their schedules, in words.
    node: the process's node_id; "" for the launcher's own process, whose threads may be of many nodes.
    silence_s: how long ago the process reported.
    process_state: the kernel's letter for the state of a process that does not answer ("T": stopped); "" if not known.
    """

    activities: list[Activity]
    pools: list[PoolStatus]
    positions: list[str]
    node: str = ""
    silence_s: float = 0.0
    process_state: str = ""
