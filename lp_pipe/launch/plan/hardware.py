"""The cores, memory, GPUs and labels of a host."""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from lp_pipe.connections.kernel_calls import usable_cores

LABELS = "LP_PIPE_HOST_LABELS"


@dataclass(frozen=True)
class Hardware:
    """The hardware of a host.

    names: all names by which `Resources(host=...)` may refer to it. gpus: as CUDA_VISIBLE_DEVICES names them (numbers,
    or UUIDs if the launcher was given those). labels: what `Resources(host_labels=...)` may ask for.
    """

    names: frozenset[str]
    cpus: tuple[int, ...]
    memory_bytes: int
    gpus: tuple[str, ...]
    labels: frozenset[str] = frozenset()


def this_host() -> Hardware:
    """Return what this process may use of its host."""
    name = socket.gethostname()
    names = frozenset({"localhost", name, name.partition(".")[0]})
    return Hardware(names, usable_cores(), _memory_bytes(), _gpus(), _labels())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _named(visible)
    torch = sys.modules.get("torch")
    if torch is not None:  # not imported just for this, since that takes seconds
        return tuple(str(index) for index in range(torch.cuda.device_count()))
    drivers = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    return tuple(str(index) for index in range(drivers))


def _labels() -> frozenset[str]:
    """Return the labels that the host's administrator has set in the environment."""
    return frozenset(label.strip() for label in os.environ.get(LABELS, "").split(",")) - {""}


def _named(visible: str) -> tuple[str, ...]:
    """Return the visible devices. By CUDA's rule those after an invalid one (-1) are not visible."""
    names: list[str] = []
    for name in visible.split(","):
        if name.strip() in ("", "-1", "NoDevFiles"):
            break
        names.append(name.strip())
    return tuple(names)
