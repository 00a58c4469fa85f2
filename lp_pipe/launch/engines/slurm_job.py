"""A job of Slurm that runs one command on the first of its hosts: submitted, looked at, stopped."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lp_pipe.errors import LaunchError

_PENDING = frozenset(["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"])
_ENDED = frozenset(
    ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"]
)
_SIGNALLED = 128


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job. status: as a shell would have it, of a job that has ended."""

    name: str
    reason: str = ""
    hosts: str = ""
    status: int = 0

    @property
    def has_begun(self) -> bool:
        return self.name not in _PENDING

    @property
    def has_ended(self) -> bool:
        return self.name in _ENDED

    def __str__(self) -> str:
        return self.name + (f" ({self.reason})" if self.reason else "") + (f" on {self.hosts}" if self.hosts else "")


def sbatch_arguments(name: str, hosts: str, output: str, options: Mapping[str, str]) -> list[str]:
    """What sbatch is to be told; of what is said twice it takes the last, so the user's own arguments win.

    hosts: how many, or which. output: the file that the job prints into. options: of SlurmEngine.
    """
    where = f"--nodes={hosts}" if hosts.isdigit() else f"--nodelist={hosts}"
    cpus = options.get("cpus_per_host")
    # --no-kill: a host that is lost is the launcher's to deal with; Slurm would end the job.
    arguments = [f"--job-name={name}", f"--output={output}", where, "--ntasks-per-node=1", "--no-kill"]
    arguments += [f"--cpus-per-task={cpus}"] if cpus else ["--exclusive"]
    arguments += [f"--gpus-per-node={options['gpus_per_host']}"] if "gpus_per_host" in options else []
    arguments += [f"--{one}={options[one]}" for one in ("partition", "account", "time") if one in options]
    return [*arguments, *shlex.split(options.get("sbatch", ""))]


def script(command: Sequence[str]) -> str:
    """exec: signals reach the command itself."""
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


def submit(arguments: Sequence[str], text: str) -> str:
    """Hand a script to sbatch; returns the job's id.

    Raises:
        LaunchError: it was not taken; says why.
    """
    return _run(["sbatch", "--parsable", *arguments], text).strip().partition(";")[0]


def state_of(job: str) -> JobState | None:
    """How the job is now; None when Slurm does not know it (any more), or does not answer.

    Raises:
        LaunchError: there is no scontrol.
    """
    try:
        return read_state(_run(["scontrol", "show", "job", "--oneliner", job]))
    except _Refused:
        return None


def read_state(text: str) -> JobState | None:
    """What `scontrol show job --oneliner` prints; the first of an array's."""
    fields = dict(re.findall(r"(\w+)=(\S*)", text.partition("\n")[0]))
    if "JobState" not in fields:
        return None
    said = {
        name: "" if fields.get(name) in (None, "None", "(null)") else fields[name] for name in ("Reason", "NodeList")
    }
    status, _, number = fields.get("ExitCode", "0:0").partition(":")
    code = int(status) or (_SIGNALLED + int(number) if int(number or 0) else 0)
    return JobState(fields["JobState"], said["Reason"], said["NodeList"], code)


def interrupt(job: str) -> None:
    """Like a Ctrl+C at the job's command, which ends in order; one that has not begun is cancelled."""
    state = state_of(job)
    if state is None or not state.has_begun:
        cancel(job)
    else:
        _run(["scancel", "--batch", "--signal=INT", job])


def cancel(job: str) -> None:
    """Have Slurm end it, with all its processes.

    Raises:
        LaunchError: scancel has failed.
    """
    _run(["scancel", job])


class _Refused(LaunchError):
    pass


def _run(command: Sequence[str], text: str = "") -> str:
    # A session of its own: Ctrl+C at the terminal is not for it.
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, start_new_session=True)
    except OSError as error:
        raise LaunchError(f"engine 'slurm': cannot run {command[0]}: {error}") from error
    if done.returncode:
        raise _Refused(f"{command[0]} failed (exit status {done.returncode}): {done.stderr.strip()}")
    return done.stdout
