"""`lp_pipe ui`: serve a web page that shows runs."""

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lp_pipe.cli.errors import NotLaunched, UsageError, whole_number
from lp_pipe.cli.find_run import find_run
from lp_pipe.cli.runs import runs_in
from lp_pipe.dashboard.gatekeeper import new_token
from lp_pipe.dashboard.routes import Routes
from lp_pipe.dashboard.server import Certificate, DashboardServer
from lp_pipe.errors import LaunchError
from lp_pipe.launch.open_metrics import OpenMetricsServer
from lp_pipe.launch.run_dir import usual_runs
from lp_pipe.launch.run_records import RunRecord, record_in
from lp_pipe.search.store import ExperimentFolder
from lp_pipe.user_folders import make_private, state_folder

EPILOG = """\
examples:
  lp_pipe ui                      all runs of yours that `lp_pipe runs` lists
  lp_pipe ui runs/demo-…          one run, live or ended
  lp_pipe ui /shared/runs         the runs in a folder
  lp_pipe ui --host 10.0.0.5 --cert server.pem --key server.key --read-only

The first line on stdout is the URL, with a token that the browser keeps as a cookie. Ctrl+C ends the server; the runs
go on.
"""


HELP = "show runs on a web page"
DESCRIPTION = (
    "Serve a web page that shows runs while they run and after their end: the graph with the states of its nodes, "
    "metrics, logs, the pipeline's timeline, hangs, experiments, checkpoints. The page is served to this host only, "
    "unless --host says otherwise."
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h

USAGE = "lp_pipe ui [RUN|FOLDER] [--port N] [--open] [--read-only]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "target",
        metavar="RUN",
        nargs="?",
        help="a run's folder or name, or a folder of runs (default: the runs that `lp_pipe runs` lists)",
    )
    parser.add_argument(
        "--port", type=whole_number("--port=", "a port", 8080), default=0, metavar="N", help="default: a free one"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="another than loopback needs --cert and --key"
    )
    parser.add_argument("--cert", type=Path, metavar="FILE", help="a certificate in PEM, for https")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the certificate's key")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--read-only", action="store_true", help="without buttons that change something")
    parser.add_argument(
        "--metrics-port",
        type=whole_number("--metrics-port=", "a port", 9090),
        metavar="PORT",
        help="also serve the run's state as OpenMetrics at http://127.0.0.1:PORT/metrics (0: any free port)",
    )
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)  # of `lp_pipe launch --ui`


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """Serve until Ctrl+C or SIGTERM.

    Raises:
        UsageError: there is no such run or folder, or the options contradict each other.
        NotLaunched: the address or port cannot be used.
    """
    if (arguments.cert is None) != (arguments.key is None):
        raise UsageError("--cert and --key belong together")
    find, places, single = _what(arguments.target)
    _share_one_arena()
    if arguments.metrics_port is not None and single is None:
        raise UsageError("--metrics-port shows one run: name it")
    routes = Routes(find, places, single, is_read_only=arguments.read_only)
    certificate = Certificate(arguments.cert, arguments.key) if arguments.cert is not None else None
    try:
        server = DashboardServer(
            routes,
            arguments.host,
            arguments.port,
            certificate,
            is_read_only=arguments.read_only,
            token=_token_of(arguments.port),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (OSError, OverflowError) as error:
        raise NotLaunched(f"cannot serve at {arguments.host}, port {arguments.port}: {error}") from error
    print(server.gatekeeper.first_url, flush=True)
    if arguments.metrics_port is not None:
        try:
            scraped = OpenMetricsServer(arguments.metrics_port)
        except LaunchError as error:
            raise NotLaunched(str(error)) from error
        scraped.answer(routes.open_metrics)
        print(f"metrics {scraped.url}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with server:
        if arguments.open:
            webbrowser.open(server.gatekeeper.first_url)
        if arguments.until_stdin_ends:
            threading.Thread(target=_close_at_end_of_stdin, args=(server,), daemon=True).start()
        try:
            server.serve()
        except KeyboardInterrupt:
            return 0
    return 0


def _share_one_arena() -> None:
    """Let all threads of this process allocate from one arena, and return large arrays to the system at once.

    Each request has a thread. With glibc's arena for each of them, the process grows by 80 MB in an hour of metrics.
    Other C libraries have no mallopt.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_TRIM_THRESHOLD, 4 << 20)
        mallopt(_M_MMAP_THRESHOLD, 2 << 20)  # arrays of one block of lines stay: new pages would double its time


def _close_at_end_of_stdin(server: DashboardServer) -> None:
    """Close the server when the process that has started this one closes the pipe, or has ended in any way."""
    while os.read(0, 1024):
        pass
    server.close()


def _what(
    target: str | None,
) -> tuple[Callable[[], Iterable[RunRecord]], Callable[[], Sequence[Path]], Path | None]:
    """Return what finds the runs, the places of experiments, and the run's folder if there is only one run."""
    home = usual_runs() / "experiments"
    if target is None:
        return (lambda: runs_in(None)), (lambda: [home]), None
    folder = Path(target)
    if folder.is_dir() and record_in(folder) is None:
        places = [folder, folder / "experiments"]
        if ExperimentFolder(folder).database.exists():
            return (lambda: runs_in(folder.parent)), (lambda: [folder]), None
        return (lambda: runs_in(folder)), (lambda: places), None
    path = Path(find_run(target).run_dir)

    def only() -> list[RunRecord]:
        record = record_in(path)
        return [] if record is None else [record]

    return only, (lambda: [path, home]), path


def _token_of(port: int) -> str | None:
    """Return the token of the last server at this port, so that its pages go on; None if any port will do."""
    if port == 0:
        return None
    try:
        folder = state_folder() / "ui"
        make_private(folder)
        path = folder / f"{port}.token"
        with contextlib.suppress(OSError):
            found = path.read_text(encoding="ascii").strip()
            if len(found) == len(new_token()):
                return found
        token = new_token()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(token)
        return token
    except (OSError, LaunchError):  # no home folder: then every server has a new one
        return None
