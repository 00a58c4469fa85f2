"""The base of the backends: the collective operations of one generation of a group."""

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lp_pipe.errors import Unavailable
from lp_pipe.membership import Membership
from lp_pipe.telemetry import waits

MISMATCH = "collective operations do not match"  # how the text of a CollectiveMismatch begins


class GenerationOver(Unavailable):
    """A member of the group is gone, or a node waits to join it: meet again (`Group.meet`)."""


class Call(NamedTuple):
    """The facts of one operation that must be the same on all ranks. root: -1 where there is none."""

    name: str
    op: str = ""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    root: int = -1

    @property
    def digest(self) -> int:
        return _digest(self)

    def __str__(self) -> str:
        facts = [self.op, str(self.dtype) if self.dtype else "", str(list(self.shape)) if self.dtype else ""]
        facts.append(f"root={self.root}" if self.root >= 0 else "")
        return f"{self.name}({', '.join(fact for fact in facts if fact)})"


@lru_cache(maxsize=4096)
def _digest(call: Call) -> int:
    text = repr(call).encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)  # fits 63 bits


def place_of_call() -> str:
    """Return the line of the user's code that has made the operation, "train.py:41 in step"; "" if there is none."""
    return waits.place_of(sys._getframe(1))


class Backend(ABC):
    """The collective operations of one generation of a group.

    Every rank makes the same calls in the same order, one at a time. Tensors are contiguous. An operation raises
    GenerationOver when a member is gone, and CollectiveMismatch when the ranks' calls differ. Results in other tensors
    than `input` are exact copies or sums. `call`: what is compared among the ranks, and shown, in place of what the
    arguments tell.

    is_exact: whether sums are made in rank order, ((x_0 + x_1) + x_2) …, in the tensors' dtype.
    is_authenticated: whether only members of the group can send what this rank receives.
    """

    is_exact: ClassVar[bool]
    is_authenticated: ClassVar[bool] = True

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.rank = membership.rank
        self.world_size = membership.world_size

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return new memory, in the group's own segment where there is one: its reduction copies nothing in."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = "sum", call: Call | None = None) -> None:
        """Put the "sum", "mean", "min" or "max" over the ranks in place of each rank's tensor."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, input: Tensor, op: str = "sum", call: Call | None = None) -> None:
        """Put part `rank` of the reduced `input`, which has world_size equal parts, into `output`."""

    @abstractmethod
    def all_gather(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        """Put the inputs of all ranks into `output`, in rank order."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, call: Call | None = None) -> None:
        """Put the tensor of rank `root` in place of each rank's."""

    @abstractmethod
    def all_to_all(self, output: Tensor, input: Tensor, call: Call | None = None) -> None:
        """Put part `rank` of the input of each rank k into part k of `output`."""

    @abstractmethod
    def barrier(self, call: Call | None = None) -> None:
        """Wait until all ranks have called this."""

    @abstractmethod
    def agree(self, value: int, call: Call | None = None) -> bool:
        """Return whether all ranks gave the same value. A rank that gets True knows that all have arrived."""

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> "Backend":
        """Return a backend of these ranks alone, which are in ascending order; only they call this, each once.

        It may wait for them. It has to be closed, too.

        Raises:
            GenerationOver: not all will come.
            ValueError: there are too many subgroups.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make calls in progress and later ones raise GenerationOver. May be called by any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the backend holds; the tensors of `empty` stay valid."""


Reduce = Callable[..., Tensor]
_REDUCING: dict[str, Reduce] = {"sum": torch.add, "mean": torch.add, "min": torch.minimum, "max": torch.maximum}


def reducing(op: str, dtype: torch.dtype) -> Reduce:
    """Return the function that reduces two tensors, for "mean" before the division.

    Raises:
        ValueError: there is no such operation for the dtype.
    """
    if op not in _REDUCING:
        raise ValueError(f"op must be one of {', '.join(_REDUCING)}, got {op!r}")
    if (op == "mean" and not (dtype.is_floating_point or dtype.is_complex)) or (op in "minmax" and dtype.is_complex):
        raise ValueError(f"there is no {op} of tensors of {dtype}")
    return _REDUCING[op]


def mismatch_text(members: Sequence[str], calls: Mapping[int, tuple[str, str]]) -> str:
    """Describe the calls of ranks that are in the same place of their order. calls: call and place, by rank."""
    by_call: dict[tuple[str, str], list[str]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(f"rank {rank} ({members[rank]})")
    described = [
        f"{', '.join(ranks)} called {call}{f' at {place}' if place else ''}" for (call, place), ranks in by_call.items()
    ]
    return f"{MISMATCH}: {'; '.join(described)}. All ranks must make the same calls in the same order"


def flat_view(tensor: Tensor) -> Tensor:
    """Return the tensor as it lies in memory, without its gradient."""
    return (tensor.detach() if tensor.requires_grad else tensor).view(-1)


def check_parts(name: str, whole: Tensor, part: Tensor, count: int) -> None:
    if whole.numel() != count * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{name}: one tensor must have {count} times the elements of the other and the same dtype, got "
            f"{whole.numel()} of {whole.dtype} and {part.numel()} of {part.dtype}"
        )


def check_root(root: int, count: int) -> None:
    if not 0 <= root < count:
        raise ValueError(f"broadcast: root must be a rank below {count}, got {root}")


def check_exchanged(output: Tensor, input: Tensor, count: int) -> None:
    if output.numel() != input.numel() or input.numel() % count:
        raise ValueError(
            f"all_to_all: input and output must have {count} equal parts, got {input.numel()} and {output.numel()} "
            "elements"
        )
