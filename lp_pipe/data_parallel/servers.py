"""The servers of replicas: what `backend=dp.Servers(...)` asks for, their node, and the way to them."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from lp_pipe.address import Address
from lp_pipe.collectives.compression import Compression
from lp_pipe.collectives.push_pull import PushPull, PushPullOptions, server_shares
from lp_pipe.collectives.sum_server import SumServer
from lp_pipe.context import NodeContext, context, register_stop_handler, stop_event
from lp_pipe.data_parallel.parameter_store import ParameterStore
from lp_pipe.data_parallel.workers import TrainingHasEnded
from lp_pipe.errors import Unavailable
from lp_pipe.membership import Membership
from lp_pipe.resources import Resources
from lp_pipe.rpc import CourierClient

_TRIES = 20
_PAUSE_S = 0.1
_LOOK_S = 1.0  # between two looks at the workers


@dataclass(frozen=True)
class Servers:
    """Servers that workers push gradients to and pull sums from (BytePS's architecture).

    count: nodes in the group GROUP-servers.
    colocated: the workers are servers, too, with the share of the parts that makes all links equally busy.
    partition_bytes: the size of a part, which goes to one server.
    priority: front layers' parts go first, and the next forward waits layer by layer.
    compression: dp.TopK(ratio), dp.OneBit() or dp.Fp16(), both ways. The result is then not that of the plain loop.
    resources: of the servers' nodes.

    Source: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training" (OSDI 2020), section 4.
    """

    count: int
    colocated: bool = True
    partition_bytes: int = 1 << 18
    priority: bool = True
    compression: Compression | None = None
    resources: Resources | None = None

    @property
    def push_pull_options(self) -> PushPullOptions:
        return PushPullOptions(self.partition_bytes, self.priority, self.compression)


class WorkersServer:
    """A node that serves until the workers have ended.

    workers: where they listen.
    """

    def __init__(self, workers: Sequence[Address]) -> None:
        self._workers = workers
        self._node = context()
        self._done = threading.Event()
        self._why_done = "the program stops"

    def run(self) -> None:
        register_stop_handler(self._done.set)
        # The workers tell a server that they have ended; one that was killed since is started again, and not told.
        may_be_late = bool(self._node.previous_end)
        while not self._done.wait(_LOOK_S if may_be_late else None):
            if not any(map(self._may_live, self._workers)):
                self.finish()

    def _may_live(self, worker: Address) -> bool:
        """Return whether a worker has not ended, or will be started again."""
        try:
            self._node.services.resolve(worker.id).result(_LOOK_S)
        except Unavailable:
            return False
        except TimeoutError:  # it is being started again
            return True
        return True

    def finish(self) -> None:
        """End this server, because `train` has returned on all workers."""
        self._why_done = "the training has ended"
        self._done.set()


class GradientServer(WorkersServer):
    """The node of a server that sums."""

    def __init__(self, workers: Sequence[Address]) -> None:
        super().__init__(workers)
        self._server = SumServer(self._node.services.new_endpoint(), self._node.name)

    def run(self) -> None:
        super().run()
        self._server.close(self._why_done)

    def endpoint(self) -> str:
        """Return where workers connect to push."""
        return self._server.endpoint


class AsyncServer(WorkersServer, ParameterStore):
    """The node of a server with mode="async", which holds a shard of the parameters and their optimizer."""

    def __init__(self, workers: Sequence[Address]) -> None:
        WorkersServer.__init__(self, workers)
        ParameterStore.__init__(self, self.finish)


def finish_servers(clients: Sequence[CourierClient]) -> None:
    """Tell the servers that `train` has returned on all workers."""
    for client in cast(list[WorkersServer], list(clients)):
        with contextlib.suppress(Unavailable):  # another worker has told it
            client.finish()


class WorkersLinks:
    """A worker's way to the servers of its group (`ServerLinks`).

    least: the number of workers below which training has ended.
    """

    def __init__(self, servers: Servers, clients: Sequence[CourierClient], node: NodeContext, least: int) -> None:
        self._options = servers
        self._clients = cast(list[GradientServer], list(clients))  # for mypy: each call is one of that class
        self._node = node
        self._least = least
        self._own: SumServer | None = None

    def open_own(self) -> str:
        if self._own is not None:
            self._own.close("its worker meets the others again")
        if self._options.colocated:
            self._own = SumServer(self._node.services.new_endpoint(), self._node.name)
        return "" if self._own is None else self._own.endpoint

    def connect(self, membership: Membership, own: Sequence[str]) -> PushPull | None:
        workers = membership.world_size
        if workers == 1 or workers < self._least:
            return None
        count, options = self._options.count, self._options.push_pull_options
        far, near = server_shares(workers, count, is_colocated=self._options.colocated)
        beside = [None if rank == membership.rank else endpoint for rank, endpoint in enumerate(own)] if near else []
        shares = [far] * count + [near] * len(beside)
        for number in range(_TRIES):
            try:
                endpoints = [client.endpoint() for client in self._clients]
                return PushPull(membership, [*endpoints, *beside], shares, options, self._own)
            except Unavailable as error:  # a server that is being restarted, or a worker that has died
                if stop_event().wait(_PAUSE_S):
                    raise
                if number == _TRIES - 1:
                    raise TrainingHasEnded(f"{self._node.name} cannot reach the servers: {error}") from error
        raise AssertionError("the last try has returned or raised")
