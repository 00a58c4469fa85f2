"""`lp_pipe launch --engine=slurm` outside an allocation: submit the same command as a job and follow it to its end."""

import argparse
import shlex
import sys
import time
from pathlib import Path

from lp_pipe.cli.errors import DONE, NODE_FAILED, NotLaunched, UsageError
from lp_pipe.cli.host_options import engine_options
from lp_pipe.cli.json_display import JsonDisplay
from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines import make_engine, slurm
from lp_pipe.launch.engines.slurm import JobState

_READ_EVERY_S = 0.25
_ASK_EVERY_S = 2.0  # not more often, because one controller serves all users
_LATE_OUTPUT_S = 2.0  # how late a shared folder may show output
_UNKNOWN_FOR_S = 30.0  # how long a controller may take to restart
_INTERRUPTS_AT_MOST = 2


def is_wanted(arguments: argparse.Namespace) -> bool:
    """Return whether this launch must be submitted as a job."""
    return arguments.mode == "multi_host" and arguments.engine == "slurm" and not slurm.is_inside()


def run(arguments: argparse.Namespace) -> int:
    """Submit the job, follow it, and return the exit status of the command in the job; --dry-run prints the job.

    Raises:
        UsageError, NotLaunched: nothing was submitted.
    """
    if not arguments.hosts:
        raise UsageError("--engine=slurm outside an allocation submits a job: give the number of hosts, as --hosts=4")
    _check_target(arguments.target)
    given = [*arguments.given]
    if arguments.dry_run:
        given.remove("--dry-run")
    name = f"lp_pipe-{Path(arguments.target).stem}"
    engine = engine_options(arguments)
    try:
        make_engine("slurm", arguments.hosts, engine)
    except ValueError as error:
        raise UsageError(str(error)) from error
    options = slurm.sbatch_arguments(name, arguments.hosts, str(Path.cwd() / "slurm-%j.out"), engine)
    text = slurm.script([sys.executable, "-u", "-m", "lp_pipe", *given])
    if arguments.dry_run:
        shown = f"sbatch {shlex.join(options)} <<'END'\n{text}END"
        if arguments.json:
            JsonDisplay().planned(shown.splitlines())
        else:
            print(shown)
        return DONE
    try:
        job = slurm.submit(options, text)
    except LaunchError as error:
        raise NotLaunched(f"cannot submit {arguments.target}: {error}") from error
    return _Following(job, Path.cwd() / f"slurm-{job}.out").to_the_end()


def _check_target(target: str) -> None:
    """Check that the target's file exists, before the job waits for hours."""
    path = Path(target.partition(":")[0])
    if path.suffix == ".py" and not path.is_file():
        raise UsageError(f"{target}: file {path} does not exist")


class _Following:
    """A view of a job's output and state. If this process ends other than by Ctrl+C, the job continues."""

    def __init__(self, job: str, output: Path) -> None:
        self._job = job
        self._output = output
        self._read = 0
        self._shown: JobState | None = None
        self._interrupts = 0
        self._acted_on = 0

    def to_the_end(self) -> int:
        self._note(f"submitted; its output is in {self._output}; Ctrl+C stops it")
        while self._interrupts <= _INTERRUPTS_AT_MOST:
            try:
                self._act()
                return self._follow()
            except KeyboardInterrupt:
                self._interrupts += 1
        raise KeyboardInterrupt

    def _act(self) -> None:
        """Act on a new Ctrl+C: the first stops the job, the second cancels it."""
        if self._interrupts == self._acted_on:
            return
        self._acted_on = self._interrupts
        is_first = self._interrupts == 1
        self._note("stopping (Ctrl+C again to cancel it) …" if is_first else "cancelling …")
        end = slurm.interrupt if is_first else slurm.cancel
        try:
            end(self._job)
        except LaunchError as error:  # the job has just ended, or the controller does not answer
            self._note(str(error))

    def _follow(self) -> int:
        known = time.monotonic()
        while time.monotonic() - known < _UNKNOWN_FOR_S:
            state = slurm.state_of(self._job)
            if state is not None:
                known = time.monotonic()
                self._show_state(state)
                if state.has_ended:
                    return self._ended(state)
            asked = time.monotonic()
            while time.monotonic() - asked < _ASK_EVERY_S:
                self._show_output()
                time.sleep(_READ_EVERY_S)
        self._note("Slurm no longer knows this job: how it ended is unknown")
        return NODE_FAILED

    def _ended(self, state: JobState) -> int:
        deadline = time.monotonic() + _LATE_OUTPUT_S
        while self._show_output() or (not self._read and time.monotonic() < deadline):
            time.sleep(_READ_EVERY_S)
        return state.status or (DONE if state.name == "COMPLETED" else NODE_FAILED)

    def _show_state(self, state: JobState) -> None:
        if self._shown is None or (state.name, state.hosts) != (self._shown.name, self._shown.hosts):
            self._note(str(state))
        self._shown = state

    def _show_output(self) -> bool:
        """Print new output; return whether there was any."""
        try:
            with self._output.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return False
        self._read += len(new)
        sys.stdout.buffer.write(new)
        sys.stdout.flush()
        return bool(new)

    def _note(self, text: str) -> None:
        print(f"job {self._job}: {text}", file=sys.stderr, flush=True)
