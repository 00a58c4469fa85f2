"""The kinds of node: what they are made of, and what they do with it."""

import threading
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp

WITHIN_S = 20.0


class Server:
    """Serves what it was made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made_with = args, kwargs

    def made_with(self) -> Any:
        return self._made_with


def run(mode: str, *nodes: lp.Node[Any]) -> None:
    program = lp.Program("nodes")
    for index, node in enumerate(nodes):
        program.add_node(node, label=f"n{index}")
    lp.launch(program, mode).wait(WITHIN_S)


def test_a_function_an_object_that_runs_and_an_object_that_serves(mode: str, tmp_path: Path) -> None:
    class Runner:
        def __init__(self, path: Path) -> None:
            self._path = path

        def run(self) -> None:
            self._path.write_text("ran")

    def use(server: Any, path: Path) -> None:
        path.write_text(repr(server.made_with()))
        lp.stop()

    program = lp.Program("usage")
    server = program.add_node(lp.CourierNode(Server, 1, key=2), label="server")
    program.add_node(lp.PyClassNode(Runner, tmp_path / "runner"), label="runner")
    program.add_node(lp.PyNode(use, server, path=tmp_path / "use"), label="user")
    lp.launch(program, mode).wait(WITHIN_S)
    assert (tmp_path / "runner").read_text() == "ran"
    assert (tmp_path / "use").read_text() == "((1,), {'key': 2})"


def test_a_constructor_is_any_callable_and_run_is_not_needed(mode: str, tmp_path: Path) -> None:
    def make() -> object:
        (tmp_path / "made").touch()
        return object()

    run(mode, lp.PyClassNode(make), lp.PyClassNode(lambda: None), lp.PyClassNode(dict, a=1))
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", [lp.PyNode, lp.PyClassNode, lp.CourierNode])
def test_nodes_want_something_to_call(kind: Any) -> None:
    with pytest.raises(TypeError, match="not callable"):
        kind("function")


@pytest.mark.parametrize("kind", [lp.PyNode, lp.PyClassNode, lp.CourierNode])
def test_every_node_has_handles_and_addresses(kind: Any) -> None:
    node = kind(print)
    assert isinstance(node.create_handle(), lp.Handle)
    assert all(isinstance(address, lp.Address) for address in node.addresses)
    assert bool(node.addresses) == (kind is lp.CourierNode)
    assert node.disable_run() is node.enable_run()


def test_any_keyword_name_goes_to_the_constructor(mode: str) -> None:
    names = ["self", "function", "ctor", "name", "label", "fn", "args", "kwargs"]
    kwargs = dict.fromkeys(names, 1)

    class Takes:
        def __init__(self_, /, **kwargs: Any) -> None:
            self_.kwargs = kwargs

        def made_with(self) -> Any:
            return self.kwargs

    program = lp.Program("keywords")
    program.add_node(lp.CourierNode(Takes, **kwargs), label="made")
    configured = lp.CourierNode(Takes)
    program.add_node(configured, label="configured")
    configured.configure(**kwargs)
    with lp.launch(program, mode) as run:
        assert run.client("made").made_with() == run.client("configured").made_with() == kwargs


def test_configure_replaces_the_arguments_before_and_after_add_node(mode: str) -> None:
    program = lp.Program("configure")
    before, after = lp.CourierNode(Server, 1, a=1), lp.CourierNode(Server, 1, a=1)
    before.configure(2, b=2)
    program.add_node(before, label="before")
    program.add_node(after, label="after")
    after.configure(3)
    with lp.launch(program, mode) as run:
        assert run.client("before").made_with() == ((2,), {"b": 2})
        assert run.client("after").made_with() == ((3,), {})


def test_run_can_be_enabled_again(mode: str, tmp_path: Path) -> None:
    class Runner:
        def run(self) -> None:
            (tmp_path / "ran").touch()

    node = lp.CourierNode(Runner)
    node.disable_run()
    node.enable_run()
    run(mode, node)
    assert (tmp_path / "ran").exists()


def test_an_attribute_run_that_is_no_function_is_data(mode: str) -> None:
    class Logs:
        def __init__(self) -> None:
            self.run = ["loss 0.5"]  # as the run of an experiment tracker is

        def lines(self) -> int:
            return len(self.run)

    program = lp.Program("data")
    logs = program.add_node(lp.CourierNode(Logs), label="logs")
    program.add_node(lp.PyClassNode(Logs), label="ends")
    with lp.launch(program, mode) as launched:
        assert launched.client(logs).lines() == 1


class AnswersEveryName:
    """A wrapper whose `__getattr__` seems to have a `run` too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: f"{name}{args}"


def test_a_server_that_answers_every_name_has_no_run(mode: str) -> None:
    program = lp.Program("wrapper")
    served = program.add_node(lp.CourierNode(AnswersEveryName), label="served")
    program.add_node(lp.PyClassNode(AnswersEveryName), label="ends")
    with lp.launch(program, mode) as run:
        assert run.client(served).step(1) == "step(1,)"
        assert run.status()["served"][0]["state"] == "running"


class FalseError(Exception):
    def __bool__(self) -> bool:
        return False


def test_an_exception_that_is_false_is_a_failure(mode: str) -> None:
    def fail() -> None:
        raise FalseError

    with pytest.raises(lp.NodeError, match="FalseError"):
        run(mode, lp.PyNode(fail))


def test_a_run_that_the_instance_has_got_counts(mode: str, tmp_path: Path) -> None:
    def make() -> Any:
        made = AnswersEveryName()
        made.run = (tmp_path / "ran").touch
        return made

    run(mode, lp.PyClassNode(make))
    assert (tmp_path / "ran").exists()


def test_the_number_of_handler_threads_is_an_option_of_the_node(mode: str) -> None:
    class Where:
        def thread(self) -> str:
            return threading.current_thread().name

    program = lp.Program("pool")
    for size in (0, 1):
        options = {"thread_pool_size": size}
        program.add_node(lp.CourierNode(Where, courier_kwargs=options), label=f"size{size}")
    with lp.launch(program, mode) as run:
        for size in (0, 1):
            client = run.client(f"size{size}")
            threads = {future.result(WITHIN_S) for future in [client.futures.thread() for _ in range(20)]}
            assert size == 0 or len(threads) == 1  # inline: whichever thread the calls come from


@pytest.mark.parametrize("size", [-1, "4", 1.5, None])
def test_a_size_of_the_pool_that_is_none_is_refused_at_setup(size: Any) -> None:
    """Regression: with -1 the node came up, and never answered."""
    with pytest.raises(ValueError, match=rf"thread_pool_size .*got {size!r}"):
        lp.CourierNode(Server, courier_kwargs={"thread_pool_size": size})


def test_an_option_that_there_is_not_is_refused_at_setup_with_those_that_there_are() -> None:
    with pytest.raises(TypeError, match="courier_kwargs has no option 'thread_pool'; it takes thread_pool_size"):
        lp.CourierNode(Server, courier_kwargs={"thread_pool": 4})
    with pytest.raises(TypeError, match="client_kwargs has no option 'timeout'; it takes call_timeout, wait_for_ready"):
        lp.CourierNode(Server, courier_client_kwargs={"timeout": 4})
    with pytest.raises(TypeError, match=r"courier_kwargs .*got 4"):
        lp.CourierNode(Server, courier_kwargs=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout"):
        lp.CourierNode(Server).create_handle().set_client_kwargs(timeout=4)  # type: ignore[call-arg]


def test_handles_of_a_node_are_named_when_it_is_added() -> None:
    node = lp.CourierNode(Server)
    handle = node.create_handle()
    lp.Program("p").add_node(node, label="late")
    assert "late/0" in repr(handle)
