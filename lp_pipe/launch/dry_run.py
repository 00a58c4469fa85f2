"""Describe what a launch would do, without starting a node: hosts, resources, and the channels between nodes."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lp_pipe.channels import kinds
from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.launch.engines import HostOffer, Invitation
from lp_pipe.launch.hosts.edges import check_channels, check_channels_of_one_host, host_of
from lp_pipe.launch.hosts.host_join import MultiHostOptions
from lp_pipe.launch.hosts.joined_hosts import join_hosts
from lp_pipe.launch.hosts.source_tree import SourceTree
from lp_pipe.launch.options import LaunchOptions
from lp_pipe.launch.plan.hardware import Hardware, this_host
from lp_pipe.launch.plan.host_placement import HostPlacement, place_on_hosts
from lp_pipe.launch.plan.launch_plan import LaunchPlan, make_plan, serialize_nodes
from lp_pipe.launch.plan.placement import place_all, place_with_room
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.program import Program

_KNOWN_AT_THE_START = ["", "# Chosen at the start: names, the launcher's address and port, the secret."]


def describe_launch(program: Program, mode: str, folder: Path, options: LaunchOptions) -> list[str]:
    """Return the plan as lines of text. In multi_host mode agents join, tell what their hosts have, and end again.

    An engine that can show what it would start (`Engine.preview`) starts nothing; its text follows the plan.

    folder: for the agents' output.

    Raises: as `launch`.
    """
    plan = make_plan(program, folder, 0.0)
    if mode != "multi_host":
        check_channels_of_one_host(plan.edges)
    if mode == "thread":
        return [f"{len(plan.nodes)} nodes as threads of this process", *_edges(plan, {})]
    serialize_nodes(plan)
    if mode == "process":
        here = place_with_room(plan.nodes, lambda spec: spec.may_wait, lambda some: place_all(some, this_host()))
        places = {node_id: HostPlacement("this host", place) for node_id, place in here.items()}
        return [*_nodes(places), *_waiting(plan, places), *_edges(plan, places)]
    of_hosts = MultiHostOptions.of(options)
    engine, carrier = of_hosts.engine, of_hosts.carrier
    tree = [] if of_hosts.tree is None else _sources(of_hosts.tree)
    launcher = f"{options.listen.partition('@')[0] or 'LAUNCHER'}:0"
    preview = engine.preview(Invitation([launcher], b"", f"{program.name}/agents", options.interface, carrier))
    if preview is not None:
        promised = {offer.name: _promised(offer) for offer in engine.hosts()}
        nodes, remark = _without_labels(plan.nodes)
        places = place_on_hosts(nodes, promised)
        check_channels(plan.edges, places, carrier)
        edges = _edges(plan, places, carrier)
        return [
            *_nodes(places),
            *_waiting(plan, places),
            *remark,
            *edges,
            *tree,
            *_KNOWN_AT_THE_START,
            *preview.splitlines(),
        ]
    joined = join_hosts(plan, of_hosts, generate_credentials())
    joined.host_join.close(patience_s=3.0)
    return [*_nodes(joined.places), *_waiting(plan, joined.places), *_edges(plan, joined.places, carrier), *tree]


def _promised(offer: HostOffer) -> Hardware:
    """Return the hardware that the offer promises. What it does not say is assumed to be as on this host."""
    here = this_host()
    cpus = here.cpus if offer.cpus is None else tuple(range(offer.cpus))
    memory = here.memory_bytes if offer.memory is None else offer.memory
    return Hardware(frozenset({offer.name}), cpus, memory, tuple(map(str, range(offer.gpus or 0))), offer.labels)


def _without_labels(nodes: Sequence[NodeSpec]) -> tuple[list[NodeSpec], list[str]]:
    """Return the nodes without the labels they ask for, since the future hosts' labels are unknown, and a remark."""
    free = [dataclasses.replace(one, resources=dataclasses.replace(one.resources, host_labels=())) for one in nodes]
    asking = dict.fromkeys(one.label for one in nodes if one.resources.host_labels)
    remark = (
        f"# Assumes that every host has the labels that {', '.join(asking)} want; known only once agents have joined."
    )
    return free, [remark] if asking else []


def _sources(tree: SourceTree) -> list[str]:
    size = sum(file.size for file in tree.files)
    return [f"sources: {len(tree.files)} files, {size} bytes of {tree.root}; each host gets those that it lacks"]


def _nodes(places: Mapping[str, HostPlacement]) -> Iterator[str]:
    width = max(map(len, places), default=0)
    for node_id, found in places.items():
        gpus = f"  GPUs {','.join(found.place.gpus)}" if found.place.gpus else ""
        cpus = f"  cores {','.join(map(str, found.place.cpus))}" if found.place.cpus else ""
        yield f"{node_id:<{width}}  {found.host}{gpus}{cpus}"


def _waiting(plan: LaunchPlan, places: Mapping[str, HostPlacement]) -> Iterator[str]:
    if left_out := [spec.node_id for spec in plan.nodes if spec.node_id not in places]:
        yield f"# No room for {', '.join(left_out)}: the program begins without them; they wait for hosts that join it."


def _edges(plan: LaunchPlan, places: Mapping[str, HostPlacement], transport: str = "tls") -> Iterator[str]:
    for edge in plan.edges:
        kind = _channel(edge.channel, edge.user, edge.server, places, transport) if edge.channel else ""
        yield f"{edge.user} -> {edge.server}  {f'channel {kind}' if kind else 'calls'}"


def _channel(kind: str, source: str, target: str, places: Mapping[str, HostPlacement], transport: str) -> str:
    is_near = host_of(source, places) == host_of(target, places)
    if kind == "auto":
        near = "shm" if places else "inproc"
        return near if is_near else transport
    return kind if is_near or kinds.named(kind).is_encrypted else f"{kind} (not encrypted)"
