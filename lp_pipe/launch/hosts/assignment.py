"""The part of a program that an agent is given to run: the nodes of its host, and their surroundings."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lp_pipe.launch.plan.launch_plan import LaunchPlan
from lp_pipe.launch.plan.placement import Placement
from lp_pipe.launch.plan.spec import NodeSpec
from lp_pipe.launch.plan.surroundings import Surroundings
from lp_pipe.nodes import PyNode


@dataclass(frozen=True)
class Assignment:
    """payloads: of each node, by node_id; an agent does not look into them.

    run, silence_s: what its processes are members of, see run_endpoints.RunMember. preload, orphan_s: see Template.
    """

    run: str
    program: str
    nodes: tuple[NodeSpec, ...]
    payloads: Mapping[str, bytes]
    places: Mapping[str, Placement]
    run_dir: str
    grace_s: float
    surroundings: Surroundings
    preload: tuple[str, ...]
    orphan_s: float
    silence_s: float

    def plan(self) -> LaunchPlan:
        """The part of the program that runs on one host."""
        return LaunchPlan(self.program, self.nodes, (), {}, Path(self.run_dir), self.grace_s)


def without_code(nodes: Iterable[NodeSpec]) -> tuple[NodeSpec, ...]:
    """Return the specs without the nodes themselves, which are only unpickled in their own processes."""
    return tuple(dataclasses.replace(spec, node=PyNode(_elsewhere)) for spec in nodes)


def _elsewhere() -> None:
    raise AssertionError("an agent runs no node itself")
