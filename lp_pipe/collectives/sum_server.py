"""A server that adds tensors of workers, part by part, and sends the sums back."""

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from lp_pipe import connections
from lp_pipe.collectives.backend import mismatch_text
from lp_pipe.collectives.compression import Compression, ErrorFeedback
from lp_pipe.collectives.part_messages import Part, PartKey, ServerHello, begin, part_frame, part_of
from lp_pipe.collectives.part_sender import PartSender
from lp_pipe.connections import Connection, Frame, frames, run_endpoints
from lp_pipe.errors import Unavailable


@dataclass
class _PartialSum:
    """The parts that have arrived under one key, and the sum of those that are next in the order of the ranks."""

    first: tuple[int, Part]  # rank, and its part without tensors
    waiting: dict[int, list[Tensor]] = field(default_factory=dict)  # by rank
    added: int = 0  # ranks
    total: Tensor | None = None


class SumServer:
    """Adds the parts of the workers of the newest generation, each in the order of their ranks.

    A worker of a newer generation ends the connections of the older ones, and drops their parts.
    """

    def __init__(self, endpoint: str, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._generation = -1
        self._workers: dict[int, _Worker] = {}
        self._sums: dict[PartKey, _PartialSum] = {}
        self._feedback: ErrorFeedback | None = None
        self._is_closed = False
        self._sender = PartSender(name)
        self._listener = connections.listen(endpoint, self.accept)

    @property
    def endpoint(self) -> str:
        """Where workers connect."""
        return run_endpoints.endpoint_to_register(self._listener.endpoint)

    def accept(self, connection: Connection) -> None:
        """Serve a worker at the other end."""
        _Worker(self, connection, self._sender).start()

    def close(self, reason: str = "closed") -> None:
        """End all connections with the reason."""
        self._listener.close(reason)
        with self._lock:
            self._is_closed = True
            workers, self._workers = self._workers, {}
            self._sums.clear()
        self._sender.close(drops_rest=False)
        for worker in workers.values():
            worker.connection.close(reason)

    def join(self, worker: "_Worker", hello: ServerHello) -> None:
        """Take in a worker that has said who it is."""
        with self._lock:
            is_late = hello.generation < self._generation or self._is_closed
            older: Iterable[_Worker] = ()
            if not is_late and hello.generation > self._generation:
                older, self._workers = self._workers.values(), {}
                self._generation = hello.generation
                self._sums.clear()
                self._feedback = ErrorFeedback(Compression.of_text(hello.compression)) if hello.compression else None
            if not is_late:
                self._workers[hello.rank] = worker
        for one in [worker] if is_late else older:
            one.connection.close(f"{self._name} serves another generation of the workers")

    def take(self, worker: "_Worker", part: Part) -> None:
        """Add a part, and send the sum to all workers once it is complete."""
        with self._lock:
            if self._workers.get(worker.hello.rank) is not worker:
                return  # of an older generation
            found = self._sums.get(part.key)
            if found is None:
                found = self._sums[part.key] = _PartialSum((worker.hello.rank, part._replace(tensors=())))
            problem = self._mismatch(found, worker.hello.rank, part)
            answer = None if problem else self._added(found, worker, part)
            if problem or answer is not None:
                del self._sums[part.key]
            workers = list(self._workers.values())
        if problem:
            for one in workers:
                one.send(Frame(frames.CHANNEL_NOTE, name=part.key.name, body=problem.encode()), part.urgency)
        elif answer is not None:
            for one in workers:
                one.send(part_frame(answer, by_reference=one.is_same_process), part.urgency)

    def _mismatch(self, found: _PartialSum, rank: int, part: Part) -> str:
        """Return what is wrong with a part beside the first one of its key; "" if it fits."""
        first_rank, first = found.first
        if (part.numel, part.dtype, part.is_compressed) == (first.numel, first.dtype, first.is_compressed):
            return ""
        calls = {
            one: (f"push_pull(name={given.key.name!r}, part {given.key.part}, {given.numel} of {given.dtype})", "")
            for one, given in ((first_rank, first), (rank, part))
        }
        names = {one: worker.hello.name for one, worker in self._workers.items()}
        return mismatch_text([names.get(one, "gone") for one in range(max(*names, first_rank) + 1)], calls)

    def _added(self, found: _PartialSum, worker: "_Worker", part: Part) -> Part | None:
        """Add what is next in the order of the ranks; return the sum once it is complete."""
        feedback = self._feedback if part.is_compressed else None
        if feedback is not None:
            found.waiting[worker.hello.rank] = [feedback.compression.decode(part.tensors, part.numel).to(part.dtype)]
        else:
            first, *others = part.tensors
            own = first.clone() if worker.is_same_process else first  # else it is the worker's own memory
            found.waiting[worker.hello.rank] = [own, *others]
        while found.added in found.waiting:
            for tensor in found.waiting.pop(found.added):
                found.total = tensor if found.total is None else found.total.add_(tensor)
            found.added += 1
        if found.added < worker.hello.workers or found.total is None:
            return None
        if feedback is None:
            return part._replace(tensors=[found.total])
        return part._replace(tensors=feedback.encode((part.key.name, part.key.part), found.total))

    def leave(self, worker: "_Worker") -> None:
        """Forget a worker whose connection has ended."""
        with self._lock:
            self._workers = {rank: one for rank, one in self._workers.items() if one is not worker}

    @property
    def compression(self) -> Compression | None:
        """The compression of this generation's compressed parts."""
        return self._feedback.compression if self._feedback is not None else None


class _Worker:
    """A worker at the other end of a connection."""

    hello: ServerHello

    def __init__(self, server: SumServer, connection: Connection, sender: PartSender) -> None:
        self._server = server
        self.is_same_process = connection.is_same_process()
        self.connection = connection
        self._sender = sender
        self._outlet = sender.add(connection, lambda _: None)  # the others are told by the coordinator

    def start(self) -> None:
        begin(self.connection, self._on_frame, self._on_close)

    def send(self, frame: Frame, urgency: int) -> None:
        if self.is_same_process:
            with contextlib.suppress(Unavailable):  # it is gone
                self.connection.send(frame)
        else:
            self._sender.send(self._outlet, urgency, lambda: frame)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.CHANNEL_OPEN:
            self.hello = ServerHello.of(frame)
            self._server.join(self, self.hello)
        else:
            self._server.take(self, part_of(frame, self._server.compression))

    def _on_close(self, _: str) -> None:
        self._sender.remove(self._outlet)
        self._server.leave(self)
