"""Engines: whoever starts one agent on each host of a run; the table of those that there are."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lp_pipe.launch.engines.base import Engine as Engine
from lp_pipe.launch.engines.base import HostOffer as HostOffer
from lp_pipe.launch.engines.base import Invitation as Invitation
from lp_pipe.launch.engines.base import StartedAgent as StartedAgent

if TYPE_CHECKING:
    from lp_pipe.launch.engines.kubernetes import KubernetesEngine as KubernetesEngine
    from lp_pipe.launch.engines.local import LocalEngine as LocalEngine
    from lp_pipe.launch.engines.manual import ManualEngine as ManualEngine
    from lp_pipe.launch.engines.ray import RayEngine as RayEngine
    from lp_pipe.launch.engines.slurm import SlurmEngine as SlurmEngine
    from lp_pipe.launch.engines.ssh import SshEngine as SshEngine

ENTRY_POINTS = "lp_pipe.engines"

# An engine's class, in the module that has the engine's name: imported when somebody names it.
BUILT_IN = {
    "local": "LocalEngine",
    "ssh": "SshEngine",
    "manual": "ManualEngine",
    "slurm": "SlurmEngine",
    "ray": "RayEngine",
    "kubernetes": "KubernetesEngine",
}


def engine_names() -> list[str]:
    """Ours, and those that installed packages bring."""
    return [*BUILT_IN, *sorted(_from_outside())]


def engine_class(name: str) -> type[Engine]:
    """The engine of that name, which is imported now.

    Raises:
        ValueError: there is none; names those that there are.
    """
    if name in BUILT_IN:
        return _built_in(name)
    outside = _from_outside()
    if name not in outside:
        raise ValueError(f"unknown engine {name!r}; known are {', '.join(engine_names())}")
    found = outside[name]()
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ValueError(f"engine {name!r}: the entry point in {ENTRY_POINTS!r} names {found!r}, which is no Engine")
    return found


def make_engine(name: str, hosts: str, options: Mapping[str, str]) -> Engine:
    """An engine as the command line describes it; options that are not given are left out.

    Raises:
        ValueError: no such engine, an option that it does not have, or hosts that it cannot read.
    """
    kind = engine_class(name)
    for option in options:
        if option not in kind.OPTIONS:
            known = ", ".join(kind.OPTIONS) or "none"
            raise ValueError(f"engine {name!r} has no option {option!r}; its options: {known}")
    return kind(hosts, **options)


def _built_in(name: str) -> type[Engine]:
    kind: type[Engine] = getattr(import_module(f"{__name__}.{name}"), BUILT_IN[name])
    return kind


def _from_outside() -> dict[str, Callable[[], object]]:
    import importlib.metadata  # takes longer than all of ours

    return {point.name: point.load for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for engine, kind in BUILT_IN.items():
            if kind == name:
                return _built_in(engine)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
