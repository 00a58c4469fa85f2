"""The engine `ray`: agents in actors of a Ray cluster, one for each bundle of a placement group."""

import ctypes
import dataclasses
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.telemetry.names import signal_name

_STRATEGIES = {"spread": "STRICT_SPREAD", "pack": "PACK"}
_ACTORS_PATIENCE_S = 60.0
_LISTENS_PATIENCE_S = 10.0


class RayEngine(Engine):
    """Starts each agent in an actor of its own.

    hosts: how many ("4"); default: all hosts of the cluster that have cores.
    ray_address: the cluster's address; default: what Ray itself would take (RAY_ADDRESS, a cluster that runs on this
        host, or else a new one of this host alone). A program that has called `ray.init` keeps that connection.
    cpus_per_host, gpus_per_host: what to request of Ray; default: the most that every one of the chosen hosts has.
    placement: "spread", each agent on a host of its own (default), or "pack", on as few hosts as have room.
    ray_timeout: seconds to wait until the cluster has room (60).

    The secret is an argument of an actor's method, so it is encrypted only if Ray's own messages are.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "ray_address": "cluster: auto or HOST:PORT (default: RAY_ADDRESS, a running one, or a new local one)",
        "cpus_per_host": "cores of each host (default: all)",
        "gpus_per_host": "GPUs of each host (default: all)",
        "placement": "spread (default) or pack",
        "ray_timeout": "seconds for the cluster to have room (default: 60)",
    }

    def __init__(
        self,
        hosts: str = "",
        *,
        ray_address: str = "",
        cpus_per_host: str = "",
        gpus_per_host: str = "",
        placement: str = "spread",
        ray_timeout: str = "60",
    ) -> None:
        numbers = {"hosts": hosts, "cpus_per_host": cpus_per_host, "gpus_per_host": gpus_per_host}
        for name, text in {**numbers, "ray_timeout": ray_timeout}.items():
            if text and not text.isdigit():
                raise ValueError(f"engine 'ray': {name} must be a number, got {text!r}; Ray itself chooses the hosts")
        if "0" in (hosts, cpus_per_host):
            raise ValueError(
                f"engine 'ray': hosts and cpus_per_host must be at least 1, got {hosts=}, {cpus_per_host=}"
            )
        if placement not in _STRATEGIES:
            raise ValueError(f"engine 'ray': placement must be {' or '.join(_STRATEGIES)}, got {placement!r}")
        self._numbers = {name: int(text) for name, text in numbers.items() if text}
        self._address = ray_address
        self._strategy = _STRATEGIES[placement]
        self._timeout_s = float(ray_timeout)
        self._ray: Any = None
        self._is_connection_ours = False
        self._group: Any = None
        self._bundle: Mapping[str, int] = {}
        self._actors: list[Any] = []
        self._offers: list[HostOffer] = []
        self._names: list[str] = []

    def hosts(self) -> Sequence[HostOffer]:
        self._ray = import_ray()
        with self._errors_of_ray():
            self._connect()
            usable = [node["Resources"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            count, bundle = wanted(usable, self._numbers)
            self._reserve(count, bundle)
            asked = [actor.hostname.remote() for actor in self._actors]
            self._names = self._ray.get(asked, timeout=_ACTORS_PATIENCE_S)
        self._offers = [HostOffer(name, bundle["CPU"], bundle.get("GPU", 0)) for name in distinct(self._names)]
        return self._offers

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        return [self._run(index, invitation) for index in range(len(self._actors))]

    def start_again(self, invitation: Invitation, name: str) -> StartedAgent:
        index = [offer.name for offer in self._offers].index(name)
        with self._errors_of_ray():
            self._ray.kill(self._actors[index])
            self._actors[index] = self._actor(index)  # runs once Ray has found a host for the bundle, maybe another one
            return self._run(index, invitation)

    def _run(self, index: int, invitation: Invitation) -> "RayAgent":
        # The cluster reaches this host at this address.
        ours = f"{self._ray.util.get_node_ip_address()}:{invitation.addresses[0].rpartition(':')[2]}"
        invitation = dataclasses.replace(invitation, addresses=list(dict.fromkeys([*invitation.addresses, ours])))
        offer, actor = self._offers[index], self._actors[index]
        share = self._names[:index].count(self._names[index])
        method = actor.run.options(num_returns="streaming")
        output = method.remote(invitation.arguments(offer.name), invitation.secret, share, offer.cpus)
        return RayAgent(self._ray, offer.name, actor, output, invitation.log_path(offer.name))

    def close(self) -> None:
        if self._ray is None:
            return
        with suppress(Exception):  # the cluster may be gone
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        if self._is_connection_ours:
            self._ray.shutdown()
        self._actors, self._group, self._is_connection_ours = [], None, False

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        _check_listens(self._address or os.environ.get("RAY_ADDRESS", ""))
        self._is_connection_ours = True
        with _sigterm_as_it_is():
            self._ray.init(address=self._address or None, log_to_driver=False, logging_level="ERROR")

    def _reserve(self, count: int, bundle: Mapping[str, int]) -> None:
        self._group = self._ray.util.placement_group([dict(bundle)] * count, strategy=self._strategy)
        if not self._group.wait(timeout_seconds=self._timeout_s):
            free = self._ray.available_resources()
            left = ", ".join(f"{free.get(name, 0):g} of {total:g} {name}" for name, total in self._totals().items())
            raise LaunchError(
                f"engine 'ray': for {self._timeout_s:g} s the cluster had no room for {count} hosts with "
                f"{_in_words(bundle)} each ({self._strategy}). {left} on {len(self._ray.nodes())} hosts are free: "
                "ask for less, or wait longer with ray_timeout="
            )
        self._bundle = bundle
        self._actors = [self._actor(index) for index in range(count)]

    def _actor(self, index: int) -> Any:
        """Create an actor for a bundle of the placement group."""
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        where = scheduling.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        cpus, gpus = self._bundle["CPU"], self._bundle.get("GPU", 0)
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": where}
        return self._ray.remote(AgentActor).options(**options).remote()

    def _totals(self) -> dict[str, float]:
        return {name: total for name, total in self._ray.cluster_resources().items() if name in ("CPU", "GPU")}

    @contextmanager
    def _errors_of_ray(self) -> Iterator[None]:
        try:
            yield
        except LaunchError:
            raise
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise LaunchError(f"engine 'ray': {first_words(error)}") from error


def import_ray() -> Any:
    """Import the package `ray`, which is large and needed by this engine alone.

    Raises:
        LaunchError: the package is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(f"engine 'ray' needs Ray: pip install 'lp_pipe[ray]' ({error})") from error


def wanted(usable: Sequence[Mapping[str, float]], numbers: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Return how many hosts to request, and the resources of each.

    usable: the resources of the cluster's hosts. numbers: what the user asked for. Without it, all hosts, and on each
    as much as every one of the chosen hosts has.

    Raises:
        LaunchError: the cluster has no host with cores.
    """
    if not usable:
        raise LaunchError("engine 'ray': the cluster has no host with cores: add one (ray start)")
    count = numbers.get("hosts", len(usable))
    best = sorted(usable, key=lambda one: (one.get("GPU", 0), one["CPU"]), reverse=True)[: max(1, count)]
    cpus = numbers.get("cpus_per_host", int(min(one["CPU"] for one in best)))
    gpus = numbers.get("gpus_per_host", int(min(one.get("GPU", 0) for one in best)))
    return count, {"CPU": cpus, **({"GPU": gpus} if gpus else {})}


def distinct(names: Sequence[str]) -> list[str]:
    """Return the host names, with a number added to those that several agents share."""
    counts, seen = Counter(names), Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if counts[name] == 1 else f"{name}-{seen[name]}")
    return found


def _check_listens(address: str) -> None:
    """Fail early where the address cannot be reached: Ray itself takes minutes to find out."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_PATIENCE_S).close()
    except OSError as error:
        raise LaunchError(f"engine 'ray': cannot reach a cluster at {address}: {error}") from error


def _in_words(bundle: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {name}" for name, count in bundle.items())


@contextmanager
def _sigterm_as_it_is() -> Iterator[None]:
    """Restore the handler of SIGTERM after the body: with Ray's handler a program would no longer stop in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_KEPT_LINES = 20
_PATIENCE_S = 2.0


class RayAgent(StartedAgent):
    """An agent that an actor has started. `output` yields the agent's output lines and last its exit status."""

    def __init__(self, ray: Any, host: str, actor: Any, output: Any, log_path: Path) -> None:
        super().__init__([host])
        self._ray = ray
        self._actor = actor
        self._ended: str | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log_path = log_path
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._reader = threading.Thread(target=self._read, args=(output,), name=f"output of agent {host}", daemon=True)
        self._reader.start()

    def how_it_ended(self) -> str | None:
        return self._ended

    def last_lines(self) -> list[str]:
        return list(self._lines)

    def kill(self) -> None:
        with suppress(Exception):  # the cluster or the actor is gone
            self._ray.kill(self._actor)
        self._reader.join(_PATIENCE_S)

    def _read(self, output: Any) -> None:
        try:
            with self._log_path.open("a", encoding="utf-8") as log:
                for item in output:
                    said = self._ray.get(item)
                    if isinstance(said, int):
                        self._ended = f"killed by {signal_name(-said)}" if said < 0 else f"exit status {said}"
                        return
                    self._lines.append(said)
                    print(said, file=log, flush=True)
            self._ended = "its Ray actor ended without reporting an exit status"
        except Exception as error:
            # When a host dies, Ray raises ActorDiedError or ActorUnavailableError, by chance, and retries neither.
            self._ended = f"{type(error).__name__}: {first_words(error)}"


def first_words(error: BaseException) -> str:
    """Return the first line of a long Ray error, and the line with the reason of an actor's death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines[1:] if "because" in line or "Error:" in line]
    return " ".join([*lines[:1], *reasons[-1:]]) or type(error).__name__


_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 4096
_libc = ctypes.CDLL(None)  # loaded here, because little may be done between fork and exec


class AgentActor:
    """The actor. Ray runs its methods one after the other, in the main thread of a process on the host."""

    def hostname(self) -> str:
        return socket.gethostname()

    def run(self, arguments: Sequence[str], secret: bytes, share: int, cores: int) -> Iterator[str | int]:
        """Run an agent, which dies with this process. Yield its output lines, then its exit status.

        share: the agent's number among those of this host, from 0. cores: how many cores each of them gets.
        """
        self._take_cores(share, cores)
        command = [sys.executable, *arguments]
        agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(_die_with, os.getpid()),
        )
        assert agent.stdin is not None and agent.stdout is not None
        with agent, agent.stdout as output:
            try:
                agent.stdin.write(secret + b"\n")
                agent.stdin.close()
            except OSError:  # it has ended; its status follows
                pass
            while line := output.readline(_LINE_BYTES):
                yield line.decode(errors="replace").rstrip()
        yield agent.returncode

    def _take_cores(self, share: int, cores: int) -> None:
        """Pin this process to its share of the cores: Ray only counts them, so agents of one host would overlap."""
        if hasattr(os, "sched_setaffinity"):
            mine = sorted(os.sched_getaffinity(0))[share * cores : (share + 1) * cores]
            if len(mine) == cores:  # otherwise Ray was told of more cores than the host has
                os.sched_setaffinity(0, mine)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the line above, so its signal will never come
            os._exit(1)
