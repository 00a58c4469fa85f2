"""The syntax in which users list hosts: `h1,h2:gpus=4`, or a file with one host per line."""

from pathlib import Path

from lp_pipe.launch.engines.base import HostOffer

_LIMITS = ("cpus", "gpus", "memory_gib")
_LABEL = "label="


def read_hosts(text: str) -> list[HostOffer]:
    """Read `NAME[:LIMIT=N]...[:label=L]...`, separated by commas, or a file with one host per line and # comments.

    The limits are cpus, gpus and memory_gib. An IPv6 address is written in brackets.

    Raises:
        ValueError: the text is neither, names a host twice, or names no host.
    """
    found = [_read_host(part) for part in _parts(text)]
    names = [offer.name for offer in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"hosts={text!r} names {', '.join(twice)} twice: name each host once, since it has one agent")
    if not found:
        raise ValueError(
            f"hosts={text!r} names no host: write h1,h2:gpus=4 or the name of a file with one host per line"
        )
    return found


def _parts(text: str) -> list[str]:
    path = Path(text)
    if "/" in text or path.is_file():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"hosts={text!r}: cannot read this file: {error.strerror}") from error
        return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_host(part: str) -> HostOffer:
    if part.startswith("["):
        name, _, rest = part[1:].partition("]")
        rest = rest.removeprefix(":")
    else:
        name, _, rest = part.partition(":")
    options = [option for option in rest.split(":") if option]
    labels = frozenset(option.removeprefix(_LABEL).strip() for option in options if option.startswith(_LABEL))
    limits = dict(_read_limit(part, option) for option in options if not option.startswith(_LABEL))
    if not name or name.startswith("-"):
        raise ValueError(f"hosts: {part!r} has no host name: write NAME or NAME:gpus=4")
    memory = limits.get("memory_gib")
    if "" in labels:
        raise ValueError(f"hosts: {part!r} has an empty label: write for example label=fast")
    return HostOffer(name, limits.get("cpus"), limits.get("gpus"), None if memory is None else memory << 30, labels)


def _read_limit(part: str, limit: str) -> tuple[str, int]:
    name, _, number = limit.partition("=")
    if name not in _LIMITS or not number.isdigit():
        raise ValueError(f"hosts: {part!r}: {limit!r} must be {', '.join(f'{one}=N' for one in _LIMITS)} or label=L")
    return name, int(number)
