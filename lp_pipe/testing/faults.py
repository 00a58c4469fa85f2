"""Faults in a running program's connections and processes, for tests of what the program does then.

    with faults.enabled():  # the pytest fixture `faults` does this
        run = lp.launch(program)
        with faults.partition(run, "worker", "server") as fault:
            ...             # the fault lasts until the end of this block
        assert fault.hits

Nodes are named by label (the whole group), `(label, index)` or handle. `LAUNCHER` is the test itself, with its clients
from `run.client`; `EVERYONE` is all of them. Faults act on connections between two nodes, never on a node's supervision
stream to the launcher. A connection neither loses nor reorders bytes, so a fault can lose a message (a call, a reply, a
value of a stream or channel) or the whole connection.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lp_pipe.connections import fault_injection
from lp_pipe.errors import Unavailable
from lp_pipe.handles import Handle
from lp_pipe.launch import Run
from lp_pipe.nodes import Node
from lp_pipe.protos import supervision_pb2 as wire

# A label means the whole group; (label, index) or a handle means one node.
Nodes = str | tuple[str, int] | Handle[Any]

LAUNCHER = "(launcher)"  # the test itself, with its clients from `run.client`
EVERYONE = "(everyone)"


def node_ids(run: Run, nodes: Nodes) -> list[str]:
    """Return the "label/index" of each node; "" for the launcher.

    Raises:
        KeyError, IndexError: there is no such group, or it has fewer nodes.
        ValueError: the handle belongs to another program.
    """
    if isinstance(nodes, Handle):
        return [_by_handle(run, nodes)]
    if nodes == LAUNCHER:
        return [fault_injection.LAUNCHER]
    if nodes == EVERYONE:
        return [fault_injection.LAUNCHER, *_all(run)]
    label, index = nodes if isinstance(nodes, tuple) else (nodes, None)
    group = run.status().get(label)
    if group is None:
        known = ", ".join(run.status())
        raise KeyError(f"this program has no group {label!r}; its groups are {known}")
    if index is not None and not 0 <= index < len(group):
        raise IndexError(f"group {label!r} has no node {index}: it has {len(group)} nodes")
    return [f"{label}/{number}" for number in (range(len(group)) if index is None else [index])]


def ways_between(run: Run, source: Nodes, target: Nodes) -> list[wire.Fault.Way]:
    """Return the connections, and their directions, by which messages travel from `source` to `target`.

    Raises:
        ValueError: they are never connected, because neither side listens, or both are one node.
    """
    sources, targets = node_ids(run, source), node_ids(run, target)
    pairs = [(a, b) for a in sources for b in targets if a != b]
    if not pairs:
        raise ValueError(f"{source!r} and {target!r} are never connected: they are one node")
    endpoints = {node: _endpoints(run, node) for node in {*sources, *targets}}
    ways = [
        wire.Fault.Way(node=node, endpoint=endpoint, is_outgoing=is_outgoing)
        for a, b in pairs
        for node, listener, is_outgoing in ((a, b, True), (b, a, False))
        for endpoint in endpoints[listener]
    ]
    if not ways:
        raise ValueError(f"{source!r} and {target!r} are never connected: neither side serves calls or channels")
    return ways


def wait_until_up(run: Run, node_id: str, patience_s: float) -> None:
    """Wait until all servers of the node listen, or will never do so."""
    deadline = time.monotonic() + patience_s
    for address in _node(run, node_id).addresses:
        with contextlib.suppress(Unavailable, TimeoutError):
            run._coordinator.resolve(address.id).result(max(0.0, deadline - time.monotonic()))


def _all(run: Run) -> list[str]:
    return [f"{label}/{index}" for label, rows in run.status().items() for index in range(len(rows))]


def _by_handle(run: Run, handle: Handle[Any]) -> str:
    if handle.node_name not in _all(run):
        raise ValueError(f"{handle!r} belongs to another program")
    return handle.node_name


def _endpoints(run: Run, node_id: str) -> list[str]:
    if node_id == fault_injection.LAUNCHER:
        return []
    return [run._coordinator.endpoint_for(address.id) for address in _node(run, node_id).addresses]


def _node(run: Run, node_id: str) -> Node[Any]:
    label, _, index = node_id.rpartition("/")
    return run._program.groups[label][int(index)]


_PATIENCE_S = 10.0
_LOOK_AGAIN_S = 0.001

_numbers = itertools.count()
_active: list["Fault"] = []


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Allow faults in programs that are launched in the body. Their calls are slightly slower."""
    before = os.environ.get(fault_injection.VARIABLE)
    os.environ[fault_injection.VARIABLE] = "1"  # nodes read it when their process starts
    fault_injection.enable()
    try:
        yield
    finally:
        heal_all()
        if before is None:
            del os.environ[fault_injection.VARIABLE]
            fault_injection.disable()


class Fault:
    """A fault that lasts until `heal`, or the end of its `with` block."""

    def __init__(self, heal: Callable[[], int], hits: Callable[[], int]) -> None:
        self._heal = heal
        self._ask = hits
        self._last_hits: int | None = None
        _active.append(self)

    @property
    def hits(self) -> int:
        """The number of messages, connections or processes that the fault has hit; 0 means that it tested nothing."""
        return self._ask() if self._last_hits is None else self._last_hits

    def heal(self) -> None:
        """End the fault; idempotent."""
        if self._last_hits is None:
            _active.remove(self)
            self._last_hits = 0
            self._last_hits = self._heal()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.heal()


def drop(run: Run, source: Nodes, target: Nodes, count: int | None = 1, after: int = 0) -> Fault:
    """Lose the next `count` messages (None: all) from `source` to `target`, after `after` more have passed.

    The handler of a lost call never runs; the handler of a lost reply has run. The callers wait, or get
    DeadlineExceeded. Messages are counted for each pair of nodes, and calls separately from replies.

    Raises (all faults): KeyError, IndexError: there is no such node. ValueError: `source` and `target` are never
        connected. RuntimeError: the program was not launched inside `enabled()`, or that block has ended.
    """
    if (count is not None and count < 1) or after < 0:
        raise ValueError(f"drop: count must be at least 1 or None, and after at least 0, got {count=}, {after=}")
    return _install(run, source, target, action=wire.Fault.DROP, count=count or 0, after=after)


def delay(run: Run, source: Nodes, target: Nodes, seconds: float) -> Fault:
    """Let every message from `source` to `target` arrive `seconds` later, in order, as over a slow link.

    When the fault ends, delayed messages arrive at once.
    """
    if seconds <= 0:
        raise ValueError(f"delay: seconds={seconds} must be more than 0")
    return _install(run, source, target, action=wire.Fault.DELAY, delay_s=seconds)


def cut(run: Run, one: Nodes, other: Nodes) -> int:
    """Close the connections between the nodes now and return their number.

    Calls in progress raise Unavailable, new calls connect again. A channel does not connect again.
    """
    reason = f"the test has cut the connection between {one!r} and {other!r}"
    return _tell(run, _fault(run, one, other, action=wire.Fault.CUT, reason=reason))


def partition(run: Run, one: Nodes, other: Nodes) -> Fault:
    """Close the connections between the nodes, and refuse new ones: calls wait, or raise Unavailable.

    For a partition that neither side can detect, `drop` all messages in both directions.
    """
    reason = f"the test has separated {one!r} and {other!r}"
    return _install(run, one, other, action=wire.Fault.PARTITION, reason=reason)


def kill(run: Run, nodes: Nodes) -> None:
    """End the nodes' processes with SIGKILL.

    Raises:
        ValueError: they are threads (thread mode), the launcher, or have ended.
    """
    for pid in [_pid_of(run, node_id, "killed") for node_id in node_ids(run, nodes)]:
        os.kill(pid, signal.SIGKILL)


def freeze(run: Run, nodes: Nodes) -> Fault:
    """Stop the nodes' processes (SIGSTOP) until `heal`: their connections stay open, but nothing answers.

    Waits up to 10 s for the nodes' servers to listen.

    Raises:
        ValueError: they are threads (thread mode), the launcher, or have ended.
    """
    frozen = node_ids(run, nodes)
    for node_id in frozen:
        _pid_of(run, node_id, "frozen")  # raises at once if the node has no process of its own
        wait_until_up(run, node_id, _PATIENCE_S)
    pids = [_pid_of(run, node_id, "frozen") for node_id in frozen]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        _wait_until_stopped(pid)

    def thaw() -> int:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                os.kill(pid, signal.SIGCONT)
        return len(pids)

    return Fault(thaw, lambda: len(pids))


def heal_all() -> None:
    """End every fault, the last one first."""
    for fault in reversed(list(_active)):
        fault.heal()


def _install(run: Run, source: Nodes, target: Nodes, **options: Any) -> Fault:
    fault = _fault(run, source, target, **options)
    _tell(run, fault)
    heal = wire.Fault(rule=fault.rule, action=wire.Fault.HEAL)
    report = wire.Fault(rule=fault.rule, action=wire.Fault.REPORT)
    return Fault(lambda: _tell(run, heal), lambda: _tell(run, report))


def _fault(run: Run, source: Nodes, target: Nodes, **options: Any) -> wire.Fault:
    if not run.has_faulty_connections:
        raise RuntimeError(
            "this program was launched without support for faults: use the fixture `faults` in the test, or launch the "
            "program inside `with faults.enabled():`"
        )
    if (
        not fault_injection.is_enabled()
    ):  # what this process connects from now on, in thread mode all there is, is left alone
        raise RuntimeError("`with faults.enabled():` has ended: the faults belong inside of it, as the launch does")
    return wire.Fault(rule=str(next(_numbers)), ways=ways_between(run, source, target), **options)


def _tell(run: Run, fault: wire.Fault) -> int:
    """Apply the fault in every process of the program, including this one; return how often it has hit."""
    asked = run._host.inject(fault)  # first: they work at it while this process does
    hits = fault_injection.apply(fault)
    for node_id, answer in asked.items():
        try:
            hits += answer.result(_PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(f"node {node_id} has not answered within {_PATIENCE_S:g} s: is it frozen?") from None
    return hits


def _pid_of(run: Run, node_id: str, what: str) -> int:
    """Wait until a node has started and return its process."""
    label, _, index = node_id.rpartition("/")
    if not label:
        raise ValueError(f"the launcher runs this test, and cannot be {what}")
    while (row := run.status()[label][int(index)])["state"] in ("starting", "restarting"):
        time.sleep(_LOOK_AGAIN_S)  # there is no event for a change of a node's state
    if row["pid"] == os.getpid():
        raise ValueError(f"node {node_id} is a thread, which cannot be {what}: launch the program with mode='process'")
    if row["state"] != "running":
        raise ValueError(f"node {node_id} cannot be {what}: it has {row['state']}")
    return int(row["pid"])


def _wait_until_stopped(pid: int) -> None:
    """Wait until all threads of a process are stopped. Only its parent would get an event for that."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _is_stopped(pid) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)


def _is_stopped(pid: int) -> bool:
    """Return whether no thread of the process runs; True if there is no /proc, or the process has ended."""
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in _stats_of(pid))


def _stats_of(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found.append(path.read_text(errors="replace"))  # a thread's name may be any bytes
    return found
