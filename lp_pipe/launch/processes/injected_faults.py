"""Inject a test's faults (lp_pipe.testing.faults) into the processes of one host, also into those that start later."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future

from lp_pipe.launch.processes.node_link import NodeLink
from lp_pipe.protos import supervision_pb2 as wire

_LASTING = (wire.Fault.DROP, wire.Fault.DELAY, wire.Fault.PARTITION)


class InjectedFaults:
    """The faults that are in force on one host.

    past_hits: by rule, how often it has struck in processes that have ended.
    """

    def __init__(self) -> None:
        self._lasting: dict[str, wire.Fault] = {}
        self.past_hits: Counter[str] = Counter()

    def inject(self, fault: wire.Fault, streams: Mapping[str, NodeLink]) -> "Mapping[str, Future[int]]":
        """Send a fault to all processes. Return its hits by node, and under "" those of ended processes."""
        if fault.action == wire.Fault.HEAL:
            self._lasting.pop(fault.rule, None)
        elif fault.action in _LASTING:
            self._lasting[fault.rule] = fault
        past: Future[int] = Future()
        past.set_result(self.past_hits[fault.rule])
        asked = {node_id: stream.ask_fault(fault) for node_id, stream in list(streams.items())}
        return {**asked, "": past}

    def begin(self, stream: NodeLink) -> None:
        """Send the lasting faults to a process that has just started and has no connections yet."""
        for fault in list(self._lasting.values()):
            stream.ask_fault(fault)

    def end(self, stream: NodeLink) -> None:
        """Count the hits of a process that has ended."""
        self.past_hits.update(stream.last_hits)
