"""A node between many readers and one server, which calls the server once per interval (Launchpad's CacherNode)."""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

from lp_pipe.handles import Handle
from lp_pipe.nodes.courier_node import CourierNode
from lp_pipe.rpc import CourierClient, codec, list_methods
from lp_pipe.rpc.daemon_pool import settle
from lp_pipe.rpc.served_methods import CACHE_INFO
from lp_pipe.rpc.stream_consumer import RemoteIterator


class CacherNode(CourierNode):
    """Answers calls of `handle`'s methods, from memory while a result is younger than `refresh_interval` seconds.

    Results are kept by method and arguments. The first call after a result has expired fetches it again; its age counts
    from the start of the call that fetched it. Callers that miss at the same time share one call to the server. Errors
    and streams are not kept, and each caller has a stream of its own.

    methods: names of the cached methods, the others are passed on; None: all are cached.

    `lp_pipe.cache_info(client)` counts hits and misses.

    Raises:
        ValueError: the interval is not positive.
        TypeError: `handle` is no handle, or `methods` is a text.
    """

    def __init__(
        self, handle: Handle[CourierClient], refresh_interval: float, methods: Collection[str] | None = None
    ) -> None:
        if refresh_interval <= 0:
            raise ValueError(f"CacherNode: refresh_interval must be above 0 seconds, got {refresh_interval}")
        if not isinstance(handle, Handle):
            raise TypeError(f"CacherNode: handle must be what add_node has returned, got {handle!r}")
        if isinstance(methods, str):
            raise TypeError(f"CacherNode: methods must be a list, [{methods!r}], got {methods!r}")
        names = None if methods is None else frozenset(methods)
        super().__init__(_Cacher, handle, refresh_interval, names)


class CacheInfo(NamedTuple):
    """Counters of a cache. hits: calls that needed no call to the server; misses: those that did."""

    hits: int
    misses: int


def cache_info(client: CourierClient) -> CacheInfo:
    """Return the counters of the CacherNode that this is a client of, without methods that it passes on.

    Raises:
        MethodNotFound: it is a client of another node.
    """
    return CacheInfo(*client._call(CACHE_INFO, (), {}))


class _CacheEntry(NamedTuple):
    result: "Future[Any]"
    expires: float

    def is_fresh(self, now: float) -> bool:
        if not self.result.done():
            return True  # callers that come now share the call
        is_kept = self.result.exception() is None and not isinstance(self.result.result(), RemoteIterator)
        return is_kept and now < self.expires


class _Cacher:
    """The object that the node serves: it answers any method by a Future, so that no thread waits for the server."""

    def __init__(self, client: CourierClient, refresh_interval_s: float, methods: frozenset[str] | None) -> None:
        self._client = client
        self._interval_s = refresh_interval_s
        self._methods = methods
        self._entries: dict[bytes, _CacheEntry] = {}
        self._next_sweep = 0.0
        self._hits = self._misses = 0
        self._lock = threading.Lock()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._get("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._get(name, args, kwargs)

    def __cache_info__(self) -> tuple[int, int]:
        with self._lock:
            return self._hits, self._misses

    def __dir__(self) -> list[str]:
        return list_methods(self._client)

    def _get(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Future[Any]":
        futures = self._client.futures
        call: Callable[..., Future[Any]] = futures if method == "__call__" else getattr(futures, method)
        if self._methods is not None and method not in self._methods:
            return call(*args, **kwargs)
        key = codec.fingerprint((method, args, sorted(kwargs.items())))
        now = time.monotonic()
        with self._lock:
            entry = self._entries.get(key)
            is_known = entry is not None and entry.result.done()
            if entry is None or not entry.is_fresh(now):
                self._sweep(now)
                entry = self._entries[key] = _CacheEntry(call(*args, **kwargs), now + self._interval_s)
                self._misses += 1
                return entry.result
            self._hits += 1
        # A known and fresh result is no stream.
        return entry.result if is_known else self._shared(entry.result, lambda: call(*args, **kwargs))

    def _shared(self, result: "Future[Any]", call: Callable[[], "Future[Any]"]) -> "Future[Any]":
        """Return the result that another caller waits for; for a stream, which only one can read, make another call."""
        reply: Future[Any] = Future()

        def outcome() -> Any:
            if not isinstance(found := result.result(), RemoteIterator):
                return found
            with self._lock:
                self._hits, self._misses = self._hits - 1, self._misses + 1
            return call()  # the server replies with the result of a future

        result.add_done_callback(lambda done: settle(reply, outcome))
        return reply

    def _sweep(self, now: float) -> None:
        """Drop expired results: arguments that are not used again must not fill the memory."""
        if now >= self._next_sweep:
            self._next_sweep = now + self._interval_s
            self._entries = {key: entry for key, entry in self._entries.items() if entry.is_fresh(now)}
