"""Where the servers of a program listen, and who waits for them."""

from collections.abc import Iterable
from concurrent.futures import Future

from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.settling import Settlement


class Directory:
    """Endpoints by address id. Not thread-safe: the coordinator holds its lock."""

    def __init__(self) -> None:
        self._endpoints: dict[str, str] = {}
        self._waiting: dict[str, list[Future[str]]] = {}

    def register(self, address: str, endpoint: str) -> list[Settlement]:
        self._endpoints[address] = endpoint
        return [Settlement(future, endpoint) for future in self._waiting.pop(address, [])]

    def withdraw(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._endpoints.pop(address, None)

    def find(self, address: str) -> str | None:
        """None: nobody listens there now."""
        return self._endpoints.get(address)

    def wait(self, address: str, future: "Future[str]") -> None:
        """To be settled by `register`, or by giving up."""
        self._waiting.setdefault(address, []).append(future)

    def give_up(self, addresses: Iterable[str], reason: str) -> list[Settlement]:
        """Nobody will listen there any more."""
        waiting = [future for address in addresses for future in self._waiting.pop(address, [])]
        return [Settlement(future, Unavailable(reason)) for future in waiting]

    def give_all_up(self, reason: str) -> list[Settlement]:
        return self.give_up(list(self._waiting), reason)
