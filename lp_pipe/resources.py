"""The resources that a node needs of the machine it runs on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

Placement = Literal["even", "spread", "pack"]

PROCESS_START_PREFIXES = (  # of variables that are read when a process starts
    *("OMP_", "LD_", "CUDA_", "MKL_", "OPENBLAS_", "DYLD_", "PYTHON", "MALLOC_", "GLIBC_"),
    *("TORCH_", "PYTORCH_"),  # read when torch is imported (TORCH_LOGS) or loaded (PYTORCH_CUDA_ALLOC_CONF's backend)
)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of each node of a group, where nodes are processes.

    cpus: cores that the node is pinned to, different ones for each node while they last (None: not pinned). A fraction
        is the node's share of one more core; the rest goes to others: 1.5 is pinned to 2 cores.
    gpus: devices that the node has for itself: CUDA_VISIBLE_DEVICES names them, `context().devices` numbers them. 0:
        none are handed out, and CUDA_VISIBLE_DEVICES stays as it is.
    memory: bytes that the node will need; all nodes together must fit into the host (nothing limits them later).
    threads: what torch and BLAS use inside the node; one value for a whole program in thread mode.
    env: variables set in the node's process; some only work at process start and imply fresh_interpreter.
    host: name of the host that the node must run on.
    fresh_interpreter: start the node by exec instead of forking it from the template process.

    On several hosts (one host of its own fulfils all of these):

    host_labels: the labels that the node's host must have, all of them (`--hosts=h1:label=fast`).
    placement: of the group's nodes. "even": on all hosts that have room, neighbours together; "spread": each on another
        host; "pack": on as few hosts as have room for them.
    colocate_with: label of another group; nodes go on the same hosts: node i of n beside node i * m // n of its m.
    """

    cpus: float | None = None
    gpus: int = 0
    memory: int | None = None
    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    fresh_interpreter: bool = False
    host_labels: Sequence[str] = ()
    placement: Placement = "even"
    colocate_with: str | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "memory", "gpus", "cpus"):
            if isinstance(getattr(self, name), str | bytes):
                raise TypeError(f"Resources: {name} must be a number, got {getattr(self, name)!r}")
        for name in ("threads", "memory", "gpus"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        _check_environment(self.env)
        if self.threads < 1:
            raise ValueError(f"Resources: threads must be at least 1, got {self.threads}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"Resources: memory must be at least 1 byte, or None, got {self.memory}")
        if self.gpus < 0 or (self.cpus is not None and not 0 < self.cpus < math.inf):
            raise ValueError(
                f"Resources: cpus must be above 0, or None, and gpus at least 0, got cpus={self.cpus}, gpus={self.gpus}"
            )
        if isinstance(self.host_labels, str):
            raise ValueError(f"Resources: host_labels must be a list, [{self.host_labels!r}], got {self.host_labels!r}")
        object.__setattr__(self, "host_labels", tuple(self.host_labels))
        if not all(isinstance(label, str) and label for label in self.host_labels):
            raise ValueError(f"Resources: host_labels must be words, got {list(self.host_labels)}")
        if self.placement not in get_args(Placement):
            known = ", ".join(map(repr, get_args(Placement)))
            raise ValueError(f"Resources: placement must be one of {known}, got {self.placement!r}")
        if self.colocate_with is not None and (self.placement != "even" or self.host is not None):
            raise ValueError(
                f"Resources: colocate_with={self.colocate_with!r} decides the hosts: leave placement and host out"
            )

    @property
    def says_where(self) -> bool:
        """Whether it chooses among several hosts, so that no plan does."""
        return self.host is not None or self.colocate_with is not None or self.placement != "even"

    @property
    def needs_fresh_interpreter(self) -> bool:
        """Whether a fork of the template could not honour `env`, which was read when the process started."""
        return self.fresh_interpreter or any(name.startswith(PROCESS_START_PREFIXES) for name in self.env)


def _whole(name: str, value: Any) -> Any:
    """Return the number as an int; None stays.

    Raises:
        TypeError: it is no number.
        ValueError: it is a fraction.
    """
    if value is None or isinstance(value, int):
        return value
    if not isinstance(value, Real):
        raise TypeError(f"Resources: {name} must be a number, got {value!r} of type {type(value).__name__}")
    if not float(value).is_integer():
        raise ValueError(f"Resources: {name} must be a whole number (only cpus can be a fraction), got {value}")
    return int(float(value))


def _check_environment(env: Mapping[str, str]) -> None:
    """Refuse here what the system would refuse in the node's process."""
    if not isinstance(env, Mapping):
        raise TypeError(f"Resources: env must be a dict of names and values, got {env!r}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(
                f"Resources: names and values of env must be str, such as {str(value)!r}, got {name!r}: {value!r}"
            )
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"Resources: env cannot have a variable of this name or value: {name!r}: {value!r}")
