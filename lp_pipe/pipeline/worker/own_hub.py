"""Where the hub of a stage worker's channels listens."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from lp_pipe.channels import kinds
from lp_pipe.connections import inproc, unix
from lp_pipe.launch.processes.socket_dir import make_socket_dir


@contextmanager
def hub_endpoint(kind: str, usual: str) -> Iterator[str]:
    """An endpoint for senders that ask for `kind`; `usual` is the launcher's choice.

    Between threads that is calls, by which no shared memory travels: "shm" gets a socket in a folder of its own, which
    goes after the body.
    """
    if kind != "shm" or not usual.startswith(inproc.SCHEME):
        yield kinds.hub_endpoint(kind, usual)
        return
    folder = make_socket_dir()
    try:
        yield f"{unix.SCHEME}{folder}/channels"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
