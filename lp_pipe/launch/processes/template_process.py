"""The template process: imports what nodes will need, then forks one child per node on request.

It is started by exec, stays single-threaded, and never runs a torch operation, gRPC or CUDA, because only such a
process can be forked safely. It is the parent of all node processes: it reports their exits, kills their process trees
(as subreaper it inherits orphaned grandchildren), and ends them when the launcher dies.

It talks to the launcher over an inherited socket: JSON after its length, with file descriptors (`send_message`).
"""

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lp_pipe import private_python
from lp_pipe.connections.io_thread import TICKS
from lp_pipe.connections.kernel_calls import has_pidfd
from lp_pipe.connections.resource_limits import PROCESS_LIMIT_ADVICE
from lp_pipe.connections.socket_dir import register_process
from lp_pipe.launch.supervision.lifecycle import LAUNCHER_PATIENCE_S
from lp_pipe.process_tree import kill_all, session_of, signal_all, tree_of

_LENGTH = struct.Struct("<I")


def send_message(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message. Blocks until the other side has room for it."""
    data = json.dumps(message).encode()
    packet = _LENGTH.pack(len(data)) + data
    sent = socket.send_fds(sock, [packet], list(fds)) if fds else 0
    sock.sendall(packet[sent:])


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its file descriptors; None if the other side has closed."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 8)
    if not head:
        return None
    head += _receive_exactly(sock, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    message: dict[str, Any] = json.loads(_receive_exactly(sock, length))
    return message, list(fds)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side closed the connection inside a message")
        data += piece
    return bytes(data)


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_ORPHAN_TERM = 0.8  # share of that time after which they get SIGTERM


class TemplateProcess:
    """The template process. `serve` ends after the launcher says goodbye, dies or is silent for too long."""

    def __init__(self, control: socket.socket, launcher_pid: int, orphan_s: float, socket_dir: str) -> None:
        """Prepare to serve the launcher on the socket `control`.

        Raises:
            ProcessLookupError: the launcher has already ended.
        """
        self._control = control
        self._orphan_s = orphan_s
        self._launcher = _pidfd(launcher_pid)
        self._nodes: dict[int, str] = {}  # pid -> node_id
        self._socket_dir = socket_dir
        self._is_done = False
        self._is_suspended = False
        self._wake, wake_write = socket.socketpair()
        self._wake.setblocking(False)
        wake_write.setblocking(False)
        self._wake_write = wake_write
        self._operations: dict[str, Callable[[dict[str, Any], list[int]], None]] = {
            "start": self._start_node,
            "signal": self._signal_node,
            "ping": lambda message, fds: None,
            "suspend": self._suspend_nodes,
            "resume": self._resume_nodes,
            "end run": self._end_run,
            "begin run": self._begin_run,
            "bye": self._say_goodbye,
        }

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        sources = _poll(self._control.fileno(), self._wake.fileno(), self._launcher)
        silent_ticks = 0
        while not self._is_done:
            tick_s = None if self._is_suspended else LAUNCHER_PATIENCE_S / TICKS
            ready = {descriptor for descriptor, _ in sources.poll(tick_s and tick_s * 1000)}
            if not ready:
                silent_ticks += 1
            if silent_ticks == TICKS:
                self._clean_up(is_orderly=False)
                sys.exit(f"lp_pipe: the launcher was silent for {LAUNCHER_PATIENCE_S} s, so its nodes were ended")
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
                self._reap()
            if self._launcher in ready:
                break
            if self._control.fileno() in ready:
                if not self._serve_one():
                    break
                silent_ticks = 0
        self._clean_up(is_orderly=self._is_done)

    def close(self) -> None:
        """Close all sockets, since `python -X dev` warns about open ones."""
        signal.set_wakeup_fd(-1)
        for end in (self._control, self._wake, self._wake_write):
            end.close()

    def _serve_one(self) -> bool:
        try:
            received = receive_message(self._control)
        except OSError:
            return False
        if received is None:
            return False
        message, fds = received
        self._operations[message["op"]](message, fds)
        return True

    def _start_node(self, message: dict[str, Any], fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # must not end the other nodes
            self._tell({"event": "not started", "node": message["node"], "why": _why_no_fork(error)})
        else:
            if pid == 0:
                self._become_node(message, fds, parent)
            self._nodes[pid] = message["node"]
            self._tell({"event": "started", "node": message["node"], "pid": pid})
        for fd in fds:
            os.close(fd)

    def _become_node(self, message: dict[str, Any], fds: list[int], parent: int) -> NoReturn:
        """Become the node, in the forked child. Never returns."""
        try:
            _die_with(parent)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # As in a fresh interpreter, also for processes that the node starts. Ctrl+C does not reach this session.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(fds[0], 1)
            os.dup2(fds[1], 2)
            for fd in (*fds, self._wake.detach(), self._wake_write.detach(), self._control.detach(), self._launcher):
                if fd is not None:
                    os.close(fd)
            _set_process_name(f"lp:{message['node']}")
            if message["fresh"]:
                _exec_node(message)
            _reseed()
            from lp_pipe.launch.processes.node_main import main

            status = main(message["node"], message["endpoint"], message["attempt"], is_forked=True)
        except BaseException:  # an exception must not return into the template's loop
            sys.excepthook(*sys.exc_info())
            status = 1
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # finalization would copy the pages that nodes share, and abort in threads of torch

    def _signal_node(self, message: dict[str, Any], fds: list[int]) -> None:
        for pid, node in self._nodes.items():
            if node == message["node"]:
                signal_all([pid, *tree_of(pid)] if message["tree"] else [pid], message["signal"])

    def _suspend_nodes(self, message: dict[str, Any], fds: list[int]) -> None:
        """Stop all nodes, since the launcher is about to be stopped. This process keeps watching the launcher."""
        self._is_suspended = True
        asleep: set[int] = set()
        while new := {*self._nodes, *tree_of(os.getpid())} - asleep:  # repeat, since they may be starting others
            signal_all(new, signal.SIGSTOP)
            asleep |= new

    def _resume_nodes(self, message: dict[str, Any], fds: list[int]) -> None:
        self._is_suspended = False
        signal_all({*self._nodes, *tree_of(os.getpid())}, signal.SIGCONT)

    def _end_run(self, message: dict[str, Any], fds: list[int]) -> None:
        """End all nodes, and wait for another run. Its launcher does not ping meanwhile."""
        self._clean_up(is_orderly=True)
        self._nodes.clear()
        self._socket_dir = ""
        self._is_suspended = True
        self._tell({"event": "free"})

    def _begin_run(self, message: dict[str, Any], fds: list[int]) -> None:
        self._socket_dir = message["socket_dir"]
        register_process(self._socket_dir)
        self._is_suspended = False

    def _say_goodbye(self, message: dict[str, Any], fds: list[int]) -> None:
        self._is_done = True

    def _reap(self) -> None:
        ended: dict[int, int] = {}  # collect all, to read the process tree only once
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                ended.update([child])
        nodes = {
            pid: self._nodes.pop(pid) for pid in ended if pid in self._nodes
        }  # the others are orphaned grandchildren
        if nodes:
            kill_all([member for member in tree_of(os.getpid()) if session_of(member) in nodes])
        for pid, node in nodes.items():
            self._tell({"event": "exited", "node": node, "status": ended[pid]})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher has died, which serve() notices
            send_message(self._control, message)

    def _clean_up(self, is_orderly: bool) -> None:
        start = time.monotonic()
        asked = False
        while self._nodes and not is_orderly and time.monotonic() < start + self._orphan_s:
            if not asked and time.monotonic() > start + _ORPHAN_TERM * self._orphan_s:
                asked = True
                signal_all(tree_of(os.getpid()), signal.SIGTERM)
            _poll(self._wake.fileno()).poll(100)
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
            self._reap()
        while left := tree_of(os.getpid()):
            kill_all(left)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        if self._socket_dir:
            shutil.rmtree(self._socket_dir, ignore_errors=True)


def interpreter_flags() -> list[str]:
    """Return this interpreter's flags (-O, -W, -X dev) for a new one that runs `-c`, and -P.

    Without -P, a json.py in the current folder would come before Python's own until sys.path is set. And if that folder
    has been removed, Python 3.13.0 to 3.13.2 look there at each missing attribute of a module, and raise a SystemError
    (https://github.com/python/cpython/issues/130932).
    """
    return [*private_python.interpreter_flags(), "-P"]


def _poll(*descriptors: int | None) -> select.poll:
    """Return a poll object for reading. Not select(), which takes no descriptor above 1023; there may be more."""
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    return poll


def _why_no_fork(error: OSError) -> str:
    what = error.strerror or str(error)
    if error.errno == errno.EAGAIN:
        what = PROCESS_LIMIT_ADVICE
    return f"its process could not be started: {what}"


def _pidfd(pid: int) -> int | None:
    """Return a pidfd; None on systems without, where the socket's end or silence shows that the launcher died."""
    return os.pidfd_open(pid) if has_pidfd() else None


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, the single-threaded template, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above, so its signal will never come
        os._exit(1)


def _set_process_name(name: str) -> None:
    """Set the process's name, cut to what fits, but not inside a character, which tools could not decode."""
    _prctl(_PR_SET_NAME, name.encode()[:15].decode(errors="ignore").encode())


def _prctl(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def _exec_node(message: dict[str, Any]) -> NoReturn:
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from lp_pipe.launch.processes.node_main import main; "
        "sys.exit(main(sys.argv[2], sys.argv[3], int(sys.argv[4])))"
    )
    node = (message["node"], message["endpoint"], str(message["attempt"]))
    arguments = [sys.executable, *interpreter_flags(), "-c", code, json.dumps(sys.path), *node]
    os.execve(sys.executable, arguments, {**message["env"], **malloc_environment(message["env"])})


def _reseed() -> None:
    """Reseed the random generators, which would give the same numbers in all forked nodes."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


def main(control_fd: int, launcher_pid: int, preload: list[str], orphan_s: float, socket_dir: str) -> None:
    """Import the modules in `preload`, then serve fork requests.

    orphan_s: how long nodes may take to end after the launcher has died. socket_dir: is removed at the end.
    """
    control = socket.socket(fileno=control_fd)
    if socket_dir:
        register_process(socket_dir)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _set_process_name("lp:template")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in ("lp_pipe.launch.processes.node_main", "multiprocessing.reduction", *preload):
        with contextlib.suppress(ImportError):  # a node that needs it will report the error
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise a collection in a child would write to, and so copy, every shared page
    try:
        template = TemplateProcess(control, launcher_pid, orphan_s, socket_dir)
    except ProcessLookupError:
        shutil.rmtree(socket_dir, ignore_errors=True)
        sys.exit("lp_pipe: the launcher ended before its template process was ready")
    with contextlib.closing(template):
        template.serve()


_VARIABLE = "GLIBC_TUNABLES"
_SETTINGS = {
    "trim_threshold": 1 << 29,  # bytes of freed memory that the process keeps
    "mmap_threshold": 1 << 25,  # the maximum of every glibc; larger blocks go back to the kernel at once
    "top_pad": 1 << 26,  # bytes by which the heap grows
    "arena_max": 1,  # memory freed in one arena could not be reused in another
    "hugetlb": 1,  # transparent huge pages, where the kernel allows madvise; older glibc than 2.35 ignores it
}


def malloc_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to a new process's environment; nothing if the user has configured malloc.

    By default a step's activations go back to the kernel, which clears their pages when the next step touches them.
    And activations and weights are in pages of 4 KiB. After a wait for its neighbour a core's TLB has lost them, and on
    a virtual machine each lookup walks two page tables.
    """
    tunables = environment.get(_VARIABLE, "")
    is_named = any(name.startswith("MALLOC_") for name in environment)
    if is_named or "glibc.malloc" in tunables or "LD_PRELOAD" in environment:
        return {}
    own = [f"glibc.malloc.{name}={value}" for name, value in _SETTINGS.items()]
    return {_VARIABLE: ":".join([*([tunables] if tunables else []), *own])}
