"""The contract's section on handles and addresses, in every mode."""

import copy
import dataclasses
import pickle
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest

import lp_pipe as lp

Point = namedtuple("Point", ["x", "y"])


class Checked(namedtuple("Checked", ["x", "y"])):
    """A namedtuple whose constructor takes handles only."""

    def __new__(cls, x: lp.Handle[Any], y: lp.Handle[Any]) -> "Checked":
        if not isinstance(x, lp.Handle):
            raise TypeError(f"not a handle: {x}")
        return super().__new__(cls, x, y)


class Typed(NamedTuple):
    server: Any
    other: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    server: Any
    items: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    server: Any


class Server:
    def answer(self) -> int:
        return 42


def user_of(mode: str, make_argument: Any, look: Any) -> None:
    """Launch a server and a node that gets `make_argument(handle)` and must find it as `look` says."""
    program = lp.Program("handles")
    handle = program.add_node(lp.CourierNode(Server), label="server")

    def use(argument: Any) -> None:
        assert look(argument), argument
        lp.stop()

    program.add_node(lp.PyNode(use, make_argument(handle)), label="user")
    with lp.launch(program, mode, grace=2.0) as run:
        run.wait(30)


# Pairs of a function that puts a handle into a container, and one that tells whether a client is in its place.
CONTAINERS: list[tuple[Any, Any]] = [
    (lambda h: [[h]], lambda a: type(a) is list and a[0][0].answer() == 42),
    (lambda h: (1, (h,)), lambda a: type(a) is tuple and a[1][0].answer() == 42),
    (lambda h: Point(h, 1), lambda a: type(a).__name__ == "Point" and a.x.answer() == 42 and a.y == 1),
    (lambda h: Typed(h), lambda a: a.server.answer() == 42 and a.other == 3),
    (lambda h: Checked(h, h), lambda a: type(a).__name__ == "Checked" and a.x.answer() == a.y.answer() == 42),
    (lambda h: {"k": [h]}, lambda a: a["k"][0].answer() == 42),
    (
        lambda h: OrderedDict([("b", h), ("a", 1)]),
        lambda a: type(a) is OrderedDict and list(a) == ["b", "a"] and a["b"].answer() == 42,
    ),
    (lambda h: Frozen(h, [h]), lambda a: a.server.answer() == a.items[0].answer() == 42),
    (lambda h: Slotted((h,)), lambda a: a.server[0].answer() == 42),
]


def test_a_handle_in_a_container_arrives_as_a_client(mode: str) -> None:
    def make_arguments(handle: Any) -> list[Any]:
        return [make(handle) for make, _ in CONTAINERS]

    def look(arguments: list[Any]) -> bool:
        return all(is_right(argument) for argument, (_, is_right) in zip(arguments, CONTAINERS, strict=True))

    user_of(mode, make_arguments, look)


def test_cycles_through_every_container_are_allowed(mode: str) -> None:
    def in_list(handle: Any) -> Any:
        cycle: list[Any] = [handle]
        cycle.append(cycle)
        return cycle

    def in_tuple(handle: Any) -> Any:
        inner: list[Any] = [handle]
        inner.append((inner,))
        return inner[1]

    def in_dict(handle: Any) -> Any:
        cycle: dict[str, Any] = {"server": handle}
        cycle["self"] = [cycle]
        return cycle

    def in_dataclass(handle: Any) -> Any:
        cycle = Frozen(handle, [])
        cycle.items.append(cycle)
        return cycle

    user_of(mode, in_list, lambda a: a[1] is a and a[0].answer() == 42)
    user_of(mode, in_tuple, lambda a: a[0][1] is a and a[0][0].answer() == 42)
    user_of(mode, in_dict, lambda a: a["self"][0] is a and a["server"].answer() == 42)
    user_of(mode, in_dataclass, lambda a: a.items[0] is a and a.server.answer() == 42)


def test_the_callers_containers_are_untouched_in_every_mode(mode: str) -> None:
    program = lp.Program("handles")
    handle = program.add_node(lp.CourierNode(Server), label="server")
    mine = {"list": [handle], "frozen": Frozen(handle, [handle])}

    def use(argument: Any) -> None:
        argument["list"].append(argument["frozen"].server.answer())
        lp.stop()

    program.add_node(lp.PyNode(use, mine), label="user")
    with lp.launch(program, mode, grace=2.0) as run:
        run.wait(30)
    assert mine["list"] == [handle]
    assert mine["frozen"].server is handle and mine["frozen"].items == [handle]


def test_one_handle_that_is_passed_twice_gives_one_client(mode: str) -> None:
    user_of(mode, lambda h: [h, h], lambda a: a[0] is a[1])


def test_handles_in_attributes_and_closures_are_dereferenced_by_hand(mode: str) -> None:
    class Holder:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

    user_of(mode, Holder, lambda a: a.handle.dereference().answer() == 42)
    user_of(mode, lambda h: lambda: h.dereference(), lambda a: a().answer() == 42)


def test_a_copy_of_a_handle_is_as_good(mode: str) -> None:
    def copies(handle: Any) -> list[Any]:
        return [copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))]

    user_of(mode, copies, lambda clients: [client.answer() for client in clients] == [42] * 3)


def test_calling_a_handle_says_what_to_do() -> None:
    handle = lp.Program("p").add_node(lp.CourierNode(Server), label="server")
    with pytest.raises(AttributeError, match=r"(?s)^(?=.*dereference)(?=.*answer)"):
        handle.answer  # noqa: B018
    assert not hasattr(handle, "answer")


def test_dereferencing_too_early_is_a_runtime_error() -> None:
    handle = lp.Program("p").add_node(lp.CourierNode(Server), label="server")
    with pytest.raises(RuntimeError, match="launched"):
        handle.dereference()


def test_a_handle_without_a_client_fails_its_user_with_a_hint(mode: str) -> None:
    program = lp.Program("handles")
    nothing = program.add_node(lp.PyNode(int), label="nothing")
    program.add_node(lp.PyNode(print, nothing), label="user")
    with pytest.raises(lp.NodeError, match=r"(?s)user/0.*(dereference|nothing/0)"), lp.launch(program, mode) as run:
        run.wait(30)
    with pytest.raises((NotImplementedError, TypeError), match=r"dereference|nothing/0"):
        nothing.dereference()


def holder_of(handle: Any) -> Any:
    class Holder:
        def __init__(self) -> None:
            self.hidden = {"deep": [handle]}

        def __call__(self) -> None:
            self.hidden["deep"][0].dereference().answer()

    return Holder()


@pytest.mark.parametrize(
    "make_node",
    [
        lambda h: lp.PyNode(print, h),
        lambda h: lp.PyNode(print, {"a": (h,)}),
        lambda h: lp.PyNode(lambda: h.dereference().answer()),
        lambda h: lp.PyNode(holder_of(h)),
        lambda h: lp.CourierNode(Server, lp.Deferred(list, [h])),
    ],
    ids=["argument", "nested", "closure", "attribute", "deferred"],
)
def test_the_handle_of_a_stranger_is_refused_and_its_user_named(mode: str, make_node: Any) -> None:
    elsewhere = lp.Program("elsewhere")
    foreign = elsewhere.add_node(lp.CourierNode(Server), label="foreign")
    program = lp.Program("here")
    program.add_node(make_node(foreign), label="culprit")

    def whole_life() -> None:
        with lp.launch(program, mode, grace=2.0) as run:
            run.wait(30)

    with pytest.raises((ValueError, RuntimeError), match="culprit"):
        whole_life()


def test_an_address_stays_one_and_resolves_to_the_same_in_every_node(mode: str) -> None:
    address = lp.Address("mine")

    class Listener:
        def resolved(self) -> str:
            return address.resolve()  # captured

    def use(listener: Any, given: Any) -> None:
        assert isinstance(given, lp.Address) and given.name == "mine"
        assert given.resolve() == listener.resolved()
        assert 0 < lp.get_port_from_address(given.resolve()) < 65536
        lp.stop()

    program = lp.Program("addresses")
    node = lp.CourierNode(Listener)
    address.assign(node)
    address.assign(node)
    assert address in node.addresses
    listener = program.add_node(node, label="listener")
    program.add_node(lp.PyNode(use, listener, address), label="user")
    with pytest.raises(ValueError, match="assigned"):
        address.assign(lp.PyNode(int))
    with lp.launch(program, mode, grace=2.0) as run:
        run.wait(30)


def test_an_unassigned_address_says_assign(mode: str) -> None:
    program = lp.Program("addresses")
    address = lp.Address()
    program.add_node(lp.PyNode(lambda: address.resolve()), label="user")
    with pytest.raises(RuntimeError, match="assign"), lp.launch(program, mode, grace=2.0) as run:
        run.wait(30)
    with pytest.raises(RuntimeError):
        address.resolve()


@pytest.mark.parametrize("name", ["", "A", "1a", "a_b", "a-b", "aB", "a b", "ä", "a\n"])
def test_a_bad_name_of_an_address_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        lp.Address(name)
