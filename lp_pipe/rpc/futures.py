"""`client.futures.method()`: the same methods, each returning a Future at once."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from lp_pipe.rpc.calls import Reader
from lp_pipe.rpc.remote_method import RemoteMethod

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Callee(Protocol):
    """The part of a client that the view needs."""

    def _start(self, method: str, args: Args, kwargs: Kwargs, reader: Reader = "any") -> "Future[Any]": ...


class Futures:
    """The view behind `client.futures.method(...)` and `client.futures(...)`. reader: see `read_by`."""

    def __init__(self, client: Callee, reader: Reader = "any") -> None:
        self._client = client
        self._reader: Reader = reader

    def __call__(self, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return self._client._start("__call__", args, kwargs, self._reader)

    def __getattr__(self, name: str) -> Callable[..., "Future[Any]"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteMethod(self._start, name)

    def __repr__(self) -> str:
        return f"{self._client!r}.futures"

    def _start(self, name: str, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return self._client._start(name, args, kwargs, self._reader)


def read_by(reader: Reader, client: Any) -> Any:
    """Return `client.futures` for a caller that knows which thread will read the replies; finding out takes time.

    reader: "caller": the thread that starts the calls will ask for each of them soon, by `result` or `exception`.
        "thread": the replies take long, or callbacks wait for them, so a background thread reads from now on.
    """
    view = client.futures
    return Futures(view._client, reader) if isinstance(view, Futures) else view
