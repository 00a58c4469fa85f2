"""The private folder in which one run's unix sockets are."""

import os
import tempfile

PREFIX = "lp-"
_MAX_TEMP_DIR_BYTES = 70  # + "/lp-xxxxxxxx/coordinator"; a unix socket's path has 107 bytes at most (103 on macOS)


def make_socket_dir() -> str:
    """A folder of mode 0700: only this user can connect to sockets inside. Who makes it removes it."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix=PREFIX, dir=usual if fits(usual) else "/tmp")


def fits(folder: str) -> bool:
    """Whether the paths of sockets below this temporary folder are short enough."""
    return len(os.fsencode(folder)) <= _MAX_TEMP_DIR_BYTES
