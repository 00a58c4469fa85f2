"""The hub of a stage worker's channels, from the start of its node to its end."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from lp_pipe.address import Address
from lp_pipe.channels import ChannelHub, kinds
from lp_pipe.connections import inproc, unix
from lp_pipe.context import context
from lp_pipe.launch.processes.socket_dir import make_socket_dir


def own_hub(kind: str, address: Address) -> ChannelHub:
    """Where this node receives on channels of that kind, found by others at the address."""
    node = context()
    usual = node.services.endpoint_for(address.id)
    hub = ChannelHub(node.exit_stack.enter_context(_endpoint(kind, usual)), node.name)
    node.exit_stack.callback(hub.close, f"{node.name} has ended")
    node.services.register(address.id, hub.endpoint)
    return hub


@contextmanager
def _endpoint(kind: str, usual: str) -> Iterator[str]:
    """For senders that ask for `kind`; `usual` is the launcher's choice.

    Between threads that is calls, by which no shared memory travels: "shm" gets a socket in a folder of its own, which
    goes after the body.
    """
    if kind != "shm" or not usual.startswith(inproc.SCHEME):
        yield usual if kind == "auto" else kinds.named(kind).hub_endpoint(usual)
        return
    folder = make_socket_dir()
    try:
        yield f"{unix.SCHEME}{folder}/channels"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
