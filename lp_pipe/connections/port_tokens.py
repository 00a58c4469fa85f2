"""The tokens of plain gRPC servers outside a program: files that only this user can read, found by the port.

A client that knows "host:port" reads the token there. Other users of the host can connect to the port, but do not know
the token. A server that is killed leaves its file; the next one at this port replaces it.
"""

import contextlib
import os
import secrets
import socket
from pathlib import Path

from lp_pipe.errors import LaunchError
from lp_pipe.user_folders import make_private, state_folder


def new_token() -> str:
    return secrets.token_hex(32)


def publish(port: int, token: str) -> None:
    """Let processes of this user on this host find the token of the server at `port`.

    Raises:
        OSError: the file cannot be written.
        LaunchError: there is no folder for it.
    """
    path = _path(port)
    make_private(path.parent)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)


def withdraw(port: int, token: str) -> None:
    """Remove what `publish` has written, unless another server has replaced it."""
    if find(port) == token:
        _path(port).unlink(missing_ok=True)


def find(port: int) -> str:
    """Return the token that was published for `port`; "" if there is none."""
    with contextlib.suppress(OSError, LaunchError):
        return _path(port).read_text()
    return ""


def _path(port: int) -> Path:
    """Return the file's path, which names the host: hosts may share the user's home folder."""
    return state_folder() / "servers" / f"{socket.gethostname()}-{port}"
