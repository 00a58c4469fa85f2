"""A worker's end of the servers that sum: it pushes parts of tensors and pulls the sums, several at a time.

begin(tensor) ──► parts, front layers first ──► as fast as the sockets take them ──► servers
wait()        ◄── sums, into the tensor's place, front layers first ◄────────────────┘
"""

import functools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from lp_pipe import connections
from lp_pipe.channels import gpu
from lp_pipe.collectives.backend import GenerationOver
from lp_pipe.collectives.compression import Compression, ErrorFeedback
from lp_pipe.collectives.part_messages import Part, PartKey, ServerHello, begin, part_frame, part_of
from lp_pipe.collectives.part_sender import Outlet, PartSender
from lp_pipe.collectives.sum_server import SumServer
from lp_pipe.connections import Connection, Frame, frames, inproc
from lp_pipe.errors import CollectiveMismatch
from lp_pipe.membership import Membership
from lp_pipe.telemetry import waits

# Of a part on the wire: sums take as long with 32 KiB and with 128 KiB, of which the former need twice the processor.
_WIRE_BYTES = 64 << 10
_COMPRESSED_BYTES = 512 << 10  # of a part before its compression
OnDone = Callable[[Exception | None], None]
_TURNS = 240  # of the servers, before they repeat


@dataclass(frozen=True)
class PushPullOptions:
    """The options of a PushPull. priority: see `PushPull.begin`."""

    partition_bytes: int = 1 << 18
    priority: bool = True
    compression: Compression | None = None


def server_shares(workers: int, servers: int, *, is_colocated: bool) -> tuple[float, float]:
    """Return the share of the parts that each server gets, and that each worker gets as a server beside its training.

    All links are then equally busy. A worker that keeps a part sends its sum to the n - 1 others; a server sends n:

        a + (1 - a) 2(n - 1)/n  =  a n/k       a: the share of all k servers together
    """
    if not is_colocated:
        return 1 / servers, 0.0
    beside = 2 * (workers - 1) / workers
    together = min(1.0, beside / (workers / servers + beside - 1)) if servers else 0.0
    return together / servers if servers else 0.0, (1 - together) / workers


def server_turns(shares: Sequence[float]) -> list[int]:
    """Return the order in which parts go to servers, so that each gets its share of any sequence of parts."""
    given = [0] * len(shares)
    turns: list[int] = []
    for number in range(1, _TURNS + 1):
        late = [share * number - count for share, count in zip(shares, given, strict=True)]
        turns.append(late.index(max(late)))
        given[turns[-1]] += 1
    return turns


class PendingSum:
    """A sum that is on its way.

    on_done: called once, in any thread, when it is complete, with None, or when it will never be, with the reason.
    destination: memory on a GPU that gets the sum when it is waited for.
    """

    def __init__(
        self,
        owner: "PushPull",
        name: str,
        total: Tensor,
        parts: int,
        on_done: Callable[[Exception | None], None] | None,
        destination: Tensor | None,
    ) -> None:
        self._owner = owner
        self.name = name
        self.total = total
        self.parts_left = parts
        self.on_done = on_done
        self._destination = destination
        self._is_copied = False

    @property
    def is_complete(self) -> bool:
        return not self.parts_left

    def wait(self) -> Tensor:
        """Return the sum. With a destination it is there for what is queued on the current stream from now on.

        Raises:
            GenerationOver: a worker or a server is gone.
            CollectiveMismatch: another worker has pushed another tensor under this name.
        """
        self._owner.wait_for(self)
        if self._destination is None:
            return self.total
        if not self._is_copied:
            self._destination.copy_(self.total, non_blocking=True)
            self._is_copied = True
        return self._destination


class PushPull:
    """The connections of one worker to all servers of one generation.

    endpoints: of the servers; None: `own`, the server in this process, which ends with this object.
    shares: of the parts, by server.
    """

    def __init__(
        self,
        membership: Membership,
        endpoints: Sequence[str | None],
        shares: Sequence[float],
        options: PushPullOptions,
        own: SumServer | None = None,
    ) -> None:
        """Connect to all servers.

        Raises:
            Unavailable: one is not there.
        """
        self.rank = membership.rank
        self._options = options
        self._own = own
        self._feedback = ErrorFeedback(options.compression) if options.compression else None
        self._turns = server_turns(shares)
        self._changed = threading.Condition()
        self._uses: dict[str, int] = {}  # of each name
        self._under_way: dict[PartKey, tuple[PendingSum, Tensor]] = {}
        self._error: Exception | None = None
        self._connections: list[Connection] = []
        self._sender = PartSender("parts")
        self._outlets: list[Outlet] = []
        self._filling: deque[tuple[torch.Event, Callable[[], None]]] = deque()  # what to push after which event
        self._filling_thread: threading.Thread | None = None
        compression = options.compression.to_text() if options.compression else ""
        members = membership.members
        hello = ServerHello(membership.generation, members[self.rank], self.rank, len(members), compression)
        try:
            for endpoint in endpoints:
                connection = self._opened(endpoint)
                self._connections.append(connection)
                begin(connection, self._on_frame, self._on_close)
                connection.send(hello.frame())
                self._outlets.append(self._sender.add(connection, self._on_send_error))
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        name: str,
        tensors: Sequence[Tensor],
        total: Tensor,
        urgency: int = 0,
        turn: int | None = None,
        *,
        compresses: bool = True,
        on_done: OnDone | None = None,
        filled: torch.Event | None = None,
        destination: Tensor | None = None,
    ) -> PendingSum:
        """Begin to sum flat tensors of one size: all of rank 0 in order, then all of rank 1, and so on.

        Workers may begin sums in any order: the n-th sum of a name is that of the n-th tensors of this name on all
        workers. The tensors, which are on the host, must not change until the sum is complete.

        tensors: of this worker's replicas; the first one may be changed.
        total: where the sum goes; may be the first tensor.
        urgency: parts of sums with a smaller number are sent first, if the option `priority` is set.
        turn: of the first part among the parts of all tensors, where these are known: so all servers get their share.
        compresses: whether the option `compression` holds for this sum.
        on_done: see PendingSum.
        filled: the event after which the tensors have their values, where a GPU writes them. No call waits for it.
        destination: see PendingSum.
        """
        urgency = urgency if self._options.priority else 0
        is_compressed = self._feedback is not None and compresses and total.dtype.is_floating_point
        length = self._part_length(total.dtype, is_compressed=is_compressed)
        begins = range(0, max(1, total.numel()), length)
        turn = zlib.crc32(name.encode()) if turn is None else turn
        with self._changed:
            sequence = self._uses[name] = self._uses.get(name, -1) + 1
            pending = PendingSum(self, name, total, len(begins), on_done, destination)
            places = [
                (PartKey(name, sequence, part), slice(first, first + length)) for part, first in enumerate(begins)
            ]
            for key, place in places:
                self._under_way[key] = pending, total[place]
            error = self._error
        if error is not None:
            self._fail(error)  # what was begun too late
        elif filled is None:
            self._push(tensors, places, urgency, turn, is_compressed=is_compressed)
        else:
            push = functools.partial(self._push, tensors, places, urgency, turn, is_compressed=is_compressed)
            self._push_after(filled, push)
        return pending

    @property
    def partition_bytes(self) -> int:
        return self._options.partition_bytes

    @property
    def has_priority(self) -> bool:
        """Whether urgent parts overtake others."""
        return self._options.priority

    def parts_of(self, tensor: Tensor) -> int:
        """Return the number of parts that a flat tensor is sent in."""
        is_compressed = self._feedback is not None and tensor.is_floating_point()
        return len(range(0, max(1, tensor.numel()), self._part_length(tensor.dtype, is_compressed=is_compressed)))

    def wait_for(self, pending: PendingSum) -> None:
        """Wait until the sum is complete; raises as `PendingSum.wait`."""
        if pending.is_complete:
            return
        target = waits.Target(peer="other workers or servers")
        with waits.waiting(waits.RANKS, target, f"sum of {pending.name!r}"), self._changed:
            self._changed.wait_for(lambda: pending.is_complete or self._error is not None)
        if not pending.is_complete:
            assert self._error is not None
            raise type(self._error)(*self._error.args)

    def abort(self, reason: str) -> None:
        """Make waits for sums that are not complete raise GenerationOver. For any thread."""
        self._fail(GenerationOver(reason))

    def close(self, reason: str = "the worker has left the group") -> None:
        """End the connections, and the server in this process."""
        self._sender.close(drops_rest=self._error is not None)
        self.abort(reason)
        for connection in self._connections:
            connection.close(reason)
        if self._own is not None:
            self._own.close(reason)

    def _opened(self, endpoint: str | None) -> Connection:
        if endpoint is not None:
            return connections.connect(endpoint)
        assert self._own is not None
        near, far = inproc.pair("the server of this process")
        self._own.accept(far)
        return near

    def _part_length(self, dtype: torch.dtype, *, is_compressed: bool) -> int:
        size = _COMPRESSED_BYTES if is_compressed else min(self._options.partition_bytes, _WIRE_BYTES)
        return max(1, size // dtype.itemsize)

    def _push(
        self,
        tensors: Sequence[Tensor],
        places: Sequence[tuple[PartKey, slice]],
        urgency: int,
        turn: int,
        *,
        is_compressed: bool,
    ) -> None:
        """Queue the parts of tensors, whose values are there. places: of the parts in each tensor."""
        if self.rank == 0 or is_compressed:  # nothing is added before these, or the order is of no importance
            for other in tensors[1:]:
                tensors[0].add_(other)
            tensors = tensors[:1]
        for number, (key, place) in enumerate(places, start=turn):
            cut = [tensor[place] for tensor in tensors]
            outlet = self._outlets[self._turns[number % len(self._turns)]]
            part = Part(key, len(cut[0]), cut[0].dtype, cut, is_compressed, urgency)
            self._sender.put(outlet, urgency, functools.partial(self._frame_of, part, outlet.connection))

    def _push_after(self, filled: torch.Event, push: Callable[[], None]) -> None:
        """Call `push` in the thread that waits for a GPU, once the event has come and all earlier ones have."""
        with self._changed:
            self._filling.append((filled, push))
            if self._filling_thread is None:
                self._filling_thread = threading.Thread(target=self._push_filled, name="filled parts", daemon=True)
                self._filling_thread.start()
            self._changed.notify_all()

    def _push_filled(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._filling or self._error is not None)
                if self._error is not None:
                    self._filling.clear()
                    return
                filled, push = self._filling.popleft()
            try:
                gpu.wait_for(filled, lambda: None if self._error is None else str(self._error), timedelta.max)
                push()
            except Exception as error:  # of the GPU, or an abort meanwhile
                self._fail(error)

    def _frame_of(self, part: Part, connection: Connection) -> Frame:
        if part.is_compressed and self._feedback is not None:
            form = self._feedback.encode((part.key.name, part.key.part), part.tensors[0])
            part = part._replace(tensors=form)
        return part_frame(part, by_reference=connection.is_same_process())

    def _on_send_error(self, error: Exception) -> None:
        self.abort(f"{type(error).__name__}: {error}")

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == frames.CHANNEL_NOTE:
            self._fail(CollectiveMismatch(bytes(frame.body).decode()))
            return
        compression = self._options.compression
        part = part_of(frame, compression)
        with self._changed:
            if part.key not in self._under_way:
                return  # the generation is over
            pending, into = self._under_way.pop(part.key)
        if part.is_compressed and compression is not None:
            into.copy_(compression.decode(part.tensors, part.numel))
        else:
            into.copy_(part.tensors[0])
        with self._changed:
            pending.parts_left -= 1
            on_done = pending.on_done if pending.is_complete else None
            self._changed.notify_all()
        if on_done is not None:
            on_done(None)

    def _on_close(self, reason: str) -> None:
        self.abort(f"a server is gone: {reason}")

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            lost = {id(pending): pending for pending, _ in self._under_way.values()}
            self._under_way.clear()
            self._changed.notify_all()
        for pending in lost.values():
            if pending.on_done is not None:
                pending.on_done(self._error)
