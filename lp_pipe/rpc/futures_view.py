"""`client.futures.method()`: the same methods, each returning a Future at once."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Callee(Protocol):
    """What the view needs of a client."""

    def _start(self, method: str, args: Args, kwargs: Kwargs) -> "Future[Any]": ...


class Futures:
    """`client.futures.method(...)`, `client.futures(...)`."""

    def __init__(self, client: Callee) -> None:
        self._client = client

    def __call__(self, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return self._client._start("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., "Future[Any]"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._client._start(name, args, kwargs)
