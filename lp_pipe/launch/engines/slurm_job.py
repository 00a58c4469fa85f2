"""Submit, inspect and stop a Slurm job that runs one command on the first of its hosts."""

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
    """The state of a job, as Slurm reports it. status: the exit status of an ended job, in a shell's convention."""

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
    """Return the arguments for sbatch. The user's own come last, because sbatch takes the last of repeated ones.

    hosts: how many, or their names. output: the file for the job's output. options: of SlurmEngine.
    """
    where = f"--nodes={hosts}" if hosts.isdigit() else f"--nodelist={hosts}"
    cpus = options.get("cpus_per_host")
    # --no-kill: the launcher deals with a lost host. Slurm would end the job.
    arguments = [f"--job-name={name}", f"--output={output}", where, "--ntasks-per-node=1", "--no-kill"]
    arguments += [f"--cpus-per-task={cpus}"] if cpus else ["--exclusive"]
    arguments += [f"--gpus-per-node={options['gpus_per_host']}"] if "gpus_per_host" in options else []
    arguments += [f"--{one}={options[one]}" for one in ("partition", "account", "time") if one in options]
    return [*arguments, *shlex.split(options.get("sbatch", ""))]


def script(command: Sequence[str]) -> str:
    """Return a batch script that runs the command with exec, so that signals reach the command itself."""
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


def submit(arguments: Sequence[str], text: str) -> str:
    """Submit a script with sbatch; returns the job's id.

    Raises:
        LaunchError: sbatch has refused it; the message says why.
    """
    return _run(["sbatch", "--parsable", *arguments], text).strip().partition(";")[0]


def state_of(job: str) -> JobState | None:
    """Return the job's state; None if Slurm does not know it (any more), or does not answer.

    Raises:
        LaunchError: scontrol is not installed.
    """
    try:
        return read_state(_run(["scontrol", "show", "job", "--oneliner", job]))
    except _Refused:
        return None


def read_state(text: str) -> JobState | None:
    """Read the output of `scontrol show job --oneliner`; of a job array its first job."""
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
    """Send SIGINT to the job's command, which then stops in order. A job that has not begun is cancelled."""
    state = state_of(job)
    if state is None or not state.has_begun:
        cancel(job)
    else:
        _run(["scancel", "--batch", "--signal=INT", job])


def cancel(job: str) -> None:
    """End the job and all its processes.

    Raises:
        LaunchError: scancel failed.
    """
    _run(["scancel", job])


class _Refused(LaunchError):
    pass


def _run(command: Sequence[str], text: str = "") -> str:
    # In a session of its own, so that Ctrl+C at the terminal does not reach it.
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, start_new_session=True)
    except OSError as error:
        raise LaunchError(f"engine 'slurm': cannot run {command[0]}: {error}") from error
    if done.returncode:
        raise _Refused(f"{command[0]} failed (exit status {done.returncode}): {done.stderr.strip()}")
    return done.stdout
