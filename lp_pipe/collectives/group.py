"""A group of nodes that has met: its members and their collective operations, on pytrees of tensors."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lp_pipe.channels.hub import ChannelHub
from lp_pipe.collectives.backend import Backend
from lp_pipe.collectives.direct import joined_by_channels
from lp_pipe.collectives.inproc import InprocBackend
from lp_pipe.collectives.meeting_facts import Facts, open_shared
from lp_pipe.collectives.push_pull import PushPull
from lp_pipe.collectives.ranks import RanksBackend, new_rendezvous
from lp_pipe.collectives.shm import is_shm_backend_supported
from lp_pipe.connections import inproc, run_endpoints
from lp_pipe.connections.routes import LOOPBACK
from lp_pipe.context import context
from lp_pipe.membership import Membership
from lp_pipe.private_torch import pytree
from lp_pipe.telemetry import waits

_RANKS = ("gloo", "nccl")
SHARING = ("auto", "inproc", "shm")  # backends that use the members' memory, "auto" if it can


class OwnEnd:
    """The file and the hub by which the other members can reach this node.

    Where members may be on several hosts, that is a hub, too: which backend fits is known only when all have met.
    """

    def __init__(self, backend: str) -> None:
        node = context()
        endpoint = node.services.new_endpoint()
        is_one_host = endpoint.startswith(inproc.SCHEME) or is_shm_backend_supported
        is_other = endpoint.startswith(run_endpoints.NAME) or not is_one_host
        needs_hub = backend == "direct" or (backend == "auto" and is_other)
        self.hub = ChannelHub(endpoint, node.name) if needs_hub else None
        reached_at = run_endpoints.endpoint_to_register(self.hub.endpoint) if self.hub else ""
        self.facts, self.file = Facts.own(reached_at, can_share=backend in SHARING)
        if backend in _RANKS:
            run = run_endpoints.split_name(endpoint)[0] if endpoint.startswith(run_endpoints.NAME) else ""
            host = run_endpoints.listen_address(run) or LOOPBACK
            self.facts = self.facts._replace(rendezvous=new_rendezvous(host))

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close("the group is joined in another way")


class ServerLinks(Protocol):
    """How a member of a group reaches the servers that sum for it."""

    def open_own(self) -> str:
        """Start this member's own server for the next generation; return where it listens, "" without one."""

    def connect(self, membership: Membership, own: Sequence[str]) -> PushPull | None:
        """Connect to all servers. own: where the members' own servers listen, in rank order.

        Raises:
            Unavailable: a server is gone for good, or the program stops.
        """


class Group:
    """The members of one generation, with the backend that joins them.

    Operations take and return pytrees of tensors; results are new tensors. `backend` has those on single tensors, and
    `barrier`, `agree` and `abort`. push_pull: the servers that sum for them; None: there are none.
    """

    def __init__(self, membership: Membership, backend: Backend, push_pull: PushPull | None = None) -> None:
        self.membership = membership
        self.backend = backend
        self.push_pull = push_pull
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._lock = threading.Lock()
        self._over = ""

    @classmethod
    def meet(cls, group: str, generation: int = 0, backend: str = "auto", links: ServerLinks | None = None) -> "Group":
        """Wait until all live nodes of this node's group have asked to meet; return the group.

        Its operations raise GenerationOver once a member has ended, or a node of the group asks to meet.

        generation: the least number of the new generation.
        backend: "inproc", "shm", "direct", "gloo" or "nccl"; "auto": the fastest exact one.
        links: to servers that sum for the members.

        Raises:
            Unavailable: the program stops, or a server is gone for good.
            ValueError: the backend does not exist, or cannot join these members.
        """
        if backend not in (*SHARING, "direct", *_RANKS):
            raise ValueError(f"backend must be one of {', '.join([*SHARING, 'direct', *_RANKS])}, got {backend!r}")
        node, own = context(), OwnEnd(backend)
        if links is not None:
            own.facts = own.facts._replace(server=links.open_own())
        with waits.waiting(waits.RANKS, waits.Target(peer="other nodes"), f"group {group!r}"):
            membership = node.services.meet(group, generation, own.facts.to_bytes()).result()
        found = cls(membership, open_backend(membership, backend, own))
        if links is not None:
            servers = [Facts.from_bytes(endpoint).server for endpoint in membership.endpoints]
            try:
                found.push_pull = links.connect(membership, servers)
            except BaseException:
                found.close()
                raise
        over = node.services.generation_over(group, membership.generation)
        over.add_done_callback(lambda over: found.abort(str(over.exception() or over.result())))
        node.exit_stack.callback(found.close)
        return found

    @property
    def rank(self) -> int:
        return self.membership.rank

    @property
    def generation(self) -> int:
        return self.membership.generation

    @property
    def world_size(self) -> int:
        return self.membership.world_size

    def all_reduce(self, tree: Any, op: str = "sum") -> Any:
        """Return the reduced tensors, in the structure of `tree`."""
        return self._on_buffers(tree, partial(self.backend.all_reduce, op=op))

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """Return the tensors of rank `root`."""
        return self._on_buffers(tree, partial(self.backend.broadcast, root=root))

    def all_gather(self, tree: Any) -> Any:
        """Return the tensors of all ranks, stacked in a new dimension 0."""
        return pytree.tree_map(self._gathered, tree)

    def reduce_scatter(self, tree: Any, op: str = "sum") -> Any:
        """Return part `rank` of the reduced tensors, which are cut in dimension 0."""
        return pytree.tree_map(partial(self._scattered, op=op), tree)

    def all_to_all(self, tree: Any) -> Any:
        """Return part `rank` of each rank's tensors, which are cut in dimension 0, in rank order."""
        return pytree.tree_map(self._exchanged, tree)

    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """Return the group of these ranks alone, which are in ascending order; its ranks begin at 0.

        Only its members call this. The first call may wait for the others. It ends with this group.

        Raises:
            GenerationOver: a member is gone.
            ValueError: there are too many subgroups.
        """
        found = self._subgroups.get(tuple(ranks))
        if found is None:
            backend = self.backend.subgroup(ranks)
            found = Group(backend.membership, backend)
            with self._lock:
                self._subgroups[tuple(ranks)] = found
            if self._over:
                found.backend.abort(self._over)
        return found

    def close(self) -> None:
        if self.push_pull is not None:
            self.push_pull.close()
        for group in (*self._subgroups.values(), self):
            group.backend.close()

    def abort(self, reason: str) -> None:
        """Make calls in progress and later ones raise GenerationOver, those of subgroups too. For any thread."""
        with self._lock:
            self._over = reason
            groups = (self, *self._subgroups.values())
        if self.push_pull is not None:
            self.push_pull.abort(reason)
        for group in groups:
            group.backend.abort(reason)

    def _on_buffers(self, tree: Any, operate: Callable[[Tensor], None]) -> Any:
        """Copy the tensors into one buffer for each dtype, on which `operate` works; return views of the buffers."""
        leaves, structure = pytree.tree_flatten(tree)
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, leaf in enumerate(leaves):
            by_kind.setdefault((leaf.dtype, leaf.device), []).append(index)
        for (dtype, device), indices in by_kind.items():
            buffer = self._empty(sum(leaves[index].numel() for index in indices), dtype, device)
            views = buffer.split([leaves[index].numel() for index in indices])
            for index, view in zip(indices, views, strict=True):
                shaped = view.view(leaves[index].shape)
                shaped.copy_(leaves[index].detach())
                leaves[index] = shaped
            operate(buffer)
        return pytree.tree_unflatten(leaves, structure)

    def _gathered(self, tensor: Tensor) -> Tensor:
        whole = self._empty(self.world_size * tensor.numel(), tensor.dtype, tensor.device)
        self.backend.all_gather(whole, tensor.detach().contiguous())
        return whole.view(self.world_size, *tensor.shape)

    def _scattered(self, tensor: Tensor, op: str) -> Tensor:
        shape = self._part_shape(tensor)
        part = self._empty(tensor.numel() // self.world_size, tensor.dtype, tensor.device)
        self.backend.reduce_scatter(part, tensor.detach().contiguous(), op)
        return part.view(shape)

    def _exchanged(self, tensor: Tensor) -> Tensor:
        self._part_shape(tensor)
        whole = self._empty(tensor.numel(), tensor.dtype, tensor.device)
        self.backend.all_to_all(whole, tensor.detach().contiguous())
        return whole.view(tensor.shape)

    def _part_shape(self, tensor: Tensor) -> tuple[int, ...]:
        if not tensor.dim() or tensor.shape[0] % self.world_size:
            raise ValueError(
                f"dimension 0 must have {self.world_size} equal parts, one for each rank, got shape "
                f"{list(tensor.shape)}"
            )
        return tensor.shape[0] // self.world_size, *tensor.shape[1:]

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        on_host = device.type == "cpu"
        return self.backend.empty(numel, dtype) if on_host else torch.empty(numel, dtype=dtype, device=device)


def open_backend(membership: Membership, name: str, own: OwnEnd) -> Backend:
    """Open the backend of this name for these members.

    Raises:
        ValueError: it cannot join them.
        GenerationOver: a member is gone.
    """
    if name in _RANKS:
        members = [Facts.from_bytes(endpoint) for endpoint in membership.endpoints]
        return RanksBackend(membership, [member.rendezvous for member in members], name)
    shared = open_shared(membership, own.file) if name in SHARING else None
    if shared is not None and (name != "inproc" or isinstance(shared, InprocBackend)):
        own.close()
        return shared
    if own.hub is None:
        need = {"inproc": "threads of one process", "shm": "processes of one x86 host with Linux"}
        raise ValueError(
            f"backend {name!r} joins {need.get(name, 'threads or processes, not both')}, not "
            f"{', '.join(membership.members)}: use backend='direct'"
        )
    return joined_by_channels(membership, own.hub, [Facts.from_bytes(one).hub for one in membership.endpoints])
