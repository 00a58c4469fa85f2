"""The private folder for the unix sockets of one run."""

import os
import tempfile

PREFIX = "lp-"
_MAX_TEMP_DIR_BYTES = 70  # + "/lp-xxxxxxxx/coordinator"; a unix socket's path has 107 bytes at most (103 on macOS)


def make_socket_dir() -> str:
    """Make a folder of mode 0700, so that only this user can connect to its sockets. The caller must remove it."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix=PREFIX, dir=usual if fits(usual) else "/tmp")


def fits(folder: str) -> bool:
    """Return whether paths of sockets in this temporary folder are short enough."""
    return len(os.fsencode(folder)) <= _MAX_TEMP_DIR_BYTES
