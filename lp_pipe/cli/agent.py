"""`lp_pipe agent`: run this host's part of a program for a launcher on another host."""

import argparse
import os
import signal
import socket
import stat
import sys
from collections.abc import Sequence

from lp_pipe.cli.errors import DONE, NODE_FAILED, NotLaunched, UsageError
from lp_pipe.connections.credentials import Credentials
from lp_pipe.connections.tcp_carriers import TRANSPORTS
from lp_pipe.errors import LaunchError
from lp_pipe.launch.hosts.agent import run_agent
from lp_pipe.launch.hosts.network import address_of_interface, with_ssh_client

DESCRIPTION = """\
Join a run of `lp_pipe launch --mode=multi_host` and run the nodes that its launcher places on this host, until the run
ends. Engines start this command on every host; on hosts that no engine reaches you start it yourself.
"""


HELP = "run nodes on this host for another host's launcher"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--join", required=True, metavar="HOST:PORT[,…]", help="where the launcher listens")
    parser.add_argument(
        "--token-file", required=True, metavar="FILE", help="a file of mode 0600 with the run's secret; - for stdin"
    )
    parser.add_argument("--name", default=socket.gethostname(), help="the launcher's name for this host")
    parser.add_argument(
        "--interface",
        default="",
        metavar="NAME|ADDRESS",
        help="where other hosts reach this one (default: the interface that reaches the launcher)",
    )
    parser.add_argument(
        "--patience", type=float, default=10.0, metavar="S", help="seconds to reach the launcher (default: 10)"
    )
    parser.add_argument(
        "--transport", choices=list(TRANSPORTS), default="tls", help="the launcher's transport (default: tls)"
    )


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Serve until the run has ended; return 0 if the launcher ended it, 1 if the launcher was lost.

    Raises:
        UsageError, NotLaunched: this host could not join.
    """
    credentials = _read_credentials(arguments.token_file)
    if not sys.stdin.isatty():  # started by an engine: the launcher handles Ctrl+C
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interface = address_of_interface(arguments.interface) if arguments.interface else ""
        addresses = with_ssh_client([address for address in arguments.join.split(",") if address])
        parent = os.getppid() if arguments.token_file == "-" else None  # what an engine starts ends with its parent
        end = run_agent(
            addresses, credentials, arguments.name, interface, arguments.patience, arguments.transport, parent
        )
    except (LaunchError, OSError) as error:
        raise NotLaunched(str(error)) from error
    print(f"lp_pipe agent of {arguments.name}: {end.reason}", flush=True)
    return DONE if end.is_orderly else NODE_FAILED


def _read_credentials(path: str) -> Credentials:
    try:
        data = sys.stdin.buffer.readline(MAX_SECRET_BYTES) if path == "-" else read_token_file(path)
        return Credentials.from_bytes(data)
    except ValueError as error:
        raise UsageError(f"--token-file={path}: {error}") from error


MAX_SECRET_BYTES = 1 << 16


def read_token_file(path: str) -> bytes:
    """Return the contents of the file.

    Raises:
        UsageError: the file cannot be read, or other users may read it.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and not is_private(status, os.geteuid(), os.getegid()):
                raise UsageError(f"--token-file={path}: other users may read it; {_advice(path, status)}")
            return file.read(MAX_SECRET_BYTES)
    except OSError as error:
        raise UsageError(f"--token-file={path}: {error.strerror}") from error


def is_private(status: os.stat_result, user: int, group: int) -> bool:
    """Return whether, besides root, only one user may read the file: its owner, or the user of this process.

    Either the file's mode allows no other user. Or it is the file of a Secret in a Kubernetes pod: root owns it, and a
    group may read it, which must contain this user alone. A group counts as that if its number is the user's own number
    and the process runs with it; root needs no such group.
    """
    for_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not for_others:
        return True
    is_of_a_secret = status.st_uid == 0 and for_others == stat.S_IRGRP
    return is_of_a_secret and status.st_gid == group == user != 0


def _advice(path: str, status: os.stat_result) -> str:
    found = f"mode {stat.S_IMODE(status.st_mode):03o} of user {status.st_uid}, group {status.st_gid}"
    return (
        f"run `chmod 600 {path}` (it has {found}; this is user {os.geteuid()}, group {os.getegid()}; a group may read "
        "it only if root owns it and the group's number is this user's own: in a pod set runAsGroup = fsGroup = "
        "runAsUser)"
    )
