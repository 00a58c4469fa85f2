"""A warning for the exception of a call that was started with `client.futures`, if nothing has asked for it.

It corresponds to asyncio's "exception was never retrieved": without it the failure is silent, and the program ends with
status 0.
"""

import atexit
import contextlib
import logging
import weakref
from collections import Counter

from lp_pipe.context import current_context
from lp_pipe.errors import Unavailable
from lp_pipe.rpc.remote_error import text_of

_log = logging.getLogger(__name__)

_MOST_OF_A_METHOD = 3

_shown: Counter[tuple[str, str]] = Counter()
_unread: "weakref.WeakSet[UnreadError]" = weakref.WeakSet()


class UnreadError:
    """The error of a failed future; warns when the future is freed or the process ends, unless `read` was called."""

    def __init__(self, peer: str, method: str, error: BaseException) -> None:
        self._peer = peer
        self._method = method
        self._text = f"{type(error).__name__}: {text_of(error)}"
        self._is_read = False
        self._may_be_of_a_stop = isinstance(error, Unavailable)
        _unread.add(self)

    def read(self) -> None:
        """Note that the exception was asked for."""
        self._is_read = True

    def warn(self) -> None:
        """Write the warning, unless the exception was read, or only says that the program stops."""
        is_read, self._is_read = self._is_read, True
        node = current_context()
        if is_read or (self._may_be_of_a_stop and (node is None or node.is_stopping)):
            return
        _shown[self._peer, self._method] += 1
        shown = _shown[self._peer, self._method]
        if shown > _MOST_OF_A_METHOD:
            return
        last = "; further ones of this method are not shown" if shown == _MOST_OF_A_METHOD else ""
        _log.warning(
            "%s.%s() has failed, and its exception was never retrieved: keep what client.futures.%s(...) returns, and "
            "ask for its result(), its exception() or a callback%s: %s",
            *(self._peer, self._method, self._method, last, self._text),
        )

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.warn()


@atexit.register
def _warn_of_all() -> None:
    for one in list(_unread):
        one.warn()
