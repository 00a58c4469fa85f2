"""The file that holds a run's secret: read only if nobody else may read it."""

import os
import stat

from lp_pipe.cli.errors import UsageError

MAX_SECRET_BYTES = 1 << 16


def read_token_file(path: str) -> bytes:
    """What is in it.

    Raises:
        UsageError: it cannot be read, or others may read it.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and not is_private(status, os.geteuid(), os.getegid()):
                raise UsageError(f"--token-file={path}: others may read it; {_advice(path, status)}")
            return file.read(MAX_SECRET_BYTES)
    except OSError as error:
        raise UsageError(f"--token-file={path}: {error.strerror}") from error


def is_private(status: os.stat_result, user: int, group: int) -> bool:
    """Whether, of all but root, one user alone may read the file: its owner, or the one of this process.

    Either the mode says so, or it is the file of a Secret in a pod: root's, whoever the pod runs as, and readable by a
    group, which must be that of this user alone. A group is taken for that if it has the user's own number, and is the
    one that the process runs with; root needs no such group.
    """
    for_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not for_others:
        return True
    is_of_a_secret = status.st_uid == 0 and for_others == stat.S_IRGRP
    return is_of_a_secret and status.st_gid == group == user != 0


def _advice(path: str, status: os.stat_result) -> str:
    found = f"mode {stat.S_IMODE(status.st_mode):03o} of user {status.st_uid}, group {status.st_gid}"
    return (
        f"chmod 600 {path} (it has {found}; this is user {os.geteuid()}, group {os.getegid()}; a group may read it "
        "only if root owns it and the group's number is this user's own, as in a pod: runAsGroup = fsGroup = runAsUser)"
    )
