"""The hosts that a plan names for nodes, among those that there are."""

from collections.abc import Mapping, Sequence

from lp_pipe.launch.plan.hardware import Hardware
from lp_pipe.launch.plan.spec import NodeSpec


def planned_hosts(nodes: Sequence[NodeSpec], hosts: Mapping[str, Hardware]) -> dict[str, str]:
    """By the name of the node of the program; not of those for which nobody has planned any.

    What a group's `Resources` say of where its nodes go comes first.

    Raises:
        ValueError: a host is not there; names all such, and who was to run there.
    """
    found: dict[str, str] = {}
    missing: dict[int | str, list[str]] = {}
    for spec in nodes:
        wanted = spec.node.planned_host
        if wanted is None or spec.resources.says_where:
            continue
        host = _host(wanted, hosts)
        if host is None:
            missing.setdefault(wanted, []).append(spec.name)
        else:
            found[spec.name] = host
    if missing:
        told = "; ".join(f"host {wanted!r} for {', '.join(names)}" for wanted, names in missing.items())
        there = ", ".join(f"{place}: {name}" for place, name in enumerate(hosts))
        raise ValueError(
            f"the plan names hosts that are not there: {told}. There are {there}: add them, or edit the plan"
        )
    return found


def _host(wanted: int | str, hosts: Mapping[str, Hardware]) -> str | None:
    if isinstance(wanted, int):
        return list(hosts)[wanted] if wanted < len(hosts) else None
    return next((name for name, hardware in hosts.items() if wanted in hardware.names), None)
