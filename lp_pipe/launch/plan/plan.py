"""What a launch will start: every node with its place, resources and addresses. Nothing runs here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lp_pipe.errors import LpPipeError, SerializationError
from lp_pipe.launch.plan import absl_flags
from lp_pipe.launch.plan.expansion import expand
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.nodes import Node
from lp_pipe.program import Edge, GroupOptions, Program
from lp_pipe.rpc import codec
from lp_pipe.rpc.pickle_errors import find_unpicklable
from lp_pipe.telemetry.run_folder import RunFolder

_DATA_HINT = (
    "\nMake it inside the node instead: in its constructor, with lp_pipe.Deferred(ctor, ...), or, if it is a layer of "
    "a pipeline, with pp.Layer(ctor, ...)."
)


@dataclass(frozen=True)
class Plan:
    """A whole program, ready to be started under `run_dir`.

    setup: runs first in every process of the program.
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
        """The node_id of who is to listen there.

        Raises:
            RuntimeError: nobody is.
        """
        if address not in self.owners:
            raise RuntimeError("this address belongs to no node of the program: address.assign(node) before launch")
        return self.owners[address]


def make_plan(program: Program, run_dir: Path, grace_s: float, setup: Callable[[], Any] | None = None) -> Plan:
    """Validate the graph and lay out its nodes.

    Raises:
        ValueError: no nodes, an empty MultiProcessingColocation, a handle of a node that is not in the program, or
            groups that are to be on each other's hosts.
        TypeError: a node's constructor does not take the node's arguments.
    """
    if not program.get_all_nodes():
        raise ValueError(f"program {program.name!r} has no nodes: there is nothing to launch")
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
    return Plan(program.name, specs, edges, owners, run_dir, grace_s, setup)


def _check_colocations(bases: Mapping[str, str | None]) -> None:
    for label in bases:
        chain = [label]
        while (base := bases[chain[-1]]) is not None:
            if base not in bases:
                raise ValueError(
                    f"group {chain[-1]!r} has Resources(colocate_with={base!r}), but the program's groups are "
                    f"{', '.join(bases)}"
                )
            if base in chain:
                raise ValueError(f"groups are colocated with each other in a ring: {' with '.join([*chain, base])}")
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
    )


def serialize_nodes(plan: Plan) -> dict[str, bytes]:
    """Every process as bytes, by node_id; checks that all can travel before any is started.

    Raises:
        SerializationError: a part of a node does not pickle; names the node, the path to the part, and its type. Or
            the plan's setup does not.
        ValueError: a node has captured a handle of a node that is not in the program.
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
            "Make what does not pickle inside the function."
        ) from error


def _serialize(spec: NodeSpec, plan: Plan) -> bytes:
    with codec.collecting_handles() as handles:
        try:
            data = codec.dumps_in_turn([plan.setup, (spec.node, spec.resources)])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a user's pickling code raises: a __getstate__ may exit
            raise _unpicklable(spec, error) from error
    for handle in handles:
        for address in handle.addresses:
            if address.id not in plan.owners:
                raise ValueError(
                    f"node {spec.name} has captured a handle of {handle.node_name}, which is not in program "
                    f"{plan.program!r}; handles only work between nodes of one program"
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
