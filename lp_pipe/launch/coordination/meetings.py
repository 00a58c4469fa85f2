"""The meetings of the program's groups: the members of each group now, and the end of each generation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from lp_pipe.errors import Unavailable
from lp_pipe.launch.coordination.directory import Settlement
from lp_pipe.launch.coordination.node_group import NodeRecord
from lp_pipe.membership import Membership


@dataclass
class _Asked:
    generation: int
    endpoint: bytes
    future: "Future[Membership]"


@dataclass
class _GroupOfNodes:
    """The state of one group. generation: the last one that has met; -1 before the first."""

    records: list[NodeRecord]
    generation: int = -1
    members: frozenset[str] = frozenset()
    over: str = "it has not met yet"  # why the last generation is over; "" while it lasts
    asked: dict[str, _Asked] = field(default_factory=dict)
    watchers: "list[Future[str]]" = field(default_factory=list)


class Meetings:
    """The groups that have met or wait to. Not thread-safe: the coordinator holds its lock.

    nodes: all of the program, by node_id. why_stopping: returns why the program stops, or "" while it goes on.
    has_met: called with the group, its new generation and the members, in rank order.
    """

    def __init__(
        self,
        nodes: Mapping[str, NodeRecord],
        why_stopping: Callable[[], str],
        has_met: Callable[[str, int, Sequence[str]], None],
    ) -> None:
        self._nodes = nodes
        self._why_stopping = why_stopping
        self._has_met = has_met
        self._groups: dict[str, _GroupOfNodes] = {}
        self._changed: set[str] = set()  # groups in which a meeting may be complete now

    def ask(
        self, node_id: str, group: str, generation: int, endpoint: bytes, future: "Future[Membership]"
    ) -> list[Settlement]:
        """Note that a node asks to meet: `settled` gives it the membership once all live nodes of the group have asked.

        Raises:
            RuntimeError: the node is not in the group.
        """
        if node_id not in self._nodes or self._nodes[node_id].spec.label != group:
            raise RuntimeError(f"{node_id} cannot meet the members of group {group!r}: it is not one of its nodes")
        state = self._state(group)
        again = state.asked.pop(node_id, None)
        state.asked[node_id] = _Asked(generation, endpoint, future)
        self._changed.add(group)
        settlements = self._end_generation(state, f"node {node_id} asks to meet")
        if again is not None:
            settlements.append(Settlement(again.future, Unavailable(f"node {node_id} has asked to meet once more")))
        return settlements

    def watch(self, group: str, generation: int, over: "Future[str]") -> list[Settlement]:
        """Settle `over` with the reason once this generation of the group is over; at once if it is."""
        state = self._state(group)
        if state.generation == generation and not state.over:
            state.watchers.append(over)
            return []
        return [Settlement(over, state.over or f"group {group!r} has met again")]

    def leave(self, record: NodeRecord) -> list[Settlement]:
        """Note that a node's code has ended, or that nothing of it is left."""
        state = self._groups.get(record.spec.label)
        if state is None:
            return []
        node_id = record.spec.node_id
        asked = state.asked.pop(node_id, None)
        self._changed.add(record.spec.label)
        settlements = [] if asked is None else [Settlement(asked.future, Unavailable(f"node {node_id} has ended"))]
        if node_id in state.members:
            how = f"has failed: {record.error.summary}" if record.error is not None else "has ended"
            settlements += self._end_generation(state, f"node {node_id} {how}")
        return settlements

    def settled(self) -> list[Settlement]:
        """Return the outcomes of the meetings that the last changes have completed, or made impossible."""
        if reason := self._why_stopping():
            waiting = [asked for state in self._groups.values() for asked in state.asked.values()]
            for state in self._groups.values():
                state.asked.clear()
            return [Settlement(asked.future, Unavailable(reason)) for asked in waiting]
        changed, self._changed = self._changed, set()
        return [settlement for group in changed for settlement in self._met(group, self._groups[group])]

    def _met(self, group: str, state: _GroupOfNodes) -> Iterable[Settlement]:
        live = [record.spec.node_id for record in state.records if record.may_register]
        if not state.asked or any(node_id not in state.asked for node_id in live):
            return []
        members = tuple(node_id for node_id in live if node_id in state.asked)
        asked = [state.asked.pop(node_id) for node_id in members]
        state.generation = max(state.generation + 1, *(one.generation for one in asked))
        state.members, state.over = frozenset(members), ""
        self._has_met(group, state.generation, members)
        endpoints = tuple(one.endpoint for one in asked)
        finished = tuple(record.spec.node_id for record in state.records if record.state.word == "finished")
        return [
            Settlement(one.future, Membership(group, state.generation, rank, members, endpoints, finished))
            for rank, one in enumerate(asked)
        ]

    def _end_generation(self, state: _GroupOfNodes, reason: str) -> list[Settlement]:
        if state.over:
            return []
        state.over = reason
        watchers, state.watchers = state.watchers, []
        return [Settlement(watcher, reason) for watcher in watchers]

    def _state(self, group: str) -> _GroupOfNodes:
        if group not in self._groups:
            records = [record for record in self._nodes.values() if record.spec.label == group]
            if not records:
                raise RuntimeError(f"the program has no group {group!r}")
            self._groups[group] = _GroupOfNodes(records)
        return self._groups[group]
