"""The launcher's side of the template process, which is in template_process.py."""

import atexit
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from lp_pipe.connections.kernel_calls import most_descriptors
from lp_pipe.connections.resource_limits import PROCESS_LIMIT_ADVICE, describe_error
from lp_pipe.errors import LaunchError
from lp_pipe.launch.plan.surroundings import import_path
from lp_pipe.launch.processes import standard_streams
from lp_pipe.launch.processes.node_link import NodeLink
from lp_pipe.launch.processes.template_process import (
    interpreter_flags,
    malloc_environment,
    receive_message,
    send_message,
)
from lp_pipe.launch.supervision.lifecycle import LAUNCHER_PATIENCE_S, ORPHAN_S
from lp_pipe.launch.supervision.messages import Ping
from lp_pipe.process_tree import is_dying, kill_all, marked
from lp_pipe.resources import PROCESS_START_PREFIXES
from lp_pipe.telemetry.names import signal_name

_log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for the end of a run
_IMPORT_PATIENCE_S = 60.0
_PING_EVERY_S = 1.0
_DESCRIPTORS_PER_NODE = 3  # two for its output, one for its stream
_OWN_DESCRIPTORS = 8
# Slow to import and safe to fork. The template loads those that the launching process has loaded.
_STAGES = "lp_pipe.pipeline.worker.worker"
_REPLICAS = "lp_pipe.data_parallel.add"
_WORTH_PRELOADING = ("numpy", "torch", "torch.optim", "torch.utils._pytree", _STAGES, _REPLICAS)
# Creating a torch optimizer imports this module, which takes as long as torch itself, and 70 MB. The launching process
# creates no optimizer, and so has not imported it. None of these imports calls CUDA's driver, which processes forked
# after that could not use (torch 2.11, 2.13 and 2.14.1; tests/gpu/test_cuda.py).
_FOR_OPTIMIZERS = "torch._dynamo"
MARK = "LP_PIPE_TEMPLATE"
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lp_pipe.launch.processes.template_process import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]), float(sys.argv[5]), sys.argv[6])"
)

OnExit = Callable[[str, str], None]
OnStart = Callable[[str, int], None]
OnLost = Callable[[str], None]


class Template:
    """Starts node processes by forking the template, and reports their starts and exits from a thread of its own.

    on_start(node_id, pid). on_exit(node_id, how): also if the process could not be started.
    on_lost(reason): the template has died, and all nodes with it.
    preload: modules that the template imports; None for those useful ones that this process has imported.
    orphan_s: how long nodes may take to end after this process has died.
    socket_dir: the run's private folder, which the template removes at its end.
    """

    def __init__(
        self,
        on_start: OnStart,
        on_exit: OnExit,
        on_lost: OnLost,
        preload: Sequence[str] | None = None,
        orphan_s: float = ORPHAN_S,
        socket_dir: str = "",
    ) -> None:
        self._on_start = on_start
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._preloaded = loaded_here() if preload is None else [*preload]
        self._kind = _kind_of(orphan_s)
        self._mark = uuid.uuid4().hex
        self._socket_dir = socket_dir
        self._is_free = threading.Event()  # its run has ended, and it may serve another one
        self._pid = os.getpid()
        self._send_lock = threading.Lock()
        self._is_closing = False
        self._control, theirs = socket.socketpair()
        self._control.settimeout(None)  # in case the user's code has called socket.setdefaulttimeout
        arguments = [
            json.dumps(import_path()),
            str(theirs.fileno()),
            str(os.getpid()),
            json.dumps(_with_optimizers(self._preloaded)),
            str(orphan_s),
            socket_dir,
        ]
        # With more than one, BLAS would start threads when numpy is imported, and threads do not survive a fork.
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **malloc_environment(os.environ), MARK: self._mark, **threads}
        try:
            self._process = subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-c", _BOOT, *arguments],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=standard_streams.for_child(1),
                stderr=standard_streams.for_child(2),
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            why = PROCESS_LIMIT_ADVICE if error.errno == errno.EAGAIN else describe_error(error)
            raise LaunchError(f"cannot start the template process of the nodes with {sys.executable}: {why}") from error
        finally:
            theirs.close()
        try:
            threading.Thread(target=self._listen, name="template events", daemon=True).start()
        except RuntimeError:  # out of threads; the caller gets no object that it could close
            self._process.kill()
            self.close()
            raise
        atexit.register(self._remove_sockets)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def mark(self) -> dict[str, str]:
        """The environment variable that every process of this run carries."""
        return {MARK: self._mark}

    def start(self, request: dict[str, Any], stdout: int, stderr: int) -> None:
        """Start a node's process. Its output goes to the given descriptors.

        Raises:
            LaunchError: the template process is gone.
        """
        self._send({"op": "start", **request}, (stdout, stderr))

    def signal(self, node_id: str, number: int, tree: bool) -> None:
        """Send a signal to a node's process; tree: also to all that it has started."""
        with contextlib.suppress(LaunchError):  # the template and all nodes are gone, which on_lost reports
            self._send({"op": "signal", "node": node_id, "signal": number, "tree": tree})

    def wake(self) -> None:
        """Let the template process go on if it is stopped (SIGSTOP): it must kill nodes, and report their ends."""
        self._process.send_signal(signal.SIGCONT)

    def ping(self) -> None:
        """Show that the launcher is alive."""
        self._say("ping")

    def suspend(self) -> None:
        """Stop all node processes, and all that they have started, until `resume`."""
        self._say("suspend")

    def resume(self) -> None:
        self._say("resume")

    def serve_another_run(self, on_start: OnStart, on_exit: OnExit, on_lost: OnLost, socket_dir: str) -> None:
        """Serve another run, after `end_run` has kept this template. The arguments are the constructor's."""
        self._on_start, self._on_exit, self._on_lost, self._socket_dir = on_start, on_exit, on_lost, socket_dir
        self._is_free.clear()
        self._send({"op": "begin run", "socket_dir": socket_dir})

    def fits(self, preload: Sequence[str] | None, orphan_s: float) -> bool:
        """Return whether a new template would be like this one, which has imported as much or more."""
        wanted = loaded_here() if preload is None else preload
        is_alive = not is_dying(self._process.pid)
        return is_alive and self._kind == _kind_of(orphan_s) and set(wanted) <= set(self._preloaded)

    def end_run(self, patience_s: float = _PATIENCE_S) -> None:
        """End all processes of the run, and the template unless it is kept warm for another run."""
        warm = _warm[-1] if _warm else None  # another thread may empty the list meanwhile
        if warm is not None:
            self._say("end run")
            if self._is_free.wait(patience_s):
                self._on_start = self._on_exit = self._on_lost = _ignore  # the run's, which may be freed now
                kill_all([pid for pid in marked(MARK, self._mark) if pid != self._process.pid])
                self._socket_dir = ""
                if warm.put(self):
                    return
        self.close()

    def close(self) -> None:
        """End the template and all processes that its nodes have left; returns when all of them have ended."""
        self._is_closing = True
        self._say("bye")
        try:
            self._process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._remove_sockets()  # first: the interpreter may be ending, and stop this thread after the next line
        atexit.unregister(self._remove_sockets)
        kill_all(marked(MARK, self._mark))
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def _remove_sockets(self) -> None:
        """Remove the run's private folder at this process's end, if the template cannot do that any more."""
        # `poll` alone says that the template runs as long as the other thread is inside `wait`.
        has_ended = self._process.poll() is not None or is_dying(self._process.pid)
        if self._socket_dir and os.getpid() == self._pid and has_ended:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _say(self, operation: str) -> None:
        with contextlib.suppress(LaunchError):  # as in `signal`
            self._send({"op": operation})

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        with self._send_lock:
            try:
                send_message(self._control, message, fds)
            except OSError as error:
                raise LaunchError(f"the template process of the nodes has ended: {error}") from error

    def _listen(self) -> None:
        while True:
            try:
                received = receive_message(self._control)
            except OSError:
                received = None
            if received is None:
                break
            message, _ = received
            if message["event"] == "started":
                self._on_start(message["node"], message["pid"])
            elif message["event"] == "free":
                self._is_free.set()
            elif message["event"] == "exited":
                self._on_exit(message["node"], how_it_died(message["status"]))
            else:
                self._on_exit(message["node"], message["why"])
        self._is_free.set()  # nothing of the run is left
        if not self._is_closing:
            status = self._process.wait()
            kill_all(marked(MARK, self._mark))
            how = how_it_died(-status).removeprefix("the process was ") if status < 0 else f"exit status {status}"
            self._on_lost(f"the template process {self._process.pid} that had started it ended: {how}")


class WarmTemplates:
    """Templates of ended runs. Each is kept for another run, which need not wait until torch is imported."""

    def __init__(self) -> None:
        self._idle: list[Template] = []
        self._is_closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let launches in the body take their templates from here, and leave them here."""
        _warm.append(self)
        try:
            yield
        finally:
            _warm.remove(self)

    def take(self, preload: Sequence[str] | None, orphan_s: float) -> Template | None:
        """Return a template that fits, and end those that do not; None if there is none."""
        while True:
            with self._lock:
                template = self._idle.pop() if self._idle else None
            if template is None or template.fits(preload, orphan_s):
                return template
            template.close()

    def put(self, template: Template) -> bool:
        """Keep an idle template; return False after `close`."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(template)
            return not self._is_closed

    def warm_up(self) -> None:
        """Start a template now that fits every later launch of this process, unless there is one."""
        template = self.take(_WORTH_PRELOADING, ORPHAN_S)
        if template is None:
            Template(lambda *_: None, lambda *_: None, lambda _: None, _WORTH_PRELOADING).end_run(_IMPORT_PATIENCE_S)
        else:
            self.put(template)

    def close(self) -> None:
        """End all idle templates; those in use end with their runs."""
        with self._lock:
            self._is_closed = True
        for template in self._idle:
            template.close()


_warm: list[WarmTemplates] = []  # in use; the last one counts


@contextlib.contextmanager
def kept_warm() -> Iterator[None]:
    """Keep the templates of runs that end in the body for later ones, until the end of the body."""
    with contextlib.closing(WarmTemplates()) as templates, templates.used():
        yield


def _ignore(*_: Any) -> None:
    """Do nothing: no run uses the template now."""


def start_template(
    on_start: OnStart, on_exit: OnExit, on_lost: OnLost, preload: Sequence[str] | None, orphan_s: float, socket_dir: str
) -> Template:
    """Return a template for a run: a warm one that fits, or a new one. The arguments are those of Template."""
    template = _warm[-1].take(preload, orphan_s) if _warm else None
    if template is None:
        return Template(on_start, on_exit, on_lost, preload, orphan_s, socket_dir)
    template.serve_another_run(on_start, on_exit, on_lost, socket_dir)
    return template


def _kind_of(orphan_s: float) -> tuple[object, ...]:
    """Return what a process cannot change after its start: where it imports from, and what it reads only then."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(PROCESS_START_PREFIXES)}
    return sys.executable, import_path(), interpreter_flags(), variables, orphan_s


def loaded_here() -> list[str]:
    """Return the modules worth preloading that this process has imported."""
    return [name for name in _WORTH_PRELOADING if name in sys.modules]


def _with_optimizers(modules: Sequence[str]) -> list[str]:
    """Add the module that the optimizers of stages and replicas need."""
    return [*modules, _FOR_OPTIMIZERS] if not {_STAGES, _REPLICAS}.isdisjoint(modules) else [*modules]


def check_descriptors(nodes: int) -> None:
    """Check the descriptors before the start: a node would wait for ever for its connection to be accepted.

    Raises:
        LaunchError: this process may not open enough descriptors for so many nodes.
    """
    needed = _DESCRIPTORS_PER_NODE * nodes + _OWN_DESCRIPTORS
    limit = most_descriptors()
    try:
        free = limit - len(os.listdir("/dev/fd"))
    except OSError:  # no /proc: a later shortage is reported where it occurs
        return
    if free < needed:
        nodes_need = "1 node needs" if nodes == 1 else f"{nodes} nodes need"
        raise LaunchError(
            f"{nodes_need} {needed} file descriptors in the launching process (host {socket.gethostname()}), but "
            f"only {max(free, 0)} of its {limit} are free: raise its limit (ulimit -n)"
        )


class LauncherPings:
    """Pings the template and the nodes every second, in a thread of its own, until `is_over` is set.

    From `suspend` to `resume` the template expects none.

    streams: of the nodes, by node_id; nodes may be added later.
    """

    def __init__(self, template: Template, streams: Mapping[str, NodeLink]) -> None:
        self._template = template
        self._streams = streams
        self.is_over = threading.Event()
        self._last = time.monotonic()
        self._is_suspended = False
        threading.Thread(target=self._run, name="launcher pings", daemon=True).start()

    def suspend(self) -> None:
        """Stop the nodes until `resume`, because this process is about to be stopped."""
        self._is_suspended = True
        self._template.suspend()

    def resume(self) -> None:
        self._last = time.monotonic()
        self._is_suspended = False
        self._template.resume()

    def _run(self) -> None:
        while not self.is_over.wait(_PING_EVERY_S):
            silence_s, self._last = time.monotonic() - self._last, time.monotonic()
            if silence_s > LAUNCHER_PATIENCE_S and not self._is_suspended:
                _log.warning(
                    "this process was frozen for %.0f s: its nodes have ended unless they were frozen, too", silence_s
                )
            self._template.ping()
            for stream in list(self._streams.values()):
                stream.mention(Ping())


# How long to wait for the last output of a process that has ended. Counted from its end, not from its turn in the
# queue: if 50 processes die at once, and grandchildren keep their pipes open, all are reported after this time.
LAST_WORDS_PATIENCE_S = 0.5

KILLED = "the process was killed by"  # the beginning of the text for a signal

_Report = Callable[[float], None]


class ExitQueue:
    """Runs reports in a thread of its own, in order. Each report gets its deadline (time.monotonic)."""

    def __init__(self) -> None:
        self._news: SimpleQueue[tuple[_Report, float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exits of nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, report: _Report) -> None:
        """Queue the report of a process that has just ended."""
        self._news.put((report, time.monotonic() + LAST_WORDS_PATIENCE_S))

    def close(self) -> None:
        """Wait until all queued reports are done, and end the thread."""
        self._news.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (news := self._news.get()) is not None:
            report, deadline = news
            report(deadline)


def was_killed_by_others(how: str) -> bool:
    """Return whether a process may have died, in these words, from a signal of another one, or for lack of memory."""
    return any(how.startswith(f"{KILLED} {name}") for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"))


def how_it_died(status: int) -> str:
    """Return a wait status in words."""
    if os.WIFSIGNALED(status):
        name = signal_name(os.WTERMSIG(status))
        hint = " (kill -9, or the kernel when memory ran out: see dmesg)" if name == "SIGKILL" else ""
        return f"{KILLED} {name}{hint}"
    code = os.waitstatus_to_exitcode(status)
    return f"the process ended with exit code {code} and reported no error: os._exit({code}), or exit({code}) in C code"
