"""The workers that train together, as one of them sees them: their membership in this generation, their messages."""

import hashlib
import hmac
import io
import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lp_pipe.collectives.backend import Backend, Call
from lp_pipe.collectives.compression import Compression
from lp_pipe.collectives.group import Group
from lp_pipe.collectives.inproc import InprocBackend
from lp_pipe.collectives.meeting_facts import Facts
from lp_pipe.collectives.process_group import open_process_group
from lp_pipe.connections import run_endpoints
from lp_pipe.context import NodeContext
from lp_pipe.data_parallel.exchange import Exchange
from lp_pipe.errors import DataParallelError, NotSupported, Unauthenticated
from lp_pipe.membership import Membership
from lp_pipe.rpc import CourierClient

_BYTES = Call("replica's message")
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of `add_replicas`.

    least, most: the numbers of workers. compression, mirror_every: of servers with mode="async".
    number: of this worker in its group.
    """

    group: str
    replicas: int
    least: int
    most: int
    backend: str = "auto"
    seed: int = 0
    on_failure: str = "stop"
    mode: str = "sync"
    compression: Compression | None = None
    mirror_every: int = 1
    number: int = 0

    @property
    def is_async(self) -> bool:
        """Whether each gradient is applied as it comes."""
        return self.mode == "async"

    @property
    def may_change(self) -> bool:
        """Whether training goes on with other workers than it began with."""
        return self.on_failure != "stop" or self.least < self.most

    @property
    def never_meet(self) -> bool:
        """Whether workers do not wait for each other, so that one can be started again without the others."""
        return self.is_async and self.may_change


def hosted_replicas(rank: int, world_size: int, replicas: int) -> range:
    """Return the logical replicas of a worker: neighbouring ones, and at most one more than another worker has."""
    share, more = divmod(replicas, world_size)
    first = rank * share + min(rank, more)
    return range(first, first + share + (rank < more))


def mirror_distance(hosts: Sequence[str]) -> int:
    """Return how many ranks before it the worker is whose shards a worker mirrors: most are on another host.

    hosts: of all workers, by rank. So the loss of a host loses no shard with its mirror if hosts have equally many.
    """
    world = len(hosts)

    def on_one_host(distance: int) -> int:
        return sum(hosts[rank] == hosts[rank - distance] for rank in range(world))

    return min(range(1, world), key=on_one_host)


NEVER_MEET = (
    "workers with mode='async' and on_failure='restart' never meet, so that one can be started again without the "
    "others: use on_failure='stop', or mode='sync'"
)


def lone_group(options: ReplicaOptions) -> Group:
    """Return the group of workers that never meet, as one of them sees it; it has no collectives among them."""
    name = f"{options.group}/{options.number}"
    alone = Membership(options.group, 0, 0, (name,), (uuid.uuid4().bytes,))
    members = tuple(f"{options.group}/{number}" for number in range(options.most))
    return Group(Membership(options.group, 0, options.number, members, (b"",) * options.most), InprocBackend(alone))


class TrainingHasEnded(DataParallelError):
    """`train` has returned on all workers, this one's predecessor included: there is nothing left to do."""


class ReplicaWorkers:
    """The workers of a group. Used by one thread.

    meet: returns the group of the next generation, which has at least this number.
    servers: of the group; with mode="async" they hold the parameters.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        node: NodeContext,
        meet: Callable[[int], Group],
        servers: Sequence[CourierClient] = (),
    ) -> None:
        self.options = options
        self.servers = servers
        self.node = node
        self._meet = meet
        self._group: Group | None = None
        self._process_group: dist.ProcessGroup | None = None
        self._messages = 0  # of this generation
        self._mirrored_rank: int | None = None

    @property
    def has_met(self) -> bool:
        return self._group is not None

    @property
    def group(self) -> Group:
        """The group of this generation; the workers meet first, if they have not yet."""
        return self.meet() if self._group is None else self._group

    @property
    def backend(self) -> Backend:
        return self.group.backend

    @property
    def membership(self) -> Membership:
        return self.group.membership

    @property
    def replicas(self) -> range:
        """The logical replicas that this worker hosts."""
        return hosted_replicas(self.membership.rank, self.membership.world_size, self.options.replicas)

    @property
    def local_rank(self) -> int:
        """The number of this worker on its host."""
        if self.options.never_meet:
            raise NotSupported(f"replica.local_rank: {NEVER_MEET}")
        before = self.membership.endpoints[: self.membership.rank]
        return sum(not run_endpoints.is_other_host(Facts.from_bytes(endpoint).hub) for endpoint in before)

    @property
    def mirrored_rank(self) -> int | None:
        """The rank of the worker whose shards this one mirrors; None: there is no other one."""
        world, rank = self.membership.world_size, self.membership.rank
        if self._mirrored_rank is None and world > 1:
            hubs = [Facts.from_bytes(one).hub for one in self.membership.endpoints]
            hosts = [run_endpoints.host_name(hub) if hub.startswith(run_endpoints.HOSTS) else "" for hub in hubs]
            self._mirrored_rank = (rank - mirror_distance(hosts)) % world
        return self._mirrored_rank

    @property
    def exchange(self) -> Exchange:
        """How the replicas' parts are summed in this generation."""
        world = self.membership.world_size
        if self.options.is_async:
            return Exchange(None, [len(self.replicas)], 0)
        counts = [len(hosted_replicas(rank, world, self.options.replicas)) for rank in range(world)]
        backend = self.backend if world > 1 else None
        return Exchange(backend, counts, self.membership.rank, self.group.push_pull)

    def meet(self) -> Group:
        """Meet all live workers, under the next generation.

        Raises:
            TrainingHasEnded: the others have ended, which they do only once `train` has returned on all workers.
            DataParallelError: there are fewer workers than the program needs.
        """
        generation = 0
        if self._group is not None:
            generation = self._group.membership.generation + 1
            self.close()
        self._group = self._meet(generation)
        self._messages, self._mirrored_rank = 0, None
        membership = self._group.membership
        if self.options.may_change and membership.finished:
            raise TrainingHasEnded(f"{', '.join(membership.finished)} of group {self.options.group!r} have finished it")
        if membership.world_size < self.options.least:
            # Where workers may change, the program ends with the death that leaves too few (`least_nodes`).
            error = TrainingHasEnded if self.options.may_change else DataParallelError
            raise error(
                f"group {self.options.group!r} has {membership.world_size} workers left "
                f"({', '.join(membership.members)}), and needs {self.options.least}"
            )
        return self._group

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank."""
        world = self.membership.world_size
        own = _tensor_of(self._sealed(pickle.dumps(value), self.membership.rank))
        sizes = torch.zeros(world, dtype=torch.int64)
        self.backend.all_gather(sizes, torch.tensor([len(own)]), call=_BYTES)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        found = torch.zeros(world * longest, dtype=torch.uint8)
        self.backend.all_gather(found, padded, call=_BYTES)
        rows = found.view(world, longest)
        texts = [rows[rank, : int(size)].numpy().tobytes() for rank, size in enumerate(sizes)]
        values = [pickle.loads(self._opened(text, rank)) for rank, text in enumerate(texts)]
        self._messages += 1
        return values

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the root's value, which may hold tensors; other workers give None."""
        is_root = self.membership.rank == root
        buffer = io.BytesIO()
        if is_root:
            torch.save(value, buffer)
        data = _tensor_of(self._sealed(buffer.getvalue(), root))
        size = torch.tensor([len(data)])
        self.backend.broadcast(size, root, call=_BYTES)
        data = data if is_root else torch.zeros(int(size), dtype=torch.uint8)
        self.backend.broadcast(data, root, call=_BYTES)
        text = data.numpy().tobytes()
        # The root's GPU may be none of this worker's: load_state_dict copies to where its own tensors are.
        received = value if is_root else torch.load(io.BytesIO(self._opened(text, root)), "cpu", weights_only=False)
        self._messages += 1
        return received

    def process_group(self) -> dist.ProcessGroup:
        """Return torch's process group of this generation; make it if there is none.

        Raises:
            NotSupported: the workers are threads of one process, or never meet.
        """
        if self.options.never_meet:
            raise NotSupported(f"replica.process_group: {NEVER_MEET}")
        if self._process_group is None:
            if self.backend.world_size > 1 and isinstance(self.backend, InprocBackend):
                raise NotSupported(
                    "replica.process_group: torch.distributed has one rank in a process, and these are threads: "
                    "launch with mode='process'"
                )
            self._process_group = open_process_group(self.backend)
        return self._process_group

    def close(self) -> None:
        """Let go of the group and its process group."""
        if self._process_group is not None:
            self._process_group = None
            if dist.is_initialized():  # else the user's code has ended it
                dist.destroy_process_group()
        if self._group is not None:
            self._group.close()

    def _sealed(self, data: bytes, rank: int) -> bytes:
        """Return the message of a rank, with a digest that only the members can compute."""
        return self._digest(data, rank) + data

    def _opened(self, text: bytes, rank: int) -> bytes:
        """Return the message that `_sealed` took. It is unpickled, and gloo and NCCL take connections from anyone.

        Raises:
            Unauthenticated: it is not from that rank.
        """
        digest, data = text[:_DIGEST_BYTES], text[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(data, rank)):
            raise Unauthenticated(
                f"{self.node.name}: a message from {self.membership.members[rank]} was changed on its way, or another "
                "process has sent it: nothing of it was used"
            )
        return data

    def _digest(self, data: bytes, rank: int) -> bytes:
        """Return the message's digest; the key is what the members told the coordinator when they met."""
        if self.backend.is_authenticated:
            return bytes(_DIGEST_BYTES)
        key = hashlib.sha256(b"".join(self.membership.endpoints)).digest()
        place = f"{self.membership.generation} {self._messages} {rank} ".encode()
        return hmac.digest(key, place + data, "sha256")


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
