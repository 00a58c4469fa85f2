"""The plan of a launch: every process or thread with its node, resources and addresses. Nothing is started here."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lp_pipe.errors import LpPipeError, SerializationError
from lp_pipe.launch.plan import absl_flags
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.nodes import Colocation, MultiProcessingColocation, Node
from lp_pipe.program import Edge, GroupOptions, Program
from lp_pipe.rpc import codec
from lp_pipe.rpc.pickle_errors import find_unpicklable
from lp_pipe.telemetry.run_folder import RunFolder

_DATA_HINT = (
    "\nCreate it inside the node instead: in its constructor, with lp_pipe.Deferred(ctor, ...), or, if it is a layer "
    "of a pipeline, with pp.Layer(ctor, ...)."
)


@dataclass(frozen=True)
class LaunchPlan:
    """A whole program, ready to be started in the folder `run_dir`.

    setup: a function that every process of the program calls first.
    """

    program: str
    nodes: tuple[NodeSpec, ...]
    edges: tuple[Edge, ...]
    owners: Mapping[str, str]  # address id -> node_id
    run_dir: Path
    grace_s: float
    setup: Callable[[], Any] | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.run_dir)

    def owner_of(self, address: str) -> str:
        """Return the node_id of the node that listens at this address.

        Raises:
            RuntimeError: no node does.
        """
        if address not in self.owners:
            raise RuntimeError(
                f"an address must be assigned to a node of program {self.program!r} before launch: address.assign(node)"
            )
        return self.owners[address]


def make_plan(program: Program, run_dir: Path, grace_s: float, setup: Callable[[], Any] | None = None) -> LaunchPlan:
    """Validate the graph and list its processes and threads.

    Raises:
        ValueError: the program has no nodes, an empty MultiProcessingColocation, a handle of a node of another program,
            or groups that are colocated with each other in a ring.
        TypeError: a node's constructor does not take the node's arguments.
    """
    if not program.get_all_nodes():
        raise ValueError(f"program {program.name!r} has no nodes: add some before launch")
    for node in program.get_all_nodes():
        node.check_arguments()
    _check_colocations({label: program.options(label).resources.colocate_with for label in program.groups})
    edges = tuple(program.edges())
    specs = tuple(
        spec
        for label, nodes in program.groups.items()
        for node in nodes
        for spec in expand(_spec_of(node, program.options(label), group_size=len(nodes)))
    )
    owners = {address: spec.node_id for spec in specs for address in spec.addresses}
    return LaunchPlan(program.name, specs, edges, owners, run_dir, grace_s, setup)


def _check_colocations(bases: Mapping[str, str | None]) -> None:
    for label in bases:
        chain = [label]
        while (base := bases[chain[-1]]) is not None:
            if base not in bases:
                raise ValueError(
                    f"group {chain[-1]!r} has Resources(colocate_with={base!r}), which must be one of the "
                    f"program's groups {', '.join(bases)}"
                )
            if base in chain:
                raise ValueError(
                    f"groups are colocated in a ring: {' with '.join([*chain, base])}: remove one colocate_with"
                )
            chain.append(base)


def _spec_of(node: Node[Any], options: GroupOptions, group_size: int) -> NodeSpec:
    return NodeSpec(
        node_id=node.name,
        label=node.label,
        index=node.index,
        group_size=group_size,
        node=node,
        resources=options.resources,
        on_failure=options.on_failure,
        max_restarts=options.max_restarts,
        on_hang=options.on_hang,
        least_nodes=options.least_nodes,
        least_started=options.least_started,
    )


def serialize_nodes(plan: LaunchPlan) -> dict[str, bytes]:
    """Pickle the node of every process, by node_id, so that one that does not pickle fails before any is started.

    Raises:
        SerializationError: a part of a node does not pickle; the message names the node, the path to the part and its
            type. Or the plan's setup does not pickle.
        ValueError: a node has captured a handle of a node of another program.
    """
    absl_flags.name_in_pickles()
    _check_setup(plan.setup)
    return {spec.node_id: _serialize(spec, plan) for spec in plan.nodes}


def _check_setup(setup: Callable[[], Any] | None) -> None:
    try:
        codec.dumps(setup)
    except Exception as error:
        raise SerializationError(
            f"setup={setup!r} cannot be sent to the nodes: {type(error).__name__}: {error}\n"
            "Create what does not pickle inside the function."
        ) from error


def _serialize(spec: NodeSpec, plan: LaunchPlan) -> bytes:
    with codec.collecting_handles() as handles:
        try:
            data = codec.dumps_in_turn([plan.setup, (spec.node, spec.resources)])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's __getstate__ may raise anything, even SystemExit
            raise _unpicklable(spec, error) from error
    for handle in handles:
        for address in handle.addresses:
            if address.id not in plan.owners:
                raise ValueError(
                    f"node {spec.name} has captured a handle of {handle.node_name}, which is not in program "
                    f"{plan.program!r}: handles work only between nodes of one program"
                )
    return data


def _unpicklable(spec: NodeSpec, error: BaseException) -> LpPipeError:
    for name, part in spec.node.launch_parts():
        culprit = find_unpicklable(part, f"{spec.path}{name}", codec.encode_by_value)
        if culprit is not None:
            return SerializationError(
                f"{spec.name}: {culprit.path} of type {culprit.type_name} does not pickle: {culprit.error}"
                f"{culprit.code_hint or _DATA_HINT}"
            )
    return SerializationError(f"{spec.name}: {spec.path}the node cannot be pickled: {type(error).__name__}: {error}")


def expand(spec: NodeSpec) -> list[NodeSpec]:
    """Return the processes of one node of the program, each address given to exactly one of them.

    A MultiProcessingColocation is replaced by its inner nodes. One inside a MultiThreadingColocation stays, as the
    thread that waits for its inner nodes.

    Raises:
        ValueError: a MultiProcessingColocation has no inner nodes.
    """
    parts = list(_parts(spec))
    owners = {address.id: parts[0].node_id for address in spec.node.addresses}
    for part in parts:  # inner nodes come after the one around them: its addresses include theirs
        owners.update({address.id: part.node_id for address in part.node.addresses})
    return [
        dataclasses.replace(part, addresses=tuple(id for id, owner in owners.items() if owner == part.node_id))
        for part in parts
    ]


def _parts(spec: NodeSpec) -> Iterator[NodeSpec]:
    node = spec.node
    if isinstance(node, MultiProcessingColocation):
        yield from _inner_nodes(spec, node)
        return
    yield spec
    if isinstance(node, Colocation):
        yield from _beside(spec, node)


def _inner_nodes(spec: NodeSpec, colocation: MultiProcessingColocation) -> Iterator[NodeSpec]:
    colocation.check()
    colocation.inner_id = spec.node_id
    for place, child in enumerate(colocation.children):
        inner = dataclasses.replace(
            spec,
            node_id=f"{spec.node_id}.{place}",
            node=child,
            path=f"{spec.path}{colocation.path_to(place)}: ",
            # Retries of the colocation start its inner nodes again, so they multiply with those around it.
            retries=(spec.retries + 1) * (colocation.num_retries_on_failure + 1) - 1,
        )
        yield from _parts(inner)


def _beside(spec: NodeSpec, threads: Colocation) -> Iterator[NodeSpec]:
    """Yield the processes of MultiProcessingColocations among the threads of a colocation, at any depth."""
    for place, child in enumerate(threads.children):
        inner = dataclasses.replace(
            spec, node_id=f"{spec.node_id}.{place}", node=child, path=f"{spec.path}{threads.path_to(place)}: "
        )
        if isinstance(child, MultiProcessingColocation):
            yield from _inner_nodes(inner, child)
        elif isinstance(child, Colocation):
            yield from _beside(inner, child)
