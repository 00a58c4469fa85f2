"""The programs that this process has launched: which services answer for their addresses, and to which code."""

import contextvars
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lp_pipe.context import NodeContext, NodeServices, current_context
from lp_pipe.errors import Unavailable

# By address id: the services of a program that this process has launched, and the node (if any) that launched it.
_launched: dict[str, tuple[NodeServices, NodeContext | None]] = {}


def publish(address_ids: Iterable[str], services: NodeServices) -> None:
    """Let the calling code, the launcher, make clients of a program's servers."""
    for address_id in address_ids:
        _launched[address_id] = (services, current_context())


def replace_published(services: NodeServices, successor: NodeServices) -> None:
    """Make `successor` answer from now on for the addresses that `services` was published for."""
    for address_id, (published, launcher) in list(_launched.items()):
        if published is services:
            _launched[address_id] = (successor, launcher)


# The services of the run that is asked for a client right now: a program may run several times at once, under the same
# addresses.
_asked: contextvars.ContextVar[NodeServices | None] = contextvars.ContextVar("lp_pipe_asked", default=None)


@contextmanager
def asking(services: NodeServices) -> Iterator[None]:
    """Dereference handles in the body through `services`, whatever else was launched."""
    token = _asked.set(services)
    try:
        yield
    finally:
        _asked.reset(token)


def is_launcher_of(address_id: str) -> bool:
    """Return whether the calling code has launched the program of this address (and is not one of its nodes)."""
    if _asked.get() is not None:
        return True
    return address_id in _launched and _launched[address_id][1] is current_context()


def launcher_of(address_id: str) -> NodeContext | None:
    """Return the node that has launched the program of this address; None also when no node has."""
    return _launched[address_id][1] if address_id in _launched else None


def services_for(address_id: str) -> NodeServices | None:
    """Return the services that resolve this address for the calling thread, the launcher's or its node's.

    None before launch.
    """
    if is_launcher_of(address_id):
        return _asked.get() or _launched[address_id][0]
    node = current_context()
    return node.services if node is not None else None


def caused_by_first_failure(services: NodeServices | None, error: Unavailable, text: str) -> Unavailable:
    """Return the Unavailable with this text to raise from `error`; if the program has failed, it names the failure.

    For callers in the launcher, which else would have to ask `wait` for the failure.
    """
    failure = set_first_failure_as_cause(services, error)
    if failure is not None:
        cause = str(failure).partition("\n")[0]
        text = text if cause in text else f"{text}; the first failure of the program: {cause}"
    return Unavailable(text)


def set_first_failure_as_cause(services: NodeServices | None, error: Unavailable) -> Exception | None:
    """Return the failure that has ended the program, if any, and make it the error's cause."""
    failure = services.first_failure() if services is not None else None
    if failure is not None:
        error.__cause__ = failure
    return failure
