"""lp_pipe/rpc/slotted.py"""

import enum
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import lp_pipe as lp

T = TypeVar("T")


class Server:
    def back(self, value: Any) -> Any:
        return value

    def has_dict(self, value: Any) -> bool:
        return hasattr(value, "__dict__")


def test_classes_with_slots_that_a_script_defines_go_to_a_node_and_back(launched: Any) -> None:
    # In the node they had no slots any more, and what came back did not load: "object has no attribute '__dict__'".
    @dataclass(slots=True)
    class Step:
        number: int
        losses: list[float]

    @dataclass(slots=True, weakref_slot=True)
    class Watched:
        name: str

    class Base:
        __slots__ = "single"

        def __init__(self) -> None:
            self.single = 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Base) and self.single == other.single

    class Private(Base):
        __slots__ = ("__hidden",)

        def __init__(self) -> None:
            super().__init__()
            self.__hidden = 2

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Private) and self.__hidden == other.__hidden and super().__eq__(other)

    class WithDict(Base):
        __slots__ = ("__dict__",)

    Pair = namedtuple("Pair", "one other")

    class Named(NamedTuple):  # "Cannot overwrite NamedTuple attribute __slots__"
        one: int
        other: str = "default"

    class Typed(NamedTuple, Generic[T]):
        one: T

    class OfNamed(Named):
        __slots__ = ()

    @dataclass(slots=True)
    class Item(Generic[T]):
        one: T

    class Colour(enum.Enum):
        RED = 1

    with_dict = WithDict()
    with_dict.more = 3
    program = lp.Program("slots")
    server = program.add_node(lp.CourierNode(Server), label="server")
    client = launched(program, "process").client(server)
    more = [Named(1), Typed(1.5), OfNamed(2, "b"), Item("c")]
    for value in [Step(1, [0.5]), Watched("a"), Base(), Private(), with_dict, Pair(1, 2), Colour.RED, *more]:
        returned = client.back(value)
        assert type(returned) is type(value) and returned == value
        assert client.has_dict(value) == hasattr(value, "__dict__"), value
    assert client.back(with_dict).more == 3
