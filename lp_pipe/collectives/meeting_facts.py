"""The facts that members of a group tell each other when they meet, and the backend that joins them by memory."""

import json
import os
import uuid
from typing import NamedTuple

from lp_pipe.collectives.backend import Backend, GenerationOver
from lp_pipe.collectives.inproc import InprocBackend
from lp_pipe.collectives.shm import OwnRankFile, RankFile, ShmBackend, is_shm_backend_supported, opened_rank_file
from lp_pipe.connections import run_endpoints
from lp_pipe.membership import Membership


class Facts(NamedTuple):
    """The facts that each member tells the others.

    token: differs at each meeting. file: how to open its RankFile; "": it has none. hub: where it receives channels;
        "": nowhere. can_share: whether it may be joined by memory. rendezvous: where torch's ranks meet if this is
        rank 0. server: where its SumServer listens; "": it has none.
    """

    pid: int
    token: str
    file: str
    hub: str
    can_share: bool
    rendezvous: str = ""
    server: str = ""

    @classmethod
    def own(cls, hub: str, *, can_share: bool) -> "tuple[Facts, OwnRankFile | None]":
        """Return the facts of this node, and the file that they name."""
        file = OwnRankFile() if can_share and is_shm_backend_supported else None
        return cls(os.getpid(), uuid.uuid4().hex, file.announced.decode() if file else "", hub, can_share), file

    def to_bytes(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Facts":
        return cls(*json.loads(data))


def open_shared(membership: Membership, file: OwnRankFile | None) -> Backend | None:
    """Return the backend that joins the members by their memory; None if they are on several hosts, or must not share.

    All members come to the same result.

    Raises:
        GenerationOver: a member is gone.
    """
    members = [Facts.from_bytes(endpoint) for endpoint in membership.endpoints]
    if not all(member.can_share and not run_endpoints.is_other_host(member.hub) for member in members):
        return None
    if len({member.pid for member in members}) == 1:
        return InprocBackend(membership)
    if file is None or not all(member.file for member in members):
        return None
    files: list[RankFile] = []
    for rank, member in enumerate(members):
        try:
            files.append(file if rank == membership.rank else opened_rank_file(member.file.encode()))
        except OSError as error:
            raise GenerationOver(f"{membership.members[rank]} has ended") from error
    return ShmBackend(membership, files)
