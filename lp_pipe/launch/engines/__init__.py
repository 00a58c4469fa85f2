"""The table of engines. An engine starts one agent on each host of a run."""

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

# By engine name, the class in the module of that name. The module is imported at the first use.
BUILT_IN = {
    "local": "LocalEngine",
    "ssh": "SshEngine",
    "manual": "ManualEngine",
    "slurm": "SlurmEngine",
    "ray": "RayEngine",
    "kubernetes": "KubernetesEngine",
}


def engine_names() -> list[str]:
    """Return the names of the built-in engines, then of those that installed packages add."""
    return [*BUILT_IN, *sorted(_from_outside())]


def engine_class(name: str) -> type[Engine]:
    """Import the engine of this name and return its class.

    Raises:
        ValueError: no engine has this name; the message lists the known ones.
    """
    if name in BUILT_IN:
        return _built_in(name)
    outside = _from_outside()
    if name not in outside:
        raise ValueError(f"unknown engine {name!r}: must be one of {', '.join(engine_names())}")
    found = outside[name]()
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ValueError(
            f"engine {name!r}: its entry point in group {ENTRY_POINTS!r} loads {found!r}, not a subclass of Engine"
        )
    return found


def make_engine(name: str, hosts: str, options: Mapping[str, str]) -> Engine:
    """Make an engine from what the command line says. `options` has only those that were given.

    Raises:
        ValueError: no such engine, an unknown option, or `hosts` that the engine cannot read.
    """
    kind = engine_class(name)
    for option in options:
        if option not in kind.OPTIONS:
            known = ", ".join(kind.OPTIONS) or "none"
            raise ValueError(f"engine {name!r} has no option {option!r}. Its options are: {known}")
    return kind(hosts, **options)


def _built_in(name: str) -> type[Engine]:
    kind: type[Engine] = getattr(import_module(f"{__name__}.{name}"), BUILT_IN[name])
    return kind


def _from_outside() -> dict[str, Callable[[], object]]:
    import importlib.metadata  # slow to import: takes longer than this whole module

    return {point.name: point.load for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for engine, kind in BUILT_IN.items():
            if kind == name:
                return _built_in(engine)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
