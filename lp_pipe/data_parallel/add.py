"""Add replicas to a program: a node for each worker, in which the user's training function runs."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lp_pipe.address import Address
from lp_pipe.collectives.compression import Compression
from lp_pipe.collectives.group import Group
from lp_pipe.context import context
from lp_pipe.data_parallel.batch_norm import worker_of_node
from lp_pipe.data_parallel.replica import Replica
from lp_pipe.data_parallel.servers import AsyncServer, GradientServer, Servers, WorkersLinks, finish_servers
from lp_pipe.data_parallel.step_times import SlowReplica
from lp_pipe.data_parallel.workers import ReplicaOptions, ReplicaWorkers, TrainingHasEnded, lone_group
from lp_pipe.errors import DataParallelError, NotSupported, Unavailable
from lp_pipe.handles import CourierHandle, Handle, check_arguments
from lp_pipe.membership import Membership
from lp_pipe.nodes import CourierNode, user_code
from lp_pipe.program import Program
from lp_pipe.resources import Resources
from lp_pipe.rpc import CourierClient
from lp_pipe.torch_version import refuse_too_old
from lp_pipe.training.memory_advice import ADVICE_FOR_REPLICAS, advised

T = TypeVar("T")
_log = logging.getLogger(__name__)
BACKENDS = ("auto", "inproc", "shm", "direct", "gloo", "nccl")


def add_replicas(
    program: Program,
    train: Callable[..., Any],
    /,
    *args: Any,
    replicas: int,
    workers: int | str | None = None,
    backend: str | Servers = "auto",
    mode: str = "sync",
    seed: int = 0,
    on_failure: str = "stop",
    max_restarts: int = 3,
    mirror_every: int = 1,
    group: str = "replicas",
    resources: Resources | None = None,
    **kwargs: Any,
) -> "ReplicasHandle":
    """Add workers that run `train(replica, *args, **kwargs)`, and return the handle of their common training.

    replicas: the logical replicas, which decide what is learnt: a batch is cut into so many parts.
    workers: the number of processes, at most `replicas`, which does not change what is learnt; default: `replicas`.
        "2:8": from 2 to 8, started with as many as have room, at most 8. On several hosts, a host that joins later gets
        the workers that are missing.
    backend: how sums travel: "inproc" (threads), "shm" (one host), "direct" (any hosts), "gloo" and "nccl" (which do
        not sum in the order of the replicas); "auto": the fastest exact one. dp.Servers(...): by nodes that sum.
    seed: of the random numbers in shards.
    on_failure: what the death of a worker means. "stop": the program ends. "restart": the others wait for its
        successor, which gets their state. "shrink": the others go on without it, with its replicas.
    max_restarts: of each worker, with "restart".
    mode: "async": each worker's gradient is applied once, as it comes, by the servers, which hold the parameters. The
        result then depends on timing.
    mirror_every: with mode="async" and "restart": after how many gradients a server copies its state to the next one.
        With zero=1 where workers may change: 1: mirrors of shards are updated in every step, and no step is lost.
            Above: shards are copied after so many steps; all go back there when workers change. Steps send less then,
            and copies need more memory.
    group, resources: label and Resources of the workers' nodes.

    Raises:
        DataParallelError: an option is wrong.
        NotSupported: mode="async" where the number of workers may change.
        TypeError: `train` does not take the arguments.
    """
    refuse_too_old(torch.__version__)
    if not isinstance(program, Program):
        raise TypeError(f"add_replicas takes an lp.Program first, not {type(program).__name__}")
    check_arguments("add_replicas", train, (None, *args), kwargs)
    _check_count("replicas", replicas)
    _check_count("mirror_every", mirror_every)
    _check_mode(mode, backend)
    if on_failure not in ("stop", "restart", "shrink"):
        raise DataParallelError(f"on_failure must be 'stop', 'restart' or 'shrink', got {on_failure!r}")
    if not isinstance(seed, int):
        raise DataParallelError(f"seed must be a whole number, got {seed!r}")
    least, most = _worker_counts(workers, replicas, on_failure)
    servers = backend if isinstance(backend, Servers) else None
    between_workers = "auto" if isinstance(backend, Servers) else backend
    options = ReplicaOptions(group, replicas, least, most, between_workers, seed, on_failure, mode)
    options = replace(options, mirror_every=mirror_every)
    if options.is_async:
        compression = servers.compression if servers is not None else None
        options = replace(options, compression=compression)
        _check_async_failure(options)
    handles: list[CourierHandle] = []
    addresses: list[Address] = []  # of the workers, which are made after the servers
    if servers is not None and servers.count:
        has_copies = not options.is_async or servers.count > 1  # of the servers' states
        restarts = "restart" if options.may_change and has_copies else "stop"
        server_group = program.group(f"{group}-servers", servers.resources, restarts, max_restarts)
        with server_group:
            kind = AsyncServer if options.is_async else GradientServer
            handles = [program.add_node(CourierNode(kind, addresses)) for _ in range(servers.count)]
    nodes = [
        CourierNode(ReplicaWorker, replace(options, number=number), (servers, handles), train, *args, **kwargs)
        for number in range(most)
    ]
    addresses += [address for node in nodes for address in node.addresses]
    with program.group(
        group,
        resources=resources,
        on_failure="ignore" if on_failure == "shrink" else on_failure,
        max_restarts=max_restarts,
        least_nodes=0 if on_failure == "stop" else least,
        least_started=least if least < most else 0,
    ):
        return ReplicasHandle([program.add_node(node) for node in nodes])


class ReplicaWorker:
    """A worker: runs `train`, and answers the clients of the handle between two steps."""

    def __init__(
        self,
        options: ReplicaOptions,
        servers: tuple[Servers | None, Sequence[CourierClient]],
        train: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        asked, clients = servers
        sums = asked is not None and not options.is_async
        links = WorkersLinks(asked, clients, context(), options.least) if asked is not None and sums else None

        def meet(generation: int) -> Group:
            if options.never_meet:
                return lone_group(options)
            return Group.meet(options.group, generation, options.backend, links)

        self._workers = ReplicaWorkers(options, context(), meet, clients)
        self._replica = Replica(self._workers)
        self._train = train
        self._args, self._kwargs = args, kwargs

    def run(self) -> None:
        steps = self._replica.own_steps
        worker_of_node[self._workers.node] = self._replica
        try:
            if not self._workers.options.may_change:
                self._workers.meet()
            args, kwargs = self._args, self._kwargs
            self._args, self._kwargs = (), {}
            with advised(ADVICE_FOR_REPLICAS):
                user_code.call(self._train, self._replica, *args, **kwargs)
            steps.leave()
            if not self._workers.options.never_meet:  # else servers end once all workers have told them
                finish_servers(self._workers.servers)
        except TrainingHasEnded as error:
            _log.info("%s ends, because training has ended: %s", self._workers.node.name, error)
            steps.leave_servers()
        finally:
            del worker_of_node[self._workers.node]
            steps.close()

    def current_step(self) -> int:
        """Return the number of finished steps."""
        steps = self._replica.own_steps
        return steps.ask(lambda: steps.state.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all that `replica.steps` was given, by its name there."""
        return self._replica.own_steps.ask_for_state(self._replica.own_steps.state.state_dict)

    def fingerprint(self) -> str:
        """Return the sha256 of all parameters and buffers."""
        steps = self._replica.own_steps
        has_all = all(one.sharded_model is None for one in steps.state.optimizers)
        return steps.ask(self._fingerprint) if has_all else steps.ask_for_state(self._fingerprint)

    def membership(self) -> Membership:
        """Return the workers of this generation."""
        return self._replica.own_steps.ask(lambda: self._workers.membership)

    def stragglers(self) -> list[SlowReplica]:
        """Return the workers that compute much slower than the others, or than at first; rank 0 knows them."""
        return self._replica.own_steps.ask(lambda: self._replica.own_steps.times.stragglers)

    def _fingerprint(self) -> str:
        optimizers = self._replica.own_steps.state.optimizers
        if any(one.sharded_model is not None and not one.sharded_model.is_gathered for one in optimizers):
            raise NotSupported("fingerprint() of a sharded model before its first step: ask again later")
        digest = hashlib.sha256()
        for model in self._replica.own_steps.state.models:
            for value in model.state_dict().values():
                if isinstance(value, Tensor):
                    digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class ReplicasClient:
    """A client of replicas; the worker of the lowest rank answers, between two steps. Picklable."""

    def __init__(self, workers: Sequence[CourierClient]) -> None:
        self._workers = cast(list[ReplicaWorker], list(workers))  # for mypy: each call is one of that class

    def current_step(self) -> int:
        """Return the number of finished steps."""
        return self._first(lambda worker: worker.current_step())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all that `replica.steps` was given, by its name there."""
        return self._first(lambda worker: worker.state_dict())

    def fingerprint(self) -> str:
        """Return the sha256 of all parameters and buffers."""
        return self._first(lambda worker: worker.fingerprint())

    def membership(self) -> Membership:
        """Return the workers: `.world_size`, `.members`, `.generation`."""
        return self._first(lambda worker: worker.membership())

    def stragglers(self) -> list[SlowReplica]:
        """Return the workers that compute much slower than the others, or than at first."""
        return self._first(lambda worker: worker.stragglers())

    def _first(self, question: Callable[[ReplicaWorker], T]) -> T:
        for worker in self._workers[:-1]:
            try:
                return question(worker)
            except Unavailable:
                continue
        return question(self._workers[-1])


class ReplicasHandle(Handle[ReplicasClient]):
    """A handle to pass to nodes that look at the training; they get a ReplicasClient."""

    def __init__(self, workers: Sequence[CourierHandle]) -> None:
        super().__init__()
        self._workers = list(workers)
        self.node_name = workers[0].node_name

    @property
    def addresses(self) -> list[Address]:
        return [address for worker in self._workers for address in worker.addresses]

    def dereference(self) -> ReplicasClient:
        found: list[CourierClient] = []
        for worker in self._workers:
            try:
                found.append(worker.dereference())
            except Unavailable:  # this one is gone; others may be left
                if worker is self._workers[-1] and not found:
                    raise
        return ReplicasClient(found)


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataParallelError(f"{name} must be a whole number of at least 1, got {name}={count!r}")


def _check_mode(mode: str, backend: Any) -> None:
    if mode not in ("sync", "async"):
        raise DataParallelError(f"mode must be 'sync' or 'async', got {mode!r}")
    if isinstance(backend, Servers):
        _check_servers(backend)
        if mode == "async" and not backend.count:
            raise DataParallelError("mode='async' needs servers that hold the parameters: dp.Servers(count) from 1 on")
        return
    if mode == "async":
        raise DataParallelError("mode='async' needs servers: backend=dp.Servers(...)")
    if backend not in BACKENDS:
        raise DataParallelError(f"backend must be one of {', '.join(BACKENDS)}, or dp.Servers(...), got {backend!r}")


def _check_async_failure(options: ReplicaOptions) -> None:
    if options.on_failure == "shrink" or options.least < options.most:
        raise NotSupported(
            f"mode='async' with on_failure={options.on_failure!r} and {options.least} to {options.most} workers: a "
            "dead worker leaves steps that the others, whose loops may be further, cannot go back to; use "
            "on_failure='restart' and a fixed number of workers"
        )


def _check_servers(servers: Servers) -> None:
    count, size = servers.count, servers.partition_bytes
    if not isinstance(count, int) or isinstance(count, bool) or count < (0 if servers.colocated else 1):
        least = "0 with colocated=True, or 1" if not servers.colocated else "0"
        raise DataParallelError(f"dp.Servers(count) must be a whole number of at least {least}, got {count!r}")
    if not isinstance(size, int) or size < 1:
        raise DataParallelError(f"dp.Servers(partition_bytes=…) must be a whole number of at least 1, got {size!r}")
    if servers.compression is not None and not isinstance(servers.compression, Compression):
        raise DataParallelError(
            f"dp.Servers(compression=…) must be dp.TopK(ratio), dp.OneBit(), dp.Fp16() or None, got "
            f"{servers.compression!r}"
        )


def _worker_counts(workers: Any, replicas: int, on_failure: str) -> tuple[int, int]:
    """Return the least and the largest number of workers."""
    if isinstance(workers, str):
        first, _, last = workers.partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            raise DataParallelError(f"workers must be a number or 'MIN:MAX', such as '2:8', got {workers!r}")
        least, most = int(first), int(last)
    else:
        most = replicas if workers is None else workers
        _check_count("workers", most)
        least = 1 if on_failure == "shrink" else most
    if not 1 <= least <= most <= replicas:
        raise DataParallelError(
            f"workers={workers!r} with replicas={replicas}: each worker hosts at least one replica, so give numbers "
            f"from 1 to {replicas}"
        )
    return least, most
