"""A real Slurm on this machine: its own munged, one slurmctld, and several slurmd, each of which counts as a host."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "scontrol", "sinfo")
_CONF = """\
ClusterName=lp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munged.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
GresTypes=gpu
SelectTypeParameters=CR_Core
ReturnToService=2
InactiveLimit=0
KillWait=5
SlurmdTimeout=10
SlurmctldTimeout=10
TCPTimeout=5
KillOnBadExit=1
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmdSpoolDir={folder}/spool_%n
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    "CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:2 "
    "Feature=all,of_{name} State=UNKNOWN"
)


def why_not() -> str:
    """Return why there can be no cluster here, or an empty string."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class SlurmCluster:
    """`node1`, `node2`, … from construction until `close`; `conf` is for SLURM_CONF."""

    def __init__(self, count: int) -> None:
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self._folder = Path(tempfile.mkdtemp(prefix="lp-slurm-", dir="/run"))
        self._folder.chmod(0o755)
        self.conf = str(self._folder / "slurm.conf")
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def command(self, *words: str) -> str:
        """Run one of Slurm's; returns what it prints."""
        done = subprocess.run(words, env=self._environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def allocation(self) -> "Allocation":
        """Return the environment of a process in an allocation of all hosts."""
        return Allocation(self._environment(), self._folder / "allocation")

    def tasks(self) -> list[int]:
        """The processes that run in jobs of this cluster."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                is_ours = f"SLURM_CONF={self.conf}".encode() in variables
                if is_ours and any(variable.startswith(b"SLURM_PROCID=") for variable in variables):
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        """End all that the constructor started, and what runs in its jobs."""
        if len(self._daemons) > 1:
            subprocess.run(["scancel", "--user=root"], env=self._environment(), capture_output=True, check=False)
        deadline = time.monotonic() + 10
        while pids := self.tasks():
            if time.monotonic() > deadline:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self) -> None:
        host = socket.gethostname().partition(".")[0]
        first, *ports = _free_ports(1 + len(self.names))
        nodes = [_NODE.format(name=name, host=host, port=port) for name, port in zip(self.names, ports, strict=True)]
        text = _CONF.format(host=host, port=first, folder=self._folder, nodes="\n".join(nodes))
        Path(self.conf).write_text(text, encoding="utf-8")
        # Files that are there: nobody opens them, only the numbers of these GPUs are handed out.
        gpus = f"NodeName={','.join(self.names)} Name=gpu File=/dev/null,/dev/zero\n"
        (self._folder / "gres.conf").write_text(gpus, encoding="utf-8")
        (self._folder / "state").mkdir()
        self._start_munge(self._folder / "munge")
        self._start("slurmctld", "-D", "-c")
        for name in self.names:
            (self._folder / f"spool_{name}").mkdir()
            self._start("slurmd", "-D", "-N", name)
        deadline = time.monotonic() + 30
        while not self._are_idle():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.1)

    def _start_munge(self, folder: Path) -> None:
        """Start munge on a socket of its own, beside the system's."""
        folder.mkdir(mode=0o700)
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        socket_path = self._folder / "munged.sock"
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={socket_path}", *files)
        deadline = time.monotonic() + 10
        while not socket_path.exists():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.02)

    def _start(self, *command: str) -> None:
        with (self._folder / f"{'-'.join([command[0], command[-1]]).replace('/', '_')}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _are_idle(self) -> bool:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        return done.stdout.split() == ["idle"] * len(self.names)

    def _environment(self) -> dict[str, str]:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**ours, "PATH": path, "SLURM_CONF": self.conf}

    def _logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in self._folder.glob("*.log"))


class Allocation:
    """A job that does nothing but hold hosts; `environment` is what its processes find."""

    def __init__(self, environment: dict[str, str], seen: Path) -> None:
        salloc = ["salloc", "--quiet", "--nodes=3", "--exclusive", "--gpus-per-node=2"]
        command = [*salloc, "sh", "-c", f"env -0 >{seen}; echo here; exec cat"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == b"here\n"
        variables = (part.partition("=") for part in seen.read_text().split("\0") if part)
        self.environment = {name: value for name, _, value in variables if name.startswith("SLURM")}

    def close(self) -> None:
        """Give the hosts back."""
        self._process.communicate(timeout=20)  # closes its stdin, at which `cat` ends


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in held]
