"""The decisions of the ray engine; test_ray_cluster.py has the real one."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.launch.engines import RayEngine
from lp_pipe.launch.engines.ray import AgentActor, RayAgent, distinct, first_words, import_ray, wanted

BIG, SMALL = {"CPU": 16.0, "GPU": 4.0}, {"CPU": 8.0}


@pytest.mark.parametrize(
    ("numbers", "count", "bundle"),
    [
        ({}, 3, {"CPU": 8}),
        ({"hosts": 2}, 2, {"CPU": 16, "GPU": 4}),
        ({"hosts": 2, "gpus_per_host": 0, "cpus_per_host": 1}, 2, {"CPU": 1}),
        ({"hosts": 5}, 5, {"CPU": 8}),  # the cluster may grow
    ],
)
def test_by_default_all_is_asked_for_that_as_many_hosts_have(
    numbers: dict[str, int], count: int, bundle: dict[str, int]
) -> None:
    assert wanted([SMALL, BIG, BIG], numbers) == (count, bundle)


def test_a_cluster_without_cores_is_an_error() -> None:
    with pytest.raises(lp.LaunchError, match="no host with cores"):
        wanted([], {})


def test_agents_of_one_host_have_names_of_their_own() -> None:
    assert distinct(["a", "b", "a"]) == ["a-1", "b", "a-2"]


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(lp.LaunchError, match=r"engine 'ray' needs Ray: pip install 'lp_pipe\[ray\]'"):
        import_ray()


@pytest.mark.parametrize(
    ("hosts", "options", "what"),
    [
        ("h1,h2", {}, "hosts must be a number, got 'h1,h2'"),
        ("0", {}, "at least 1"),
        ("", {"gpus_per_host": "many"}, "gpus_per_host must be a number, got 'many'"),
        ("", {"placement": "tight"}, "placement must be spread or pack, got 'tight'"),
    ],
)
def test_options_that_make_no_sense_are_refused(hosts: str, options: dict[str, str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        RayEngine(hosts, **options)


class _Ray:
    """The part of the package that an agent's reader uses; `values` may hold errors."""

    def get(self, item: Any) -> Any:
        if isinstance(item, Exception):
            raise item
        return item

    def kill(self, actor: Any) -> None:
        pass


class ActorDiedError(Exception):
    pass


class ActorUnavailableError(Exception):
    pass


def read(tmp_path: Path, *items: Any) -> RayAgent:
    agent = RayAgent(_Ray(), "h1", None, iter(items), tmp_path / "h1.log")
    agent.kill()  # waits for the reader
    return agent


def test_what_an_agent_prints_is_kept_until_its_exit_status(tmp_path: Path) -> None:
    agent = read(tmp_path, "one", "two", 3)
    assert agent.last_lines() == ["one", "two"] and agent.how_it_ended() == "exit status 3"
    assert (tmp_path / "h1.log").read_text() == "one\ntwo\n"
    assert read(tmp_path, -9).how_it_ended() == "killed by SIGKILL"


@pytest.mark.parametrize("kind", [ActorDiedError, ActorUnavailableError])
def test_an_actor_that_ray_has_lost_is_an_agent_that_has_ended(tmp_path: Path, kind: type[Exception]) -> None:
    text = "The actor died.\n\tclass_name: AgentActor\n\tpid: 1\nThe actor is dead because its node has died."
    ended = read(tmp_path, "one", kind(text)).how_it_ended()
    assert ended == f"{kind.__name__}: The actor died. The actor is dead because its node has died."


def test_the_first_words_of_an_error_without_any_are_its_kind() -> None:
    assert first_words(TimeoutError()) == "TimeoutError"


def test_nobody_waits_for_ray_to_find_out_that_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotConnected(_Ray):
        class exceptions:
            RayError = ActorDiedError

        def is_initialized(self) -> bool:
            return False

    monkeypatch.setitem(sys.modules, "ray", NotConnected())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(lp.LaunchError, match=f"^engine 'ray': .* {address}"):
        RayEngine(ray_address=address).hosts()


def test_an_actor_passes_on_what_its_agent_says() -> None:
    code = "import sys; print('got', len(sys.stdin.readline())); print('bad', file=sys.stderr); sys.exit(4)"
    output: Iterator[Any] = AgentActor().run(["-c", code], b"secret", share=0, cores=10_000)
    assert list(output) == ["got 7", "bad", 4]
