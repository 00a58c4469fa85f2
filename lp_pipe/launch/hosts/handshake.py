"""The first messages of an agent and its launcher, in JSON: nothing is unpickled before the versions are alike."""

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass
from typing import Any, Self

from lp_pipe.errors import LaunchError
from lp_pipe.launch.plan.hardware import Hardware

PROTOCOL = 6  # the version of the messages in agent_messages.py
JOIN, WELCOME = "join", "welcome"


@dataclass(frozen=True)
class Versions:
    """torch: None where it is not installed."""

    protocol: int
    python: str
    lp_pipe: str
    torch: str | None

    @classmethod
    def here(cls) -> Self:
        return cls(PROTOCOL, platform.python_version(), _version("lp_pipe") or "unknown", _version("torch"))


@dataclass(frozen=True)
class Joining:
    """An agent says what it is. address: how others reach its host."""

    host: str
    address: str
    pid: int
    versions: Versions
    hardware: Hardware

    def to_bytes(self) -> bytes:
        found = self.hardware
        hardware = asdict(found) | {"names": sorted(found.names), "labels": sorted(found.labels)}
        return json.dumps(asdict(self) | {"hardware": hardware}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the message that `to_bytes` gave.

        Raises:
            LaunchError: it is of another protocol.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            protocol = fields["versions"]["protocol"]
            if protocol != PROTOCOL:
                theirs = f"protocol {protocol} of lp_pipe {fields['versions'].get('lp_pipe')}"
                raise LaunchError(f"host {fields.get('host')!r} speaks {theirs}, the launcher protocol {PROTOCOL}")
            hardware = fields.pop("hardware")
            return cls(
                versions=Versions(**fields.pop("versions")),
                hardware=Hardware(
                    frozenset(hardware["names"]),
                    tuple(hardware["cpus"]),
                    int(hardware["memory_bytes"]),
                    tuple(hardware["gpus"]),
                    frozenset(hardware["labels"]),
                ),
                **fields,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"the first message of an agent cannot be read: {error!r}") from error


def check_versions(host: str, theirs: Versions, ours: Versions, needs_torch: bool) -> None:
    """Refuse an agent if its nodes would not understand ours.

    needs_torch: the launcher has loaded it, so its nodes will want it.

    Raises:
        LaunchError: names both versions.
    """
    pairs: list[tuple[str, str | None, str | None]] = [
        ("Python", _minor(theirs.python), _minor(ours.python)),
        ("lp_pipe", theirs.lp_pipe, ours.lp_pipe),
    ]
    if needs_torch or (theirs.torch and ours.torch):
        pairs.append(("torch", theirs.torch, ours.torch))
    wrong = [f"{name} {there or 'none'} there, {here or 'none'} here" for name, there, here in pairs if there != here]
    if wrong:
        raise LaunchError(f"host {host!r} has other versions than the launcher: {'; '.join(wrong)}")


def _minor(version: str) -> str:
    """Bytecode, and so functions sent by value, is alike in all releases of 3.11."""
    return ".".join(version.split(".")[:2])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
