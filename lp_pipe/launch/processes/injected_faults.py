"""A test's faults (lp_pipe.testing.faults) in the processes of one host: also in those that start later."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future

from lp_pipe.launch.processes.node_stream import NodeStream
from lp_pipe.protos import supervision_pb2 as wire

_LASTING = (wire.Fault.DROP, wire.Fault.DELAY, wire.Fault.PARTITION)


class InjectedFaults:
    """past_hits: by rule, how often each has struck in processes that have ended."""

    def __init__(self) -> None:
        self._lasting: dict[str, wire.Fault] = {}
        self.past_hits: Counter[str] = Counter()

    def inject(self, fault: wire.Fault, streams: Mapping[str, NodeStream]) -> "Mapping[str, Future[int]]":
        """Tell all processes; by node, how often it has struck there, and by "" how often in the past."""
        if fault.action == wire.Fault.HEAL:
            self._lasting.pop(fault.rule, None)
        elif fault.action in _LASTING:
            self._lasting[fault.rule] = fault
        past: Future[int] = Future()
        past.set_result(self.past_hits[fault.rule])
        asked = {node_id: stream.ask_fault(fault) for node_id, stream in list(streams.items())}
        return {**asked, "": past}

    def begin(self, stream: NodeStream) -> None:
        """A process has reported in; it has made no connection yet."""
        for fault in list(self._lasting.values()):
            stream.ask_fault(fault)

    def end(self, stream: NodeStream) -> None:
        """It has ended."""
        self.past_hits.update(stream.last_hits)
