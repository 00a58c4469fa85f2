"""Classes and functions that a peer cannot import: made there as they are here, and themselves on the way back."""

import abc
import dataclasses
import datetime
import enum
import functools
import inspect
import sys
import threading
import uuid
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy
import pytest

import lp_pipe as lp
from lp_pipe.rpc import classes, codec

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


class Planet(enum.Enum):
    EARTH = (5.97e24, 6.38e6)
    MARS = (6.42e23, 3.4e6)

    def __init__(self, mass: float, radius: float) -> None:
        self.mass = mass
        self.density = mass / radius**3


class Labelled(enum.Enum):
    ONE = (1, "one")
    TWO = (2, "two")

    def __new__(cls, value: int, label: str) -> Any:
        member = object.__new__(cls)
        member._value_ = value
        member.label = label  # type: ignore[attr-defined]
        return member

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.ONE


class Word(str, enum.Enum):  # noqa: UP042
    HELLO = "hello"
    ALSO_HELLO = "hello"


class Mode(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3


class Strict(enum.IntFlag, boundary=enum.STRICT):
    A = 1
    B = 2


class Auto(enum.StrEnum):
    FIRST = enum.auto()


class Day(datetime.date, enum.Enum):
    NEW_YEAR = 2026, 1, 1


class Operation(enum.Enum):
    ADD = enum.member(functools.partial(lambda one, other: one + other))  # Python 3.13 takes a bare one for a method


class ContainsAll(enum.EnumMeta):
    def __contains__(cls, member: object) -> bool:
        return True


class Anything(enum.Enum, metaclass=ContainsAll):
    IT = 1


ENUMS = [Planet, Labelled, Word, Mode, Strict, Auto, Day, Operation, Anything]


class Registered:
    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        if key in Registered.known:
            raise ValueError(f"{key} is registered twice")
        Registered.known[key] = cls


class First(Registered, key="first"): ...


class Meta(type):
    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: Any, body: Any, *, tag: str) -> Any:
        made = super().__new__(cls, name, bases, body)
        made.tag = tag  # type: ignore[attr-defined]
        cls.made.append(name)
        return made

    def __init__(cls, name: str, bases: Any, body: Any, *, tag: str) -> None: ...

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "locked":
            raise AttributeError("locked")
        super().__setattr__(name, value)

    def __bool__(cls) -> bool:
        return False


class Tagged(metaclass=Meta, tag="a"):
    locked = 5


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> float: ...


class Square(Shape):
    def area(self) -> float:
        return 4.0


class Counted:
    total = 0

    def count(self) -> int:
        Counted.total += 1
        return Counted.total


class Cached:
    @functools.cached_property
    def table(self) -> dict[str, int]:
        return {"a": 1}

    @functools.singledispatchmethod
    def kind(self, value: Any) -> str:
        return "any"

    @kind.register
    def _(self, value: int) -> str:
        return "int"

    @functools.lru_cache  # noqa: B019
    def two(self) -> int:
        return 2


@functools.singledispatch
def shown(value: Any) -> str:
    return f"<{value}>"


@shown.register
def _(value: list) -> str:  # type: ignore[type-arg]
    return "".join(shown(item) for item in value)


class ByValue:
    """Looks at what this module defines, in a process that cannot import it."""

    def back(self, value: Any) -> Any:
        return value

    def call(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def members(self) -> list[Any]:
        return [member for kind in ENUMS for member in kind.__members__.values()]

    def facts(self) -> dict[str, Any]:
        cached = Cached()
        return {
            "planet": (Planet.EARTH.mass, Planet(Planet.MARS.value) is Planet.MARS, Planet.MARS.density),
            "labelled": (Labelled.TWO.label, Labelled(2) is Labelled.TWO, Labelled(99) is Labelled.ONE),  # type: ignore[attr-defined]
            "word": (Word.ALSO_HELLO is Word.HELLO, Word.HELLO.upper(), Word("hello") is Word.HELLO),
            "mode": (Mode.READ | Mode.WRITE is Mode.BOTH, list(Mode), Mode.READ in Mode.BOTH),
            "strict": (Strict.A | Strict.B, list(Strict)),
            "others": (Auto.FIRST.value, Day.NEW_YEAR.year, Operation.ADD.value(1, 2), 7 in Anything),
            "registered": (sorted(Registered.known), Registered.known["first"] is First),
            "meta": (Tagged.tag, Tagged.locked, Meta.made),  # type: ignore[attr-defined]
            "shape": (Square().area(), inspect.isabstract(Shape)),
            "cached": (cached.table, cached.table is cached.table, cached.kind(1), cached.kind(""), cached.two()),
            "shown": shown([1, [2]]),
            "counted": [Counted().count() for _ in range(2)],
        }

    def register(self, name: str) -> list[str]:
        type(name, (Registered,), {}, key=name)
        return sorted(Registered.known)


@pytest.fixture
def by_value(launched: Any) -> Iterator[Any]:
    module = sys.modules[__name__]
    Counted.total = 0
    codec.ship_by_value([module])
    try:
        program = lp.Program("classes")
        server = program.add_node(lp.CourierNode(ByValue), label="server")
        yield launched(program, "process").client(server)
    finally:
        codec.ship_by_name([module])


def test_classes_and_functions_by_value_are_as_they_were_and_come_back_as_themselves(by_value: Any) -> None:
    there = by_value.facts()
    assert there == ByValue().facts()
    assert all(one is other for one, other in zip(by_value.members(), ByValue().members(), strict=True))
    for kind in [*ENUMS, Registered, First, Meta, Tagged, Shape, Square, Cached, Counted]:
        assert by_value.back(kind) is kind
    assert by_value.back(shown) is shown and by_value.back(Mode.BOTH) is Mode.BOTH

    assert by_value.register("second") == ["first", "second"]  # a class that the node makes is registered there
    assert sorted(Registered.known) == ["first"]

    by_value.back(Counted())  # neither side's class takes the attributes of the other's
    assert Counted.total == 2 and by_value.call(lambda: Counted().count()) == 3

    local = type("Local", (), {"__eq__": lambda self, other: type(self) is type(other)})
    assert by_value.back(local()) == local()
    assert by_value.call(lambda one, other: type(one) is type(other), local(), local())

    names: dict[str, Any] = {}
    exec("class Bare:\n    def three(self): return 3\ndef increased(value): return value + 1", names)
    names["increased"].__module__ = None  # as that of sympy.lambdify
    assert by_value.call(names["increased"], 1) == 2
    assert by_value.back(names["Bare"]) is names["Bare"]
    made = dataclasses.make_dataclass("Made", ["field"])
    assert by_value.back(made(1)) == made(1)


class LockedClass:
    lock = threading.Lock()
    calls = 0


def calls_of_locked_class() -> int:
    with LockedClass.lock:
        LockedClass.calls += 1
    return LockedClass.calls


def test_between_threads_classes_and_functions_are_shared(launched: Any) -> None:
    class Local:
        lock = threading.Lock()

    class LocalError(Exception):
        lock = threading.Lock()

    def fail() -> None:
        raise LocalError

    count = [1]
    module = sys.modules[__name__]
    codec.ship_by_value([module])
    try:
        program = lp.Program("shared")
        server = program.add_node(lp.CourierNode(ByValue), label="server")
        client = launched(program, "thread").client(server)
        assert isinstance(client.back(Local()), Local) and client.back(LockedClass) is LockedClass
        assert client.call(lambda: calls_of_locked_class()) == LockedClass.calls
        assert client.call(lambda: count.append(2)) is None and count == [1]  # data travels by value all the same
        with pytest.raises(LocalError):
            client.call(fail)
        with pytest.raises(lp.SerializationError, match=r"args\[1\]"):
            client.call(print, LockedClass.lock)
        large = numpy.ones(10_000)
        one, other, kind = client.back((large, large, Local))
        assert one is other and one is not large and kind is Local
        assert client.futures.back([Local, large]).result()[0] is Local
    finally:
        codec.ship_by_name([module])


def test_a_class_that_arrives_in_many_threads_at_once_is_made_once() -> None:
    class Local:
        def three(self) -> int:
            return 3

    data = codec.dumps(Local())
    made = renamed(data, Local)
    assert len({type(value) for value in made}) == 1 and all(value.three() == 3 for value in made)


def renamed(data: bytes, kind: type) -> list[Any]:
    """Load `data` in eight threads as a process does that has not had `kind` before."""
    tracked_as = classes.tracker_id(kind).encode()
    data = data.replace(tracked_as, uuid.uuid4().hex.encode())
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(codec.loads, [data] * 8))
