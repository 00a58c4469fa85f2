"""The credentials of a run: one value that its processes get, and no other process."""

import pytest

from lp_pipe.connections.credentials import Credentials, generate_credentials


def test_they_travel_as_bytes() -> None:
    credentials = generate_credentials()
    assert Credentials.from_bytes(credentials.to_bytes()) == credentials


def test_every_run_has_its_own() -> None:
    one, other = generate_credentials(), generate_credentials()
    assert len({one.token, other.token}) == len({one.authority, other.authority}) == len({one.key, other.key}) == 2
    assert len(one.token) == 64


def test_they_do_not_show_in_logs() -> None:
    credentials = generate_credentials()
    assert credentials.token not in repr(credentials)
    assert repr(credentials) == "Credentials()"


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"token": "x", "authority": 1, "certificate": 2, "key": 3}'])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"these {len(data)} bytes are not the credentials"):
        Credentials.from_bytes(data)
