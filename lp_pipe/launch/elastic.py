"""A run on as many hosts as there are: its program is built again when one is lost for good, or comes.

    hosts up ──► make_program(n) ──► Run on n hosts ──┬── ends by itself ──────────────► over
       ▲                                              ├── a host is lost, without a spare ┐
       └──── the newest checkpoint ◄── stopped ◄──────┴── a host has come, at a checkpoint┘

As torchelastic does it: all nodes of the old program end, those of the new one begin at the newest checkpoint. Agents
stay. Source: torch.distributed.elastic, `--nnodes=MIN:MAX`.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.errors import NodeError
from lp_pipe.launch.hosts.elastic_hosts import ElasticHosts
from lp_pipe.launch.hosts.host_join import KeptHosts, MultiHostOptions
from lp_pipe.launch.hosts.tree_store import TreeStore
from lp_pipe.launch.launcher import check_program, start_run
from lp_pipe.launch.options import LaunchOptions, with_keywords
from lp_pipe.launch.plan import interpreter_state
from lp_pipe.launch.refusal import check_not_refused
from lp_pipe.launch.run import Run
from lp_pipe.launch.run_dir import make_run_dir
from lp_pipe.launch.signals import Interrupts, Latch
from lp_pipe.program import Program
from lp_pipe.rpc.fork_guard import ForkGuard
from lp_pipe.telemetry.run_folder import RunFolder

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_CLOSE_PATIENCE_S = 4.0
_ECHO_S = 30.0  # what fails so soon after the loss of a host may be because of it; longer than its nodes are fenced
_WHOLE = {"running", "finished"}

MakeProgram = Callable[[int], Program]


class HostCount(NamedTuple):
    """The least and the largest number of hosts of a program."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the numbers that a text such as "2:4" means.

        Raises:
            ValueError: it is something else.
        """
        least, _, most = text.partition(":")
        if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
            raise ValueError(f"{text!r} is not a number of hosts: write MIN:MAX, such as 2:4")
        return cls(int(least), int(most))


@dataclass(frozen=True)
class _ElasticOptions(LaunchOptions):
    num_hosts: str


@with_keywords(_ElasticOptions)
def launch_elastic(make_program: MakeProgram, options: _ElasticOptions) -> "ElasticRun":
    """Run the program on `num_hosts`, "MIN:MAX", hosts: whatever is there; mode="multi_host" of `launch`.

    make_program(n): the program for n hosts, built anew whenever their number changes; in this process, from a thread.
        Its trainer begins with `Checkpoints.restore()` or uses `Checkpoints.steps`, in the run's own folder, which all
        hosts share.
    hosts: beyond MAX they are spares: nodes with on_failure="restart" of a lost host start again there.

    A lost host is started again every few seconds where its engine can do that (local, ssh, slurm, ray); on others it
    may join by itself (`lp_pipe agent`). join_timeout: seconds to wait for MIN hosts, at the start and later.

    Raises:
        ValueError: `num_hosts` is something else, hang_after is not positive; as `launch`.
        TypeError: `make_program` has returned something else than a Program.
        LaunchError: there were not MIN hosts in time; as `launch`.
        Exception: of `make_program`.
    """
    check_not_refused()
    count = HostCount.parse(options.num_hosts)
    make_program = _checked(make_program)
    host_options = MultiHostOptions.of(options)
    folder = make_run_dir(make_program(count.most).name, options.run_dir)  # also: what it raises, it raises here
    credentials = generate_credentials()
    tree = None if host_options.tree is None else TreeStore().kept(host_options.tree)
    hosts_of_run = ElasticHosts(host_options, credentials, is_for_programs=True)
    options = replace(options, run_dir=folder)

    def start(program: Program, agents: Mapping[str, Any], used: int) -> Run:
        kept = KeptHosts(hosts_of_run, credentials, agents, used)
        return start_run(program, "multi_host", replace(host_options, tree=tree, kept=kept), folder, options)

    hosts_of_run.open(str(RunFolder(folder).agents), needs_torch="torch" in sys.modules)
    try:
        return ElasticRun(make_program, count, hosts_of_run, start)
    except BaseException:
        hosts_of_run.close(_CLOSE_PATIENCE_S)
        raise


def _checked(make_program: MakeProgram) -> MakeProgram:
    return lambda num_hosts: check_program(make_program(num_hosts), "make_program returns a Program")


class ElasticRun:
    """Successive runs in one folder, as `launch_elastic` returns them. Use it as a context manager, like `Run`.

    has_raised_failure: whether `wait` or the end of the `with` block has raised the failure.
    """

    def __init__(
        self,
        make_program: MakeProgram,
        count: HostCount,
        hosts_of_run: ElasticHosts,
        start: Callable[[Program, Mapping[str, Any], int], Run],
    ) -> None:
        self._make_program = make_program
        self._owner = ForkGuard()
        self._count = count
        self._hosts = hosts_of_run
        self._start = start
        self._is_stopping = threading.Event()
        self._is_over = Latch()
        self._error: Exception | SystemExit | None = None
        self.has_raised_failure = False
        self._prepare_thread = interpreter_state.thread_state()
        self._interrupts = Interrupts(lambda: self._run.request_stop(hurry=True), suspend=lambda: None)
        self._begin(is_first=True)
        self._interrupts.install()
        threading.Thread(target=self._go_on, name="elastic run", daemon=True).start()

    @property
    def num_hosts(self) -> int:
        """The number of hosts of the program that runs now."""
        return self._num_hosts

    @property
    def run(self) -> Run:
        """The run of now, or the last one: ask it for `status`, `client` and `stacks`."""
        return self._run

    @property
    def run_dir(self) -> Path:
        """The folder with logs, metrics and checkpoints of all of it."""
        return self._run.run_dir

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left, and nothing comes."""
        return self._is_over.is_open

    @property
    def interrupted_by(self) -> int | None:
        """The signal that ended it, or None."""
        return self._interrupts.received

    def status(self) -> dict[str, list[dict[str, Any]]]:
        """Return `Run.status` of the program that runs now."""
        return self._run.status()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Raises:
            NodeError, TimeoutError, KeyboardInterrupt: as `Run.wait`.
            LaunchError, ValueError: the program could not go on, with the hosts that are left.
            Unavailable: as `Run.wait`.
        """
        self._owner.check("the elastic run", "use it there")
        try:
            is_over = self._is_over.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        if not is_over:
            raise TimeoutError(f"the program still runs after {timeout} s, on {self._num_hosts} hosts")
        self._interrupts.uninstall()
        self._raise_failure()

    def stop(self) -> None:
        """Stop in order, and return when nothing is left. Idempotent, any thread but a node's."""
        if not self._owner.is_here:
            return
        with self._interrupts.deferred():
            self._is_stopping.set()
            self._run.request_stop(hurry=self._interrupts.is_impatient)
            self._is_over.wait()
            self._interrupts.uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None and self._owner.is_here:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._error is not None:
            self.has_raised_failure = True
            raise self._error

    def _begin(self, is_first: bool) -> None:
        """Build the program for the hosts that are up, and start it there.

        Raises:
            LaunchError, ValueError: there are too few, or it does not fit.
        """
        losses = self._hosts.losses  # before: a later one ends the program that begins now
        agents = self._hosts.wait_for(self._count.least, is_first, self._is_stopping)
        if self._is_stopping.is_set():
            return
        num_hosts = min(len(agents), self._count.most)
        self._losses = losses
        self._run = self._start(self._make_program(num_hosts), agents, num_hosts)
        self._num_hosts = num_hosts

    def _go_on(self) -> None:
        self._prepare_thread()  # the nodes of later programs get their settings from this thread
        try:
            while self._must_begin_again() and not self._is_stopping.is_set():
                _log.warning("the program begins again at the newest checkpoint: %s", self._why)
                self._begin(is_first=False)
                if self._is_stopping.is_set():  # it may not have heard
                    self._run.request_stop()
        except (Exception, SystemExit) as error:  # of the user's function, or no room: `wait` raises it
            self._error = error
        finally:
            self._hosts.close(_CLOSE_PATIENCE_S)
            self._interrupts.uninstall()
            self._is_over.open()

    def _must_begin_again(self) -> bool:
        """Wait for the end of the run; return whether it ended because of its hosts."""
        is_growing = False
        seen: set[str] | None = None  # checkpoints, when there were more hosts for the first time
        while not self._run.is_over:
            self._forget_survived_losses()
            if not is_growing and self._could_grow():
                now = RunFolder(self.run_dir).checkpoint_names()
                seen = now if seen is None else seen
                is_growing = bool(now - seen) and self._run.request_stop()
            if self._is_stopping.wait(_LOOK_EVERY_S):
                self._run.stop()
        self._why = f"there are {len(self._hosts.up())} hosts"
        try:
            self._run.wait()
        except NodeError as error:
            if self._hosts.losses == self._losses:
                self._error = error
                return False
            self._why = str(error).splitlines()[0]
            return True
        return is_growing

    def _forget_survived_losses(self) -> None:
        """Forget losses of spare hosts, and of hosts without nodes by now: later failures have other causes."""
        losses = self._hosts.losses
        if losses != self._losses and time.monotonic() - self._hosts.lost_at > _ECHO_S:
            states = {row["state"] for rows in self._run.status().values() for row in rows}
            self._losses = losses if states <= _WHOLE else self._losses

    def _could_grow(self) -> bool:
        return self._num_hosts < min(len(self._hosts.up()), self._count.most)
