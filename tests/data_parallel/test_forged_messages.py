"""Over gloo and NCCL, which take connections from anyone, workers unpickle only what their group has sent."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from lp_pipe.collectives.backend import Backend
from lp_pipe.data_parallel.workers import ReplicaOptions, ReplicaWorkers
from lp_pipe.errors import Unauthenticated
from lp_pipe.membership import Membership

OPTIONS = ReplicaOptions("replicas", replicas=2, least=1, most=2)


class Wire:
    """What one rank sends, for the other to receive; an attacker may change it."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def backend(self, rank: int, is_authenticated: bool) -> Any:
        def broadcast(tensor: Tensor, root: int, call: object = None) -> None:
            if rank == root:
                self.sent.append(tensor.clone())
            else:
                tensor.copy_(self.sent.pop(0))

        return SimpleNamespace(is_authenticated=is_authenticated, broadcast=broadcast)


def worker(wire: Wire, rank: int, is_authenticated: bool = False, secret: bytes = b"secret") -> ReplicaWorkers:
    membership = Membership("replicas", 1, rank, ("replicas/0", "replicas/1"), (secret, b"public"))
    group = SimpleNamespace(membership=membership, backend=cast(Backend, wire.backend(rank, is_authenticated)))
    workers = ReplicaWorkers(
        OPTIONS, cast(Any, SimpleNamespace(name=f"replicas/{rank}", run_dir="")), lambda _: cast(Any, group)
    )
    return workers


@pytest.mark.parametrize("is_authenticated", [True, False])
def test_a_state_arrives(is_authenticated: bool) -> None:
    wire = Wire()
    sender, receiver = worker(wire, 0, is_authenticated), worker(wire, 1, is_authenticated)
    for value in ({"w": 1.5}, [2, 3]):
        sender.broadcast(value, 0)
        assert receiver.broadcast(None, 0) == value


def test_a_changed_message_is_not_unpickled() -> None:
    wire = Wire()
    sender, receiver = worker(wire, 0), worker(wire, 1)
    sender.broadcast({"w": 1.5}, 0)
    wire.sent[1][-40] ^= 1
    with pytest.raises(Unauthenticated, match="replicas/0"):
        receiver.broadcast(None, 0)


def test_neither_a_stranger_nor_an_old_message_is_believed() -> None:
    wire, strangers = Wire(), Wire()
    receiver = worker(wire, 1)
    worker(strangers, 0, secret=b"guessed").broadcast({"w": 6.0}, 0)
    wire.sent = [*strangers.sent]
    with pytest.raises(Unauthenticated, match="replicas/0"):
        receiver.broadcast(None, 0)
    sender = worker(wire, 0)
    sender.broadcast({"w": 1.5}, 0)
    old = list(wire.sent)
    assert receiver.broadcast(None, 0) == {"w": 1.5}
    wire.sent = old
    with pytest.raises(Unauthenticated, match="replicas/0"):
        receiver.broadcast(None, 0)
