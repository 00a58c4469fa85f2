"""What this host has to hand out: cores, memory, GPUs."""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """gpus: as CUDA_VISIBLE_DEVICES names them (numbers, or UUIDs where the launcher was given such)."""

    names: frozenset[str]
    cpus: tuple[int, ...]
    memory_bytes: int
    gpus: tuple[str, ...]


def this_host() -> Hardware:
    """What this process may use itself."""
    name = socket.gethostname()
    return Hardware(frozenset({"localhost", name, name.partition(".")[0]}), _cpus(), _memory_bytes(), _gpus())


def _cpus() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _named(visible)
    torch = sys.modules.get("torch")
    if torch is not None:  # never imported for this: it takes seconds
        return tuple(str(index) for index in range(torch.cuda.device_count()))
    drivers = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    return tuple(str(index) for index in range(drivers))


def _named(visible: str) -> tuple[str, ...]:
    """CUDA's rule: devices after an invalid one (-1) are not visible."""
    names: list[str] = []
    for name in visible.split(","):
        if name.strip() in ("", "-1", "NoDevFiles"):
            break
        names.append(name.strip())
    return tuple(names)
