"""The contract's section on errors, over calls in every mode."""

import traceback
from typing import Any

import pytest

import lp_pipe as lp


class NeedsThree(Exception):
    def __init__(self, first: Any, second: Any, *, keyword: Any) -> None:
        super().__init__(f"{first}-{second}-{keyword}")
        self.first = first
        self.lock = __import__("threading").Lock()


class NewIsStrict(ValueError):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("token") != "secret":
            raise AssertionError("__new__ was called without its token")
        return super().__new__(cls, *args)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)


class TwoBases(KeyError, AttributeError):
    pass


class Unfriendly(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("I do not pickle")

    def __str__(self) -> str:
        raise RuntimeError("I have no text")


class Raiser:
    def __init__(self, upstream: Any = None) -> None:
        self._upstream = upstream

    def value(self) -> None:
        raise ValueError("bad value")

    def chained(self) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("outer") from error

    def three(self) -> None:
        raise NeedsThree(1, 2, keyword=3)

    def strict(self) -> None:
        raise NewIsStrict("a", "b", token="secret")

    def two(self) -> None:
        raise TwoBases("both")

    def unfriendly(self) -> None:
        raise Unfriendly(lambda: 1)

    def local(self) -> None:
        class Local(OSError):
            pass

        raise Local(2, "gone", "file.txt")

    def group(self) -> None:
        raise ExceptionGroup("several", [ValueError(1), KeyError(2)])

    def base(self, kind: Any) -> None:
        raise kind("out")

    def relayed(self, hops: int) -> None:
        self._upstream.relayed(hops - 1) if hops > 1 else self._upstream.value()

    def noted(self) -> None:
        error = ValueError("with a note")
        error.add_note("the note")
        raise error


def chain(mode: str, length: int) -> tuple[lp.Run, Any]:
    program = lp.Program("errors")
    handle: Any = None
    for index in range(length):
        handle = program.add_node(lp.CourierNode(Raiser, handle), label=f"hop{index}")
    run = lp.launch(program, mode, grace=2.0)
    return run, run.client(handle)


def raised(kind: type[BaseException], function: Any, *args: Any) -> Any:
    with pytest.raises(kind) as caught:
        function(*args)
    return caught.value


def test_a_handlers_exception_is_caught_by_its_own_class(mode: str) -> None:
    run, client = chain(mode, 1)
    with run:
        for method, kind in [
            ("value", ValueError),
            ("chained", RuntimeError),
            ("three", NeedsThree),
            ("strict", NewIsStrict),
            ("two", KeyError),
            ("two", AttributeError),
            ("local", OSError),
            ("group", ExceptionGroup),
        ]:
            with pytest.raises(kind) as caught:
                getattr(client, method)()
            assert isinstance(caught.value, lp.RemoteError) and isinstance(caught.value, RuntimeError)
            assert not isinstance(caught.value, (lp.Unavailable, lp.SerializationError))
            assert caught.value.type_name in str(caught.value)
            assert "Traceback" in caught.value.remote_traceback and method in caught.value.remote_traceback
            assert caught.value.remote_traceback.strip() in str(caught.value)


def test_args_and_attributes_are_copied(mode: str) -> None:
    run, client = chain(mode, 1)
    with run:
        three = raised(NeedsThree, client.three)
        assert (three.args, three.first, hasattr(three, "lock")) == (("1-2-3",), 1, False)
        assert raised(NewIsStrict, client.strict).args == ("a", "b")
        gone = raised(OSError, client.local)
        assert (gone.errno, gone.strerror, gone.filename) == (2, "gone", "file.txt")
        assert raised(ValueError, client.noted).__notes__ == ["the note"]


def test_text_has_type_message_traceback_and_causes(mode: str) -> None:
    run, client = chain(mode, 1)
    with run:
        text = str(raised(lp.RemoteError, client.chained))
        for part in ("RuntimeError", "outer", "KeyError", "missing", "direct cause", "chained"):
            assert part in text
        assert "bad value" in "".join(traceback.format_exception(raised(ValueError, client.value)))


def test_what_must_not_escape_is_a_plain_remote_error(mode: str) -> None:
    kinds = [StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt, GeneratorExit, BaseException]
    run, client = chain(mode, 1)
    with run:
        for kind in kinds * 2:  # the server goes on
            error = raised(lp.RemoteError, client.base, kind)
            assert type(error) is lp.RemoteError
            assert kind is BaseException or not isinstance(error, kind)
            assert error.type_name == kind.__name__


def test_an_exception_that_does_not_pickle_still_surfaces(mode: str) -> None:
    run, client = chain(mode, 1)
    with run:
        error = raised(lp.RemoteError, client.unfriendly)
        assert error.type_name == "Unfriendly" and "Unfriendly" in str(error)


@pytest.mark.parametrize("hops", [1, 2])
def test_the_innermost_type_is_named_through_any_hops(mode: str, hops: int) -> None:
    run, client = chain(mode, 3)
    with run, pytest.raises(ValueError, match="bad value") as caught:
        client.relayed(hops)
    assert isinstance(caught.value, lp.RemoteError) and caught.value.type_name == "ValueError"


def test_a_node_error_names_node_type_message_and_causes(mode: str) -> None:
    def fail() -> None:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise NeedsThree(1, 2, keyword=3) from error

    program = lp.Program("errors")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="other")
    with program.group("failing"):
        program.add_node(lp.PyNode(lp.wait_for_stop))
        program.add_node(lp.PyNode(fail))
    run = lp.launch(program, mode, grace=2.0)
    for _ in range(2):
        with pytest.raises(lp.NodeError) as caught:
            run.wait(30)
        error = caught.value
        assert (error.label, error.index) == ("failing", 1)
        assert not isinstance(error, NeedsThree) and isinstance(error, RuntimeError)
        for part in ("failing/1", "NeedsThree", "1-2-3", "KeyError", "the cause", "direct cause"):
            assert part in str(error)
        assert "the cause" in error.remote_traceback
        assert len(error.report.splitlines()) <= 15
        assert "failing/1" in error.report and "NeedsThree: 1-2-3" in error.report


def test_an_exception_that_does_not_pickle_ends_its_node_all_the_same(mode: str) -> None:
    def fail() -> None:
        raise Unfriendly(lambda: 1)

    program = lp.Program("errors")
    program.add_node(lp.PyNode(fail), label="node")
    with pytest.raises(lp.NodeError, match="Unfriendly"):
        lp.launch(program, mode).wait(30)


def test_a_callers_own_errors_are_not_remote_errors_but_are_one_call_further(mode: str) -> None:
    class Asker:
        def __init__(self, upstream: Any) -> None:
            self._upstream = upstream

        def ask(self) -> None:
            self._upstream.valeu()

    program = lp.Program("errors")
    raiser = program.add_node(lp.CourierNode(Raiser), label="raiser")
    asker = program.add_node(lp.CourierNode(Asker, raiser), label="asker")
    with lp.launch(program, mode, grace=2.0) as run:
        with pytest.raises(lp.MethodNotFound, match=r"valeu.*'value'") as own:
            run.client(raiser).valeu()
        assert isinstance(own.value, AttributeError) and not isinstance(own.value, lp.RemoteError)
        with pytest.raises(lp.MethodNotFound) as remote:
            run.client(asker).ask()
        assert isinstance(remote.value, lp.RemoteError) and remote.value.type_name == "MethodNotFound"


def test_every_error_derives_from_the_base_and_its_builtin() -> None:
    for error, builtin in [
        (lp.NodeError, RuntimeError),
        (lp.RemoteError, RuntimeError),
        (lp.DeadlineExceeded, TimeoutError),
        (lp.Unavailable, ConnectionError),
        (lp.MethodNotFound, AttributeError),
        (lp.SerializationError, RuntimeError),
    ]:
        assert issubclass(error, lp.LpPipeError) and issubclass(error, builtin)
