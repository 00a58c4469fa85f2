"""The values of --interface."""

import socket
from pathlib import Path

import pytest

from lp_pipe.launch.hosts import network
from lp_pipe.launch.hosts.network import address_of_interface


def test_an_interfaces_name_is_its_address() -> None:
    assert address_of_interface("lo") == "127.0.0.1"


def test_an_interface_without_ipv4_has_its_ipv6_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    numbers = {"fe800000000000000000000000000001": "20", "fd000000000000000000000000000002": "00"}
    table.write_text("".join(f"{address} 04 40 {scope} 80 dull0\n" for address, scope in numbers.items()))
    monkeypatch.setattr(network, "_IPV6_TABLE", table)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (4, "dull0")])
    assert address_of_interface("dull0") == "fd00::2"


def test_one_that_has_addresses_of_its_link_only_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "_IPV6_TABLE", tmp_path / "none")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(4, "dull0")])
    with pytest.raises(OSError, match=r"interface dull0 of host .* has no address that other hosts could use"):
        address_of_interface("dull0")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_an_address_of_this_host_is_meant_as_it_is(address: str) -> None:
    assert address_of_interface(address) == address


@pytest.mark.parametrize("name", ["eth77", "192.0.2.1"])
def test_what_is_neither_is_refused_with_the_interfaces_that_there_are(name: str) -> None:
    with pytest.raises(OSError, match=rf"--interface={name}: host .* has no such interface \(it has lo.*\), and no"):
        address_of_interface(name)
