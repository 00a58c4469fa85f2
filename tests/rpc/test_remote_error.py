"""An exception of a handler, as its caller sees it."""

import builtins
import dataclasses
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import lp_pipe as lp
from lp_pipe.rpc import Server


class Raises:
    def fail(self, make: Callable[[], BaseException]) -> None:
        raise make()

    def fail_with_a_cause(self) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("no such layer") from error


class Forwards:
    def __init__(self, inner: lp.CourierClient) -> None:
        self._inner = inner

    def fail(self, make: Callable[[], BaseException]) -> None:
        self._inner.fail(make)

    def call_nobody(self) -> None:
        lp.CourierClient("inproc:nobody", wait_for_ready=False).hello()

    def call_missing(self) -> None:
        self._inner.missing()


@pytest.fixture(params=["inproc", "unix"])
def client(request: pytest.FixtureRequest, socket_home: Path) -> Iterator[lp.CourierClient]:
    server = Server(Raises(), f"{request.param}:{socket_home}/raises", name="server/0")
    yield lp.CourierClient(server.endpoint, peer="server/0")
    server.close()


@pytest.fixture
def far_client(client: lp.CourierClient, socket_home: Path) -> Iterator[lp.CourierClient]:
    """Two hops from the one that raises."""
    server = Server(Forwards(client), f"inproc:{socket_home}/forwards", name="middle/0")
    yield lp.CourierClient(server.endpoint, peer="middle/0")
    server.close()


def caught(client: lp.CourierClient, make: Callable[[], BaseException]) -> lp.RemoteError:
    with pytest.raises(lp.RemoteError) as info:
        client.fail(make)
    return info.value


class TwoArgumentsError(Exception):
    """An exception whose constructor cannot be called with its args."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one, self.two = one, two


class NewError(Exception):
    def __new__(cls, *args: Any) -> "NewError":
        assert args, "must not be called without arguments"
        return super().__new__(cls, *args)


class KeywordOnlyError(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__()
        self.code = code


class FileError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "is not there", path)
        self.path = path


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock", threading.Lock())
        self.lock = threading.Lock()
        self.code = 7


class BrokenStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


class SlotsError(Exception):
    __slots__ = ("code",)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class SealedError(ValueError):
    """An exception as attrs makes them: with slots, and no attribute may be set, not even args."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        object.__setattr__(self, "code", code)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is frozen")


def test_except_catches_it_by_its_own_class(client: lp.CourierClient) -> None:
    with pytest.raises(ValueError, match="no such layer") as info:
        client.fail_with_a_cause()
    error = info.value
    assert isinstance(error, lp.RemoteError)
    assert isinstance(error, RuntimeError)
    assert error.type_name == "ValueError"
    assert error.args == ("no such layer",)
    for part in ("ValueError", "no such layer", "KeyError: 'missing'", "in fail_with_a_cause", "server/0"):
        assert part in str(error)
    assert "in fail_with_a_cause" in error.remote_traceback


PLAIN = (StopIteration, StopAsyncIteration)
ARGUMENTS = {
    "UnicodeDecodeError": ("utf-8", b"\xff", 0, 1, "bad"),
    "UnicodeEncodeError": ("utf-8", "\udcff", 0, 1, "bad"),
    "UnicodeTranslateError": ("x", 0, 1, "bad"),
    "ExceptionGroup": ("group", [ValueError(1)]),
    "BaseExceptionGroup": ("group", [KeyboardInterrupt()]),
    **dict.fromkeys(("SyntaxError", "IndentationError", "TabError", "_IncompleteInputError"), ("message",)),
}
BUILTINS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind is not BaseException
]


@pytest.mark.parametrize("kind", sorted(set(BUILTINS), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_builtin_exception_arrives(client: lp.CourierClient, kind: type[BaseException]) -> None:
    arguments = ARGUMENTS.get(kind.__name__, ("message", 2))
    error = caught(client, lambda: kind(*arguments))
    assert error.type_name == kind.__name__
    is_combined = issubclass(kind, Exception) and not issubclass(kind, PLAIN)
    assert isinstance(error, kind) == is_combined
    assert kind.__name__ in str(error)
    if is_combined and kind.__name__ != "ExceptionGroup":
        assert error.args == kind(*arguments).args


@pytest.mark.parametrize(
    "make",
    [
        lambda: TwoArgumentsError(1, 2),
        lambda: NewError("x"),
        lambda: KeywordOnlyError(code=3),
        lambda: FileError("/a"),
        lambda: LockedError(),
        lambda: BrokenStr(),
        lambda: NoReduce("x"),
        lambda: SlotsError("x"),
    ],
)
def test_odd_exceptions_are_rebuilt_without_their_own_code(client: lp.CourierClient, make: Any) -> None:
    kind = type(make())
    error = caught(client, make)
    assert isinstance(error, kind)
    assert error.type_name == kind.__name__
    assert kind.__name__ in str(error)


def test_args_and_attributes_are_copied_as_far_as_they_pickle(client: lp.CourierClient) -> None:
    error: Any = caught(client, lambda: TwoArgumentsError(1, 2))
    assert (error.args, error.one, error.two) == (("1 and 2",), 1, 2)
    error = caught(client, lambda: KeywordOnlyError(code=3))
    assert error.code == 3
    error = caught(client, LockedError)
    assert error.code == 7
    assert not hasattr(error, "lock")


@pytest.mark.parametrize("kind", [FrozenError, SealedError])
def test_exceptions_that_are_frozen_or_have_slots_keep_their_class_and_attributes(
    client: lp.CourierClient, far_client: lp.CourierClient, kind: Any
) -> None:
    for each in (client, far_client):
        error: Any = caught(each, lambda: kind(5))
        assert isinstance(error, kind)
        assert (error.args, error.code, error.type_name) == ((5,), 5, kind.__name__)


def test_attributes_of_builtin_classes_are_copied(client: lp.CourierClient) -> None:
    error: Any = caught(client, lambda: FileNotFoundError(2, "no such file", "/a/b"))
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror, error.filename) == (2, "no such file", "/a/b")
    error = caught(client, lambda: FileError("/a/b"))
    assert (error.errno, error.filename, error.path) == (2, "/a/b", "/a/b")
    error = caught(client, lambda: ModuleNotFoundError("no", name="torch"))
    assert error.name == "torch"
    error = caught(client, lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"))
    assert (error.encoding, error.start, error.reason) == ("utf-8", 0, "bad")


def test_a_local_class_is_caught_where_it_is_known(client: lp.CourierClient) -> None:
    class LocalError(Exception):
        pass

    with pytest.raises(LocalError, match="from afar"):
        client.fail(lambda: LocalError("from afar"))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_what_must_not_escape_at_the_caller_is_a_plain_remote_error(client: lp.CourierClient, kind: Any) -> None:
    error = caught(client, lambda: kind("out"))
    assert not isinstance(error, kind)
    assert error.type_name == kind.__name__
    assert client.fail is not None


def test_the_innermost_class_is_named_through_any_hops(far_client: lp.CourierClient) -> None:
    error: Any = caught(far_client, lambda: TwoArgumentsError(1, 2))
    assert isinstance(error, TwoArgumentsError)
    assert error.type_name == "TwoArgumentsError"
    assert (error.one, error.args) == (1, ("1 and 2",))
    error = caught(far_client, lambda: SystemExit(3))
    assert error.type_name == "SystemExit"


def test_the_text_has_each_traceback_once(far_client: lp.CourierClient) -> None:
    # Each hop doubled it: ten had a thousand tracebacks.
    text = str(caught(far_client, lambda: ValueError("no such layer")))
    assert text.startswith("middle/0.fail() raised ValueError: server/0.fail() raised ValueError: no such layer\n\n")
    assert text.count("Traceback (most recent call last)") == 2
    assert text.count("raise make()") == 1


def test_errors_of_calls_inside_a_handler_are_remote_errors(far_client: lp.CourierClient) -> None:
    with pytest.raises(lp.Unavailable) as info:
        far_client.call_nobody()
    assert isinstance(info.value, lp.RemoteError)
    assert info.value.type_name == "Unavailable"
    with pytest.raises(lp.MethodNotFound) as missing:
        far_client.call_missing()
    assert isinstance(missing.value, lp.RemoteError)
    with pytest.raises(lp.MethodNotFound) as own:
        far_client.missing()
    assert not isinstance(own.value, lp.RemoteError)


def test_a_remote_error_can_be_pickled_and_raised_again(client: lp.CourierClient) -> None:
    error: Any = caught(client, lambda: TwoArgumentsError(1, 2))
    copied = pickle.loads(pickle.dumps(error))
    assert isinstance(copied, TwoArgumentsError)
    assert isinstance(copied, lp.RemoteError)
    assert copied.type_name == "TwoArgumentsError"
    with pytest.raises(TwoArgumentsError):
        raise copied from error


def test_futures_carry_it_too(client: lp.CourierClient) -> None:
    error = client.futures.fail(lambda: KeyError("x")).exception(20.0)
    assert isinstance(error, KeyError)
    assert isinstance(error, lp.RemoteError)
    assert error.args == ("x",)


class WithSocketError(ValueError):
    """Needs a socket, which does not travel."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        super().__init__("no route", self.socket)

    def __repr__(self) -> str:
        return f"WithSocketError({self.socket.fileno()})"


def test_a_value_that_does_not_travel_leaves_its_text_behind(client: lp.CourierClient) -> None:
    error: Any = caught(client, WithSocketError)
    assert isinstance(error, ValueError)
    assert repr(error.socket).startswith("<socket.socket") and error.args == ("no route", error.args[1])
    assert str(error.args[1]).startswith("<socket.socket")
    assert "WithSocketError" in repr(error)
    with pytest.raises(AttributeError, match=r"'fileno' of a socket.*cannot pickle"):
        error.socket.fileno()
    assert repr(pickle.loads(pickle.dumps(error)).socket) == repr(error.socket)


def test_an_error_of_grpc_tells_its_status_and_details(client: lp.CourierClient) -> None:
    def fails() -> BaseException:
        with grpc.insecure_channel("127.0.0.1:1") as channel:
            try:
                channel.unary_unary("/service/method")(b"", timeout=0.2)
            except grpc.RpcError as error:
                return error
        raise AssertionError("no server listens at port 1")

    error: Any = caught(client, fails)
    assert isinstance(error, grpc.RpcError)
    assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert error.details() and "terminated" in repr(error)


class FalseError(Exception):
    """An exception whose truth value and comparison are unusual."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]


def test_an_exception_that_is_false_is_raised_all_the_same(client: lp.CourierClient) -> None:
    assert isinstance(caught(client, FalseError), FalseError)
    assert isinstance(client.futures.fail(FalseError).exception(), FalseError)
