"""The members of one generation of a group of nodes, in rank order."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Membership:
    """The live nodes of a group at the moment at which all of them had asked to meet (`NodeServices.meet`).

    generation: grows with each change of the group's members.
    rank: of this node.
    members: node ids, in rank order.
    endpoints: what each member gave to `meet`, in rank order.
    finished: nodes of the group whose code had ended by then, without a failure.
    """

    group: str
    generation: int
    rank: int
    members: tuple[str, ...]
    endpoints: tuple[bytes, ...]
    finished: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.members)

    def of_subgroup(self, ranks: Sequence[int]) -> "Membership":
        """Return the members with these ranks, this node among them, with endpoints that no other group has."""
        name = f"subgroup {list(ranks)}"
        return Membership(
            f"{self.group}, {name}",
            self.generation,
            ranks.index(self.rank),
            tuple(self.members[rank] for rank in ranks),
            tuple(name.encode() + self.endpoints[rank] for rank in ranks),
        )
