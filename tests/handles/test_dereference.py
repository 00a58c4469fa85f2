"""Handles become clients, wherever they hide in a node's arguments."""

import copy
import dataclasses
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lp_pipe as lp
from lp_pipe.handles import dereference, find_handles

WITHIN_S = 20.0


class Server:
    """Says its name."""

    def __init__(self, name: str = "server") -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Config:
    server: Any
    size: int = 3


def succeeds(mode: str, use: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run `use(*args)` as a node beside a server; {SERVER} in the arguments stands for the handle."""
    program = lp.Program("dereference")
    server = program.add_node(lp.CourierNode(Server), label="server")

    def run_and_stop(*args: Any, **kwargs: Any) -> None:
        use(*args, **kwargs)
        lp.stop()

    node = lp.PyNode(run_and_stop)
    node.configure(*(arg(server) for arg in args), **{key: arg(server) for key, arg in kwargs.items()})
    program.add_node(node, label="user")
    lp.launch(program, mode).wait(WITHIN_S)


def test_a_handle_among_the_arguments_arrives_as_a_client(mode: str) -> None:
    def use(server: Any, *, named: Any) -> None:
        assert isinstance(server, lp.CourierClient)
        assert server.name() == named.name() == "server"

    succeeds(mode, use, lambda handle: handle, named=lambda handle: handle)


def test_containers_are_searched_and_keep_their_types(mode: str) -> None:
    def use(*values: Any) -> None:
        a_list, a_tuple, a_pair, a_dict, ordered, default, config, deep = values
        assert [type(value) for value in values[:7]] == [list, tuple, Pair, dict, OrderedDict, defaultdict, Config]
        clients = [a_list[0], a_tuple[1], a_pair.left, a_dict["s"], ordered["s"], default["s"], config.server]
        clients.append(deep["a"][0][1].right["b"].server)
        for client in clients:
            assert client.name() == "server"
        assert (a_list[1], a_tuple[0], a_pair.right, config.size) == (1, 2, None, 3)
        assert default["new"] == []

    succeeds(
        mode,
        use,
        lambda handle: [handle, 1],
        lambda handle: (2, handle),
        lambda handle: Pair(handle, None),
        lambda handle: {"s": handle},
        lambda handle: OrderedDict(s=handle),
        lambda handle: defaultdict(list, s=handle),
        lambda handle: Config(handle),
        lambda handle: {"a": [(0, Pair(1, {"b": Config(handle)}))]},
    )


def test_captured_handles_are_dereferenced_by_hand(mode: str) -> None:
    class Holder:
        def __init__(self, handle: lp.CourierHandle) -> None:
            self.handle = handle

        def check(self) -> None:
            assert self.handle.dereference().name() == "server"

    program = lp.Program("captured")
    server = program.add_node(lp.CourierNode(Server), label="server")
    holder = Holder(server)

    def use(default: Any = server, *, by_name: Any = server) -> None:
        assert isinstance(server, lp.Handle)
        assert server.dereference().name() == default.dereference().name() == "server"
        assert by_name.dereference().name() == "server"
        holder.check()
        lp.stop()

    program.add_node(lp.PyNode(use), label="user")
    lp.launch(program, mode).wait(WITHIN_S)


def defaulting_to(server: Any) -> list[Callable[..., None]]:
    def by_place(server: Any = server) -> None: ...

    def by_name(*, server: Any = server) -> None: ...

    return [by_place, by_name]


def test_handles_among_a_functions_defaults_are_edges_of_the_graph() -> None:
    program = lp.Program("defaults")
    server = program.add_node(lp.CourierNode(Server), label="server")
    for function in defaulting_to(server):
        program.add_node(lp.PyNode(function), label="user")
    assert [(edge.user, edge.server) for edge in program.edges()] == [("user/0", "server/0"), ("user/1", "server/0")]


def test_the_callers_containers_are_left_as_they_were(mode: str) -> None:
    program = lp.Program("untouched")
    server = program.add_node(lp.CourierNode(Server), label="server")
    argument = {"servers": [server], "config": Config(server)}
    program.add_node(lp.PyNode(lambda _: lp.stop(), argument), label="user")
    lp.launch(program, mode).wait(WITHIN_S)
    assert argument["servers"] == [server]
    assert argument["config"].server is server  # type: ignore[attr-defined]


def test_what_holds_no_handle_is_passed_on_as_it_is() -> None:
    value = {"a": [1, (2,)], "c": Config(None)}
    assert dereference(value) is value


def test_cycles_of_containers_are_allowed() -> None:
    class Fake(lp.Handle[str]):
        def dereference(self) -> str:
            return "client"

    cyclic: list[Any] = [Fake()]
    cyclic.append(cyclic)
    cyclic.append({"up": cyclic})
    new = dereference(cyclic)
    assert new[0] == "client"
    assert new[1] is new
    assert new[2]["up"] is new
    assert isinstance(cyclic[0], Fake)


def test_handles_are_found_in_functions_partials_and_deferreds() -> None:
    import functools

    program = lp.Program("found")
    one, two, three, four = [program.add_node(lp.CourierNode(Server), label=f"s{i}") for i in range(4)]
    value = [lambda: one, functools.partial(print, two), lp.Deferred(print, [three]), (lambda x=four: x)]
    assert list(find_handles(value)) == [one, two, three, four]


def test_nodes_may_refer_to_each_other_and_to_themselves(mode: str) -> None:
    class Peer:
        def __init__(self, name: str, peers: list[Any]) -> None:
            self._name, self._peers = name, peers

        def name(self) -> str:
            return self._name

        def others(self) -> list[str]:
            return [peer.name() for peer in self._peers]

    program = lp.Program("cycle")
    first, second = lp.CourierNode(Peer), lp.CourierNode(Peer)
    handles = [program.add_node(node, label=f"peer{index}") for index, node in enumerate([first, second])]
    first.configure("first", handles)
    second.configure("second", peers=handles)
    with lp.launch(program, mode) as run:
        assert run.client("peer0").others() == ["first", "second"]
        assert run.client("peer1").others() == ["first", "second"]


# Deferred


class Expensive:
    """Counts how often it was built."""

    built = 0

    def __init__(self, server: Any, inner: Any = None) -> None:
        type(self).built += 1
        self.server, self.inner = server, inner


def test_a_deferred_is_built_in_the_node_and_once(mode: str) -> None:
    def use(first: Any, second: Any) -> None:
        assert first["it"] is second
        assert type(first["it"]).__name__ == "Expensive"
        assert second.server.name() == second.inner.server.name() == "server"

    program = lp.Program("deferred")
    server = program.add_node(lp.CourierNode(Server), label="server")
    deferred = lp.Deferred(Expensive, server, inner=lp.Deferred(Expensive, server))

    def run_and_stop(*args: Any) -> None:
        use(*args)
        lp.stop()

    program.add_node(lp.PyNode(run_and_stop, {"it": deferred}, deferred), label="user")
    lp.launch(program, mode).wait(WITHIN_S)


def test_a_failing_deferred_says_where_it_was_declared(mode: str) -> None:
    program = lp.Program("failing")
    program.add_node(lp.PyNode(print, lp.Deferred(int, "not a number")), label="user")
    with pytest.raises(lp.NodeError) as info:
        lp.launch(program, mode).wait(WITHIN_S)
    text = str(info.value)
    assert "Deferred" in info.value.message
    assert re.search(rf"{Path(__file__).name}:\d+", info.value.message)
    assert "invalid literal for int" in text


def test_any_keyword_may_go_to_a_deferred() -> None:
    assert dereference([lp.Deferred(dict, self=1, ctor=2, args=3)]) == [{"self": 1, "ctor": 2, "args": 3}]


# Handles by hand


def test_a_handle_is_no_client_and_says_what_to_do() -> None:
    program = lp.Program("handle")
    handle = program.add_node(lp.CourierNode(Server), label="server")
    with pytest.raises(AttributeError, match=r"server/0.*'name'.*dereference"):
        handle.name()
    with pytest.raises(RuntimeError, match="server/0"):
        handle.dereference()
    assert not hasattr(handle, "__len__")
    assert "server/0" in repr(handle)


def test_handles_can_be_copied_and_pickled() -> None:
    program = lp.Program("copies")
    handle = program.add_node(lp.CourierNode(Server), label="server")
    for copied in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert repr(copied) == repr(handle)
        assert [address.id for address in copied.addresses] == [address.id for address in handle.addresses]


def test_client_options_of_the_node_and_of_the_handle(mode: str) -> None:
    class Slow:
        def slow(self) -> None:
            lp.wait_for_stop()

    program = lp.Program("options")
    node = lp.CourierNode(Slow, courier_client_kwargs={"call_timeout": 0.05})
    quick = program.add_node(node, label="server")
    patient = node.create_handle()
    patient.set_client_kwargs(call_timeout=0.1)
    with lp.launch(program, mode) as run:
        with pytest.raises(lp.DeadlineExceeded, match=r"slow.*0\.05"):
            run.client(quick).slow()
        with pytest.raises(lp.DeadlineExceeded, match=r"slow.*0\.1"):
            run.client(patient).slow()


def test_the_handle_of_a_node_that_serves_nothing_says_so(mode: str) -> None:
    program = lp.Program("plain")
    handle = program.add_node(lp.PyNode(lp.wait_for_stop), label="plain")
    with pytest.raises((NotImplementedError, TypeError), match=r"plain/0|dereference"):
        handle.dereference()
    program.add_node(lp.PyNode(print, handle), label="user")
    with pytest.raises(lp.NodeError, match=r"user/0[\s\S]*plain/0"):
        lp.launch(program, mode).wait(WITHIN_S)


@pytest.mark.parametrize("where", ["argument", "container", "closure", "attribute"])
def test_the_handle_of_another_program_is_refused_with_the_name_of_its_user(mode: str, where: str) -> None:
    foreign = lp.Program("other").add_node(lp.CourierNode(Server), label="stranger")

    class Holder:
        def __init__(self) -> None:
            self.handle = foreign

        def __call__(self) -> None:
            self.handle.dereference().name()

    nodes = {
        "argument": lp.PyNode(print, foreign),
        "container": lp.PyNode(print, {"a": [Config(foreign)]}),
        "closure": lp.PyNode(lambda: foreign.dereference().name()),
        "attribute": lp.PyNode(Holder()),
    }
    program = lp.Program("mine")
    program.add_node(nodes[where], label="user")
    with pytest.raises((ValueError, RuntimeError), match="user/0"):
        lp.launch(program, mode).wait(WITHIN_S)
