"""The engine `slurm`: agents on the hosts of a Slurm allocation, as one job step with one task per host."""

import dataclasses
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.agent_process import AgentProcess
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent

# --kill-on-bad-exit=0, --no-kill, --wait=0: an agent or host that dies does not end the others, because the launcher
# decides what becomes of their nodes. --overlap: works also inside another step, such as `srun --pty bash`.
# --cpu-bind=none: all cores of the allocation, also where such a step, or the default for tasks, is bound to fewer.
_SRUN = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--overlap"]
_SRUN += ["--cpu-bind=none", "--label"]
_NAME = "HOST"
_TASKS_ENDED = re.compile(r"srun: error: [^ ]+: tasks? ([\d,-]+): (\w.*)")
_LABELLED = re.compile(r" *(\d+): (.*)")
_MIB = 1 << 20
_log = logging.getLogger(__name__)


class SlurmEngine(Engine):
    """Starts the agents with one srun.

    hosts: how many hosts of the allocation ("4"), or which ("node[1-3],node7"); default: all of them.
    python: the interpreter on the hosts; default: the path of the launcher's own.
    srun: more arguments for srun.
    The other options are for sbatch, when `lp_pipe launch` submits a job (cli/submit.py). Inside an allocation they
    are ignored.

    Host names are Slurm's. A run uses at most the allocation's cores and memory, and the GPUs that Slurm shows to the
    agent on each host. The secret goes through srun's stdin, which srun copies to all tasks. Needs Slurm 20.11.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "python": "interpreter on the hosts (default: this one's path)",
        "srun": "more arguments for srun, such as --srun='--container-image=IMAGE'",
        "partition": "partition to submit to",
        "account": "account to charge",
        "time": "the job's time limit, as for sbatch",
        "cpus_per_host": "cores of each host (default: the whole host, --exclusive)",
        "gpus_per_host": "GPUs of each host",
        "sbatch": "more arguments for sbatch, such as --sbatch='--mem=64G --qos=high'",
    }

    def __init__(self, hosts: str = "", *, python: str = "", srun: str = "", **for_sbatch: str) -> None:
        if "=" in hosts:
            raise ValueError(
                f"engine 'slurm': hosts={hosts!r} must have no limits: set them with gpus_per_host and cpus_per_host"
            )
        self._asked = hosts
        self._python = python or sys.executable
        self._srun = [*_SRUN, *shlex.split(srun)]
        self._offers: list[HostOffer] = []

    def hosts(self) -> Sequence[HostOffer]:
        if not is_inside():
            raise LaunchError(
                "engine 'slurm': this process is not inside a Slurm allocation: use salloc or sbatch, or submit "
                "it with `lp_pipe launch … --mode=multi_host --engine=slurm --hosts=N`"
            )
        allocated = _labelled(offers(_hostnames(os.environ["SLURM_JOB_NODELIST"]), os.environ))
        names = self._chosen([offer.name for offer in allocated])
        self._offers = [offer for offer in allocated if offer.name in names]  # in srun's order, not in the user's
        return self._offers

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        return self._step(invitation, [offer.name for offer in self._offers])

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent:
        return self._step(invitation, [name])[0]

    def _step(self, invitation: Invitation, names: Sequence[str]) -> "list[SlurmTask]":
        """Start one srun for the agents of these hosts, which are in Slurm's order."""
        where = [f"--nodes={len(names)}", f"--ntasks={len(names)}", f"--nodelist={','.join(names)}"]
        words = [self._python, *invitation.arguments(_NAME)]
        # All tasks have the same command line. Each takes its host's name from the variable that Slurm sets.
        command = " ".join('"$SLURMD_NODENAME"' if word == _NAME else shlex.quote(word) for word in words)
        step = AgentProcess(names, [*self._srun, *where, "sh", "-c", f"exec {command}"], invitation)
        in_use = set(names)
        return [SlurmTask(name, number, step, in_use) for number, name in enumerate(names)]

    def _chosen(self, allocated: Sequence[str]) -> Sequence[str]:
        asked = self._asked or str(len(allocated))
        if not asked.isdigit():
            wanted = _hostnames(asked)
            if missing := [name for name in wanted if name not in allocated]:
                raise LaunchError(
                    f"engine 'slurm': hosts={asked!r}: the allocation lacks {', '.join(missing)}: {' '.join(allocated)}"
                )
            return wanted
        if not 0 < int(asked) <= len(allocated):
            raise LaunchError(
                f"engine 'slurm': hosts={asked!r}: the allocation has {len(allocated)} hosts: {' '.join(allocated)}"
            )
        return allocated[: int(asked)]


class SlurmTask(StartedAgent):
    """A task of a job step that runs several agents. srun's output says how the task ended, at the latest at its end.

    in_use: the hosts of the step on which the task has not been killed; a set that all tasks of the step share.
    """

    def __init__(self, host: str, number: int, step: StartedAgent, in_use: set[str]) -> None:
        super().__init__([host])
        self._number = number
        self._step = step
        self._in_use = in_use

    def how_it_ended(self) -> str | None:
        for line in self._step.last_lines():
            said = _TASKS_ENDED.fullmatch(line)
            if said and self._number in _numbers(said[1]):
                return f"srun: {said[2]}"
        ended = self._step.how_it_ended()
        return f"srun: {ended}" if ended else None

    def last_lines(self) -> list[str]:
        """Return the task's own lines and srun's, without those about ended tasks, which would hide its reason."""
        found = []
        for line in self._step.last_lines():
            labelled = _LABELLED.fullmatch(line)
            if labelled is not None and int(labelled[1]) == self._number:
                found.append(labelled[2])
            elif labelled is None and not _TASKS_ENDED.fullmatch(line):
                found.append(line)
        return found

    def kill(self) -> None:
        """End the step once all its tasks are to be killed: one alone cannot be, and its agent ends by itself."""
        self._in_use.difference_update(self.hosts)
        if not self._in_use:
            self._step.kill()


def is_inside() -> bool:
    """Return whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NODELIST" in os.environ


def offers(names: Sequence[str], environment: Mapping[str, str]) -> list[HostOffer]:
    """Return what Slurm has given to the job on each of its hosts, as far as its environment variables say so."""
    cpus = list(_cpus_per_host(environment.get("SLURM_JOB_CPUS_PER_NODE", "")))
    if len(cpus) != len(names):
        return [HostOffer(name) for name in names]
    # Set only with --gpus-per-node. Without it the agent reads CUDA_VISIBLE_DEVICES.
    gpus = _gpus(environment.get("SLURM_GPUS_PER_NODE", ""))
    per_host, per_cpu = (_number(environment.get(f"SLURM_MEM_PER_{what}")) for what in ("NODE", "CPU"))
    return [
        HostOffer(
            name,
            count,
            gpus,
            (per_host or (per_cpu or 0) * count) * _MIB or None,
        )
        for name, count in zip(names, cpus, strict=True)
    ]


def _cpus_per_host(text: str) -> Iterator[int]:
    """Yield 16, 16, 8 for "16(x2),8"."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)


def _gpus(text: str) -> int | None:
    """Return 3 for "a100:2,v100"."""
    counts = [kind.rpartition(":")[2] for kind in text.split(",") if kind]
    return sum(int(count) if count.isdigit() else 1 for count in counts) or None


def _numbers(text: str) -> Iterator[int]:
    """Yield 0, 1, 2, 5 for "0-2,5"."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def features(text: str) -> dict[str, frozenset[str]]:
    """Return the active features by host name, from the output of `scontrol show node --oneliner`."""
    found = re.findall(r"^NodeName=(\S+) .*?\bActiveFeatures=(\S+)", text, re.MULTILINE)
    return {name: frozenset(words.split(",")) - {"(null)"} for name, words in found}


def _labelled(allocated: Sequence[HostOffer]) -> list[HostOffer]:
    """Add Slurm's features as the hosts' labels. Without scontrol they have none, which is enough for most programs."""
    try:
        found = features(_scontrol("show", "node", ",".join(offer.name for offer in allocated), "--oneliner"))
    except LaunchError as error:
        _log.warning("engine 'slurm': the hosts get no labels, because their features cannot be read: %s", error)
        found = {}
    return [dataclasses.replace(offer, labels=found.get(offer.name, frozenset())) for offer in allocated]


def _hostnames(nodelist: str) -> list[str]:
    return _scontrol("show", "hostnames", nodelist).split()


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(f"engine 'slurm': cannot run scontrol: {error}") from error
    if done.returncode or not done.stdout:
        raise LaunchError(
            f"engine 'slurm': `scontrol {' '.join(words)}` failed: {done.stderr.strip() or 'it printed nothing'}"
        )
    return done.stdout


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
