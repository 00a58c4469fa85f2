"""The messages between a node's process and its launcher: one frozen type for each, and their form as bytes.

A `Notice` is not answered. A `Question[R]` is answered with an R, or with an exception. A message is pickled, but only
classes of this module (and the few that their fields have) are loaded, so that the bytes of a peer run no code.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from lp_pipe.connections.frames import Piece
from lp_pipe.membership import Membership
from lp_pipe.telemetry.edges import EdgeCount
from lp_pipe.telemetry.tracing import TraceBatch, TraceSpan
from lp_pipe.telemetry.waits import Activity, PoolStatus

R = TypeVar("R")


class Notice:
    """A message without an answer."""


class Question(Generic[R]):
    """A message that is answered with an R."""


@dataclass(frozen=True)
class Failure:
    """The failure of a node.

    is_unavailable: the error may only be the consequence of another node's end.
    is_plain_echo: the error is that consequence itself, and was not raised by code that dealt with it, such as a save
        on the way out; after the program's stop it is no failure.
    is_final: a restart of the node cannot mend it (Unrecoverable).
    is_loading: the node could not be loaded (its setup function, modules, arguments), so none of its code has run.
    is_hang: the launcher killed the node because it made no progress; its group's `on_hang` decides what follows.
    """

    type_name: str
    message: str
    traceback: str = ""
    is_unavailable: bool = False
    is_plain_echo: bool = False
    is_hang: bool = False
    is_final: bool = False
    is_loading: bool = False

    @property
    def summary(self) -> str:
        return f"{self.type_name}: {self.message}"


class View(NamedTuple):
    """The waits and servers of one process, as it reported them last.

    activities: thread by thread, the outermost of each first.
    positions: where its stage workers are in their schedules, in words.
    node: the process's node_id; "" for the launcher's own process, with threads of perhaps many nodes.
    silence_s: how long ago the process reported.
    process_state: the kernel's letter for the state of a process that does not answer ("T": stopped, "Z": dead); "" if
        not known.
    edges: what has gone to other nodes.
    template: of a dead process, the pid of the template process, which has not reported that; 0: of no interest.
    """

    activities: list[Activity]
    pools: list[PoolStatus]
    positions: list[str]
    node: str = ""
    silence_s: float = 0.0
    process_state: str = ""
    template: int = 0
    edges: Sequence[EdgeCount] = ()


# Of a node's code, about itself or an address, by its id.


@dataclass(frozen=True)
class Hello(Notice):
    """The first message of a node's process. attempt: how often the node was restarted before."""

    node_id: str
    pid: int
    attempt: int


@dataclass(frozen=True)
class Register(Notice):
    """The server of the address accepts calls at the endpoint."""

    address: str
    endpoint: str


@dataclass(frozen=True)
class Withdraw(Notice):
    """The server of the address accepts no more calls. is_failing: because the node fails."""

    address: str
    is_failing: bool


@dataclass(frozen=True)
class Find(Question[str]):
    """The endpoint of the address; Unavailable at once if no server is registered there."""

    address: str


@dataclass(frozen=True)
class Resolve(Question[str]):
    """The endpoint of the address, once its server is registered; Unavailable if its node has ended."""

    address: str


@dataclass(frozen=True)
class WatchState(Question[str]):
    """The name of a node among the owners of these addresses, which hold state, once one is to be restarted."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class HasLostState(Question[bool]):
    """Asks whether the server that is about to listen at the address was restarted without the state it had."""

    address: str


@dataclass(frozen=True)
class ReservePort(Question[str]):
    """A "host:port" that is free, for the user's own server behind the address."""

    address: str


@dataclass(frozen=True)
class InnerNodesEnded(Question[str]):
    """Answered, with "", once all inner nodes of a MultiProcessingColocation are down."""

    colocation: str


@dataclass(frozen=True)
class StopInnerNodes(Notice):
    colocation: str


@dataclass(frozen=True)
class RequestStop(Notice):
    """Request an ordered stop of the program."""


@dataclass(frozen=True)
class Meet(Question[Membership]):
    """The members of the node's group, once all its live nodes have asked for this generation or a later one."""

    group: str
    generation: int
    endpoint: bytes


@dataclass(frozen=True)
class WatchGeneration(Question[str]):
    """The reason for which this generation of the group is over, once it is."""

    group: str
    generation: int


@dataclass(frozen=True)
class Hear(Question[str]):
    """Answered, with "", once everything that the node had sent before was handled."""


@dataclass(frozen=True)
class LogMetrics(Notice):
    """values: in the order in which the node named them, which displays keep."""

    values: dict[str, float]
    step: int | None


@dataclass(frozen=True)
class LogEvent(Notice):
    event: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class SpansRecorded(Notice):
    """The spans of the node's process while it is traced. With `is_last`, the trace has ended there."""

    batch: TraceBatch


@dataclass(frozen=True)
class CallsTaken(Notice):
    """The number of calls that the node's servers have taken since it started."""

    calls: int


@dataclass(frozen=True)
class CodeEnded(Notice):
    """The node's code has ended; its process ends next.

    can_restart: whether its process could be started again, by the policy of its group.
    """

    failure: Failure | None
    can_restart: bool = True


@dataclass(frozen=True)
class Waits(Notice):
    """The activities of the process's threads; an answer to `Look`."""

    view: View


@dataclass(frozen=True)
class Loaded(Notice):
    """The node is loaded, and its own code begins."""


@dataclass(frozen=True)
class LastHits(Notice):
    """The number of times that a test's fault has struck in a process that is about to end."""

    rule: str
    hits: int


# From the process that has started the node.


@dataclass(frozen=True)
class Started(Notice):
    pid: int


@dataclass(frozen=True)
class EndsUnasked(Notice):
    """The process began to end before it was told to; `CodeEnded` will say how."""


@dataclass(frozen=True)
class Gone(Notice):
    """Nothing of the node is left, or it did not end in time and was left behind."""


# To a node's process.


@dataclass(frozen=True)
class HostMembership:
    """The identity with which a node reaches other hosts (connections/run_endpoints.py)."""

    run: str
    host: str
    reached_at: str
    credentials: bytes
    silence_s: float


@dataclass(frozen=True)
class StartNode(Notice):
    """The node that a process is to be, and all that it needs before it imports anything of the user's.

    main: attributes of the launcher's __main__ that describe its script: __file__, __package__, __doc__.
    state: what the script has set for its process.
    membership: None in a run on one host. previous_end: see NodeContext.

    The frame's one buffer is the pickled setup function, then (node, resources).
    """

    label: str
    index: int
    group_size: int
    run_dir: str
    socket_dir: str
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    main: dict[str, str]
    env: dict[str, str]
    threads: int
    cpus: tuple[int, ...]
    devices: tuple[int, ...]
    grace_s: float
    state: bytes
    membership: HostMembership | None
    previous_end: str


@dataclass(frozen=True)
class Stop(Notice):
    """Set the node's stop event."""


@dataclass(frozen=True)
class Ping(Notice):
    """The launcher is alive; sent every second. A node with servers answers with `CallsTaken`."""


@dataclass(frozen=True)
class Look(Notice):
    """Ask for `Waits`. old_s: the age from which activities say where the user's code is."""

    old_s: float


@dataclass(frozen=True)
class SetTracing(Notice):
    """Begin or end to record spans, which come as `SpansRecorded`."""

    is_on: bool


@dataclass(frozen=True)
class Stacks(Question[str]):
    """The Python stacks of all threads, as text."""


@dataclass(frozen=True)
class InjectFault(Question[int]):
    """A test makes connections misbehave: apply a serialized wire.Fault; answered with how often it has struck."""

    fault: bytes


_LOADED: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in [
        *(found for found in list(globals().values()) if isinstance(found, type) and found.__module__ == __name__),
        *(Activity, PoolStatus, Membership, EdgeCount, TraceBatch, TraceSpan),
    ]
}


class _Unpickler(pickle.Unpickler):
    """Loads the classes of messages, and nothing else."""

    def find_class(self, module: str, name: str) -> type:
        found = _LOADED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a supervision message")
        return found


def encode(value: Any) -> tuple[bytes, Sequence[Any]]:
    """Return a message, or an answer of plain values, as bytes, and the buffers beside these: none."""
    return pickle.dumps(value, protocol=5), ()


def decode(body: Piece, buffers: Sequence[Any] = ()) -> Any:
    """Return the message of `encode`.

    Raises:
        UnpicklingError: the bytes name a class that is no part of a message.
    """
    return _Unpickler(io.BytesIO(body)).load()
