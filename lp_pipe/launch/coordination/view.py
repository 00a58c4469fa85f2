"""What the threads of one process of a program are at, as the launcher sees it."""

from collections.abc import Iterable
from typing import NamedTuple

from lp_pipe.protos import supervision_pb2 as wire
from lp_pipe.telemetry.waits import Activity, PoolStatus

_FIELDS = [name for name in Activity._fields if name != "node"]


class View(NamedTuple):
    """activities: thread by thread, the outermost of each first. silence_s: how long ago the process said so.

    positions: where its stage workers are in their schedules, in words.
    node: the process's node_id; "" for the launcher's own process, whose threads may be of many nodes.
    process_state: the kernel's letter for the state of a process that does not answer ("T": stopped); "" if not known.
    """

    activities: list[Activity]
    pools: list[PoolStatus]
    positions: list[str]
    node: str = ""
    silence_s: float = 0.0
    process_state: str = ""


def to_wire(activities: Iterable[Activity], pools: Iterable[PoolStatus], positions: Iterable[str]) -> wire.Waits:
    """What a process says of itself; its node is known by the stream."""
    return wire.Waits(
        activities=[wire.Activity(**{name: getattr(one, name) for name in _FIELDS}) for one in activities],
        pools=[wire.Pool(**pool._asdict()) for pool in pools],
        positions=positions,
    )


def from_wire(message: wire.Waits, node_id: str) -> View:
    """What the process of a node has said."""
    return View(
        [Activity(node_id, *(getattr(one, name) for name in _FIELDS)) for one in message.activities],
        [PoolStatus(one.endpoint, one.size, one.active, tuple(one.quick)) for one in message.pools],
        list(message.positions),
        node_id,
    )
