"""A program on several hosts that works while it is attacked, and must end with its right result."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil

import lp_pipe as lp
from lp_pipe.connections.credentials import Credentials
from lp_pipe.launch.engines import Invitation, LocalEngine, StartedAgent
from tests.launch import strangers
from tests.waiting import until


class Account:
    def __init__(self) -> None:
        self.total = 0
        self._is_closed = False

    def pay(self, amount: int) -> int:
        if not self._is_closed:
            self.total += amount
        return self.total

    def ask(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def close(self) -> None:
        self._is_closed = True

    def is_closed(self) -> bool:
        return self._is_closed


class Payer:
    """Pays 1, 2, 3, … into two accounts on two hosts, all the time."""

    def __init__(self, accounts: list[Any]) -> None:
        self._accounts = accounts

    def run(self) -> None:
        first, second = self._accounts
        amount = 0
        while not second.is_closed():
            amount += 1
            assert first.pay(amount) == amount * (amount + 1) // 2
            time.sleep(0.002)
        print("paid", amount, first.pay(0), flush=True)


def bank() -> lp.Program:
    program = lp.Program("bank")
    with program.group("account"):
        accounts = [program.add_node(lp.CourierNode(Account)) for _ in range(2)]
    program.add_node(lp.PyClassNode(Payer, accounts), label="payer")
    return program


def lone_account() -> lp.Program:
    program = lp.Program("lone")
    program.add_node(lp.CourierNode(Account), label="account")
    return program


class Confiding(LocalEngine):
    """Tells the test what only agents should know."""

    ours: Credentials
    launcher_port: int

    def start(self, invitation: Invitation) -> list[StartedAgent]:
        self.ours = Credentials.from_bytes(invitation.secret)
        self.launcher_port = int(invitation.addresses[0].rpartition(":")[2])
        self.attack()
        return list(super().start(invitation))

    def attack(self) -> None:
        """Attack the port while the launcher waits for its agents."""


class Target:
    """The program under attack. ports_before: of this process, where gloo's stay open a while after a channel's end."""

    def __init__(self, run: lp.Run, engine: Confiding, ports_before: set[int]) -> None:
        self.ports_before = ports_before
        self.run = run
        self.ours = engine.ours
        self.engine = engine
        self.clients = [run.client("account", index) for index in range(2)]
        self.pids = [client.ask(os.getpid) for client in self.clients]
        self.ports = strangers.ports_of(self.pids)
        self.processes = [os.getpid(), *(one.pid for one in psutil.Process().children(recursive=True))]

    def answer_s(self) -> float:
        """Return how long both take to give their usual answers."""
        began = time.monotonic()
        assert [client.ask(os.getpid) for client in self.clients] == self.pids
        return time.monotonic() - began

    def log(self, label: str, index: int = 0) -> str:
        path = self.run.log_path(label, index)
        return path.read_text() if path is not None and path.exists() else ""

    def paid(self) -> int:
        return int(self.clients[0].pay(0))


@contextlib.contextmanager
def under_attack(engine: Confiding, transport: str = "auto") -> Iterator[Target]:
    """The program runs; at the end it must have its right result, and have failed in nothing."""
    ports_before = set(strangers.ports_of([os.getpid()]))
    with lp.launch(bank(), "multi_host", engine=engine, grace=3.0, transport=transport) as run:
        target = Target(run, engine, ports_before)
        yield target
        target.clients[1].close()
        until(lambda: run.status()["payer"][0]["state"] == "finished")
    _, amount, total = target.log("payer").splitlines()[-1].split()
    assert int(total) == int(amount) * (int(amount) + 1) // 2 and int(amount) > 0
