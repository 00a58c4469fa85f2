"""The first words of an agent: no pickle, and versions that must be alike."""

import dataclasses

import pytest

import lp_pipe as lp
from lp_pipe.launch.hosts.handshake import PROTOCOL, Joining, Versions, check_versions
from lp_pipe.launch.plan.hardware import this_host

OURS = Versions(protocol=PROTOCOL, python="3.11.9", lp_pipe="0.1.0", torch="2.13.0")
JOINING = Joining("h1", "10.0.0.1", 4711, OURS, this_host())


def test_what_an_agent_says_of_itself_comes_back_from_its_bytes() -> None:
    assert Joining.from_bytes(JOINING.to_bytes()) == JOINING


def test_an_agent_says_how_its_host_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LP_PIPE_HOST_LABELS", "fast,ib")
    joining = dataclasses.replace(JOINING, hardware=this_host())
    assert Joining.from_bytes(joining.to_bytes()).hardware.labels == {"fast", "ib"}


def test_releases_of_one_python_go_together() -> None:
    check_versions("h1", dataclasses.replace(OURS, python="3.11.2"), OURS, needs_torch=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": "3.12.1"}, "Python 3.12 there, 3.11 here"),
        ({"lp_pipe": "0.2.0"}, "lp_pipe 0.2.0 there, 0.1.0 here"),
        ({"torch": "2.12.1"}, "torch 2.12.1 there, 2.13.0 here"),
        ({"torch": None}, "torch none there, 2.13.0 here"),
    ],
)
def test_another_version_is_refused_with_both_in_the_message(change: dict[str, str], said: str) -> None:
    with pytest.raises(lp.LaunchError, match=f"host 'h1' has other versions than the launcher: {said}"):
        check_versions("h1", dataclasses.replace(OURS, **change), OURS, needs_torch=True)


def test_a_host_without_torch_does_for_programs_without() -> None:
    check_versions("h1", dataclasses.replace(OURS, torch=None), OURS, needs_torch=False)


def test_another_protocol_is_refused_before_anything_else_is_read() -> None:
    other = dataclasses.replace(JOINING, versions=dataclasses.replace(OURS, protocol=PROTOCOL + 1))
    said = f"host 'h1' speaks protocol {PROTOCOL + 1} of lp_pipe 0.1.0, the launcher protocol {PROTOCOL}"
    with pytest.raises(lp.LaunchError, match=said):
        Joining.from_bytes(other.to_bytes())


@pytest.mark.parametrize("data", [b"", b"\x80\x05pickle", b"[]", b'{"host": "h1"}', b'{"versions": 3}'])
def test_what_is_no_handshake_is_an_error_in_words(data: bytes) -> None:
    with pytest.raises(lp.LaunchError, match="first message of an agent"):
        Joining.from_bytes(data)
