"""Ranks for tests: a thread for each, joined by a backend, without a program."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lp_pipe.channels.hub import ChannelHub
from lp_pipe.collectives.backend import Backend
from lp_pipe.collectives.direct import joined_by_channels
from lp_pipe.collectives.inproc import InprocBackend
from lp_pipe.collectives.ranks import RanksBackend, new_rendezvous
from lp_pipe.collectives.shm import OwnRankFile, ShmBackend, opened_rank_file
from lp_pipe.membership import Membership

EXACT = ("inproc", "shm", "direct")
WITHIN_S = 20.0


class Joined:
    """The ranks of one generation. A rank that fails ends the generation for the others."""

    def __init__(self, kind: str, count: int) -> None:
        members = tuple(f"ranks/{rank}" for rank in range(count))
        tokens = tuple(uuid.uuid4().bytes for _ in members)
        memberships = [Membership("ranks", 0, rank, members, tokens) for rank in range(count)]
        self.backends = _BACKENDS[kind](memberships)

    def start(self, function: Callable[..., Any]) -> "list[Future[Any]]":
        """Run function(backend) in a thread for each rank."""
        pool = ThreadPoolExecutor(len(self.backends))
        futures = [pool.submit(function, backend) for backend in self.backends]
        pool.shutdown(wait=False)
        return futures

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """Return the results of function(backend) of all ranks."""
        futures = self.start(function)
        for future in futures:
            future.add_done_callback(self._end_with)
        results = [future.exception(WITHIN_S) or future.result() for future in futures]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        for backend in self.backends:
            backend.close()

    def _end_with(self, done: "Future[Any]") -> None:
        if done.exception() is not None:
            for backend in self.backends:
                backend.abort(f"a rank has failed: {done.exception()!r}")


def _inproc(memberships: Sequence[Membership]) -> list[Backend]:
    return [InprocBackend(membership) for membership in memberships]


def _shm(memberships: Sequence[Membership]) -> list[Backend]:
    own = [OwnRankFile() for _ in memberships]
    return [
        ShmBackend(
            membership,
            [file if rank == membership.rank else opened_rank_file(file.announced) for rank, file in enumerate(own)],
        )
        for membership in memberships
    ]


def _direct(memberships: Sequence[Membership]) -> list[Backend]:
    hubs = [ChannelHub(f"inproc:{uuid.uuid4().hex}", name) for name in memberships[0].members]
    return [
        joined_by_channels(membership, hubs[membership.rank], [hub.endpoint for hub in hubs])
        for membership in memberships
    ]


def _gloo(memberships: Sequence[Membership]) -> list[Backend]:
    rendezvous = [new_rendezvous() for _ in memberships]
    with ThreadPoolExecutor(len(memberships)) as pool:
        return list(pool.map(lambda membership: RanksBackend(membership, rendezvous, "gloo"), memberships))


_BACKENDS: dict[str, Callable[[Sequence[Membership]], list[Backend]]] = {
    "inproc": _inproc,
    "shm": _shm,
    "direct": _direct,
    "gloo": _gloo,
}
