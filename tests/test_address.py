"""An address of the user's own: a name at setup, a free port in every node."""

import copy
import pickle
import socket
import threading
from typing import Any

import portpicker
import pytest

import lp_pipe as lp
from lp_pipe.launch.coordination.ports import Ports

WITHIN_S = 20.0


def test_a_server_of_ones_own_listens_where_others_look_for_it(mode: str) -> None:
    def serve(address: lp.Address) -> None:
        with socket.create_server(("127.0.0.1", lp.get_port_from_address(address.resolve()))) as server:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello")

    def connect(wheres: list[lp.Address]) -> None:
        host, port = wheres[0].resolve().split(":")
        while True:
            try:
                connection = socket.create_connection((host, int(port)))
                break
            except ConnectionRefusedError:
                assert not lp.wait_for_stop(0.01)
        with connection:
            assert connection.recv(5) == b"hello"

    address = lp.Address("web")
    program = lp.Program("address")
    server = lp.PyNode(serve, address)
    address.assign(server)
    program.add_node(server, label="server")
    program.add_node(lp.PyNode(connect, [address]), label="user")
    program.add_node(lp.PyNode(lambda: address.resolve() and None), label="captured")
    lp.launch(program, mode).wait(WITHIN_S)


def test_every_node_resolves_to_the_same_port_and_addresses_differ(mode: str) -> None:
    class Resolver:
        def __init__(self, *addresses: lp.Address) -> None:
            assert all(type(address) is lp.Address for address in addresses)
            self._addresses = addresses

        def resolve(self) -> list[str]:
            return [address.resolve() for address in self._addresses]

    one, two = lp.Address(), lp.Address("b2")
    program = lp.Program("resolve")
    nodes = [lp.CourierNode(Resolver, one, two) for _ in range(2)]
    one.assign(nodes[0])
    two.assign(nodes[0])
    for node in nodes:
        program.add_node(node, label=f"n{nodes.index(node)}")
    with lp.launch(program, mode) as run:
        first, second = run.client("n0").resolve(), run.client("n1").resolve()
    assert first == second
    assert len(set(first)) == 2
    assert one.name is None
    assert two.name == "b2"


def test_ports_come_from_portpicker(monkeypatch: pytest.MonkeyPatch) -> None:
    # portpicker asks the host's port server, if it has one: other programs there are not given the same port.
    picked = iter([50001, 50001, 50002])  # the first port is not bound yet when the second one is picked
    monkeypatch.setattr(portpicker, "pick_unused_port", lambda: next(picked))
    ports = Ports("::1")
    assert [ports.reserve(address) for address in ("one", "two", "one")] == [
        "[::1]:50001",
        "[::1]:50002",
        "[::1]:50001",
    ]

    def pick_none() -> int:
        raise portpicker.NoFreePortFoundError

    monkeypatch.setattr(portpicker, "pick_unused_port", pick_none)
    with pytest.raises(RuntimeError, match="::1"):
        ports.reserve("three")


@pytest.mark.parametrize("name", ["", "A", "1a", "a_b", "a-b", "a b", "ä"])
def test_names_are_lower_case_letters_then_digits(name: str) -> None:
    with pytest.raises(ValueError, match=r"\[a-z\]\[a-z0-9\]\*"):
        lp.Address(name)


def test_an_address_belongs_to_one_node() -> None:
    address, node = lp.Address("web"), lp.PyNode(print)
    address.assign(node)
    address.assign(node)
    assert node.addresses == [address]
    with pytest.raises(ValueError, match="already assigned"):
        address.assign(lp.PyNode(print))


def test_resolving_needs_a_launched_program_and_an_owner(mode: str) -> None:
    address, assigned = lp.Address("web"), lp.Address("port")
    with pytest.raises(RuntimeError, match=r"^Address\(web\) must be assigned"):
        address.resolve()
    assigned.assign(lp.PyNode(print))
    with pytest.raises(RuntimeError, match=r"Address\(port\).* inside a running node"):
        assigned.resolve()
    program = lp.Program("unassigned")
    program.add_node(lp.PyNode(lambda: address.resolve()), label="user")
    with pytest.raises(lp.NodeError, match="assign"):
        lp.launch(program, mode).wait(WITHIN_S)


def test_copies_stand_for_the_same_place_and_leave_the_owner_behind() -> None:
    address = lp.Address("web")
    node = lp.PyNode(print, threading.Lock())
    address.assign(node)
    copied: Any = pickle.loads(pickle.dumps(address))
    assert (copied.name, copied.id) == (address.name, address.id)
    assert copy.copy(address).id == address.id


def test_the_port_of_an_address() -> None:
    assert lp.get_port_from_address("127.0.0.1:80") == 80
    assert lp.get_port_from_address("[::1]:8080") == 8080
