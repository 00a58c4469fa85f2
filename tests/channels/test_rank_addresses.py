"""The addresses at which the ranks of a channel listen."""

from concurrent.futures import Future

import pytest

from lp_pipe.channels.rank_addresses import receiver_address, sender_address
from lp_pipe.connections import run_endpoints
from lp_pipe.connections.credentials import generate_credentials

FAR = "hosts:run|other host|unix:/nowhere|grpcs:127.0.0.1:7000"


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> run_endpoints.RunMember:
    """Make this process one of a host that others reach as `::2`."""
    found = run_endpoints.RunMember(
        "run", "this host", generate_credentials(), lambda address: Future(), "/nowhere", "tls:[::2]"
    )
    monkeypatch.setitem(run_endpoints._members, "run", found)
    return found


def test_processes_of_one_host_meet_at_the_loopback(member: run_endpoints.RunMember) -> None:
    near = FAR.replace("other host", member.host)
    for endpoint in ("inproc:x", "unix:/tmp/x", "grpc:127.0.0.1:7000", near):
        assert sender_address(endpoint) == "127.0.0.1"
    assert receiver_address("name:run/x", "127.0.0.1") == "127.0.0.1"


def test_between_hosts_of_a_run_each_listens_where_its_servers_do(member: run_endpoints.RunMember) -> None:
    assert sender_address(FAR) == "::2"
    assert receiver_address("name:run/x", "192.0.2.1") == "::2"


def test_without_a_run_it_is_the_address_from_which_the_other_end_is_reached() -> None:
    assert sender_address("grpcs:127.0.0.1:7000") == "127.0.0.1"
    assert sender_address("grpcs:[::1]:7000") == "::1"
    assert receiver_address("grpcs:127.0.0.1:7000", "::1") == "::1"


def test_where_there_is_no_way_an_oserror_says_so() -> None:
    with pytest.raises(OSError):
        sender_address("grpcs:no.such.host.invalid:7000")
