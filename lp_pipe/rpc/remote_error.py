"""Exceptions that cross to the caller: captured where they are raised, rebuilt where they are awaited."""

import contextlib
import functools
import inspect
import threading
import traceback
from typing import Any, NoReturn

from lp_pipe.errors import LpPipeError, MethodNotFound, RemoteError, SerializationError, StateLost, Unavailable
from lp_pipe.protos import frame_pb2
from lp_pipe.rpc import codec
from lp_pipe.rpc.classes import ClassReference

HANDLER = frame_pb2.CallError.HANDLER
METHOD_NOT_FOUND = frame_pb2.CallError.METHOD_NOT_FOUND
SERIALIZATION = frame_pb2.CallError.SERIALIZATION
UNAVAILABLE = frame_pb2.CallError.UNAVAILABLE
STATE_LOST = frame_pb2.CallError.STATE_LOST

# Errors of the caller's own call, not of the handler: the caller gets the plain class.
_OWN_ERRORS: dict[int, type[LpPipeError]] = {
    METHOD_NOT_FOUND: MethodNotFound,
    SERIALIZATION: SerializationError,
    UNAVAILABLE: Unavailable,
    STATE_LOST: StateLost,
}
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a `class` statement
_PLAIN_ONLY = (StopIteration, StopAsyncIteration)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_MAX_TEXT = 10_000


class NotSent:
    """A stand-in, in a remote exception, for a value that could not travel; its repr is that of the value."""

    def __init__(self, type_name: str, text: str, why: str) -> None:
        self._type_name = type_name
        self._text = text
        self._why = why

    def __repr__(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"cannot get {name!r} of a {self._type_name}, which stayed where the exception was raised: {self._why}"
        )


def capture(error: BaseException) -> bytes:
    """Serialize a handler's exception: its class, args and attributes as far as they pickle, and its traceback."""
    message = frame_pb2.CallError(
        origin=HANDLER,
        type_name=innermost_type_name(error),
        message=printable(_message_of(error)),
        traceback=printable(format_traceback(error)),
    )
    original = getattr(type(error), "_lp_pipe_original_class", type(error))  # not error.__class__, which may raise
    with contextlib.suppress(Exception):  # a class that does not pickle travels as its name only
        message.exception_type = _portable_class(original)
    with contextlib.suppress(Exception):
        message.args = _portable_args(error.args)
    attributes = _slot_attributes(error)
    with contextlib.suppress(Exception):  # a user's __getattribute__ may raise
        attributes |= vars(error)
    for name, value in attributes.items():
        is_own = name == "__notes__" or not name.startswith(("_lp_pipe", "__", "type_name", "remote_traceback"))
        if is_own and not isinstance(value, _LOCKS):  # a lock inside another attribute becomes a new one
            with contextlib.suppress(Exception):
                message.attributes[name] = _portable(value)
    return message.SerializeToString()


def own(origin: "frame_pb2.CallError.Origin", text: str) -> bytes:
    """Serialize an error of the call itself (no such method, no result to send)."""
    return frame_pb2.CallError(origin=origin, message=printable(text)).SerializeToString()


def rebuild(data: bytes | bytearray | memoryview, call: str) -> LpPipeError:
    """Return the exception to raise at the caller.

    call: the method and the peer, for plain RemoteErrors.
    """
    message = frame_pb2.CallError.FromString(bytes(data))
    if message.origin != HANDLER:
        return _OWN_ERRORS[message.origin](message.message)
    text = f"{call} raised {message.type_name}: {message.message}\n\n{message.traceback.rstrip()}"
    error = _combined(message, text)
    if error is None:  # not `or`: an exception may be false
        error = RemoteError(text)
    error.type_name = message.type_name
    error.remote_traceback = message.traceback
    return error


def innermost_type_name(error: BaseException) -> str:
    """Return the bare class name; for an error that already came from another node, that of the original."""
    return error.type_name if isinstance(error, RemoteError) and error.type_name else type(error).__name__


def format_traceback(error: BaseException) -> str:
    """Return the traceback with chained causes, as text."""
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as broken:  # a user's attribute may raise anything; the caller must get an error even so
        return f"{type(error).__name__}: <its traceback cannot be printed, that raised {type(broken).__name__}>\n"


def text_of(said: object) -> str:
    """Return the message of an exception, or of its argument."""
    try:
        return str(said)
    except BaseException as broken:  # a user's __str__ may raise anything; the caller must get an error even so
        return f"<str() of the exception raised {type(broken).__name__}>"


def _message_of(error: BaseException) -> str:
    """Return the error's message; of a remote error, without its traceback.

    That is in the new traceback already: with both, each hop would double the text.
    """
    text = text_of(error)
    return text.split("\n\n", 1)[0] if isinstance(error, RemoteError) else text


def headline(error: BaseException) -> str:
    """Return the error's class and the first line of its message."""
    lines = text_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def printable(text: str) -> str:
    """Return text that UTF-8 can carry: names of files may hold bytes that are not text (lone surrogates in Python)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _portable_class(kind: type) -> bytes:
    try:
        return codec.dumps(kind)
    except Exception:  # its attributes do not pickle, but the caller may have the class
        return codec.dumps(ClassReference(kind))


def _portable_args(args: tuple[Any, ...]) -> bytes:
    try:
        return codec.dumps(args, new_locks=True)
    except Exception:  # all but those that do not pickle
        return codec.dumps(tuple(codec.loads(_portable(arg)) for arg in args))


def _portable(value: Any) -> bytes:
    """Serialize `value`, or a NotSent in its place; locks become new ones."""
    try:
        return codec.dumps(value, new_locks=True)
    except Exception as error:
        try:
            text = repr(value)[:_MAX_TEXT]
        except Exception as broken:  # a user's __repr__ may raise
            text = f"<{type(value).__qualname__}, whose repr() raised {type(broken).__name__}>"
        return codec.dumps(NotSent(type(value).__qualname__, text, f"{type(error).__name__}: {text_of(error)}"))


def _loaded(data: bytes) -> Any:
    try:
        return codec.loads(data)
    except Exception as error:  # such as a class that exists only where the error was raised
        why = f"it does not load here: {type(error).__name__}: {text_of(error)}"
        return NotSent("value", f"<{why}>", why)


def _slot_attributes(error: BaseException) -> dict[str, Any]:
    """Return the attributes outside of __dict__: OSError.filename, UnicodeDecodeError.start, and a user's __slots__."""
    found: dict[str, Any] = {}
    for kind in type(error).__mro__:
        if kind not in (BaseException, object):
            for name, member in vars(kind).items():
                if name != "obj" and (inspect.ismemberdescriptor(member) or inspect.isgetsetdescriptor(member)):
                    with contextlib.suppress(Exception):  # some raise when they were never set
                        found[name] = getattr(error, name)
    return {name: value for name, value in found.items() if value is not None}


def _combined(message: frame_pb2.CallError, text: str) -> RemoteError | None:
    """Make a RemoteError that is also an instance of the original class, without calling the class's own code."""
    try:
        original = codec.loads(message.exception_type) if message.exception_type else None
        if not (isinstance(original, type) and issubclass(original, Exception)) or issubclass(original, _PLAIN_ONLY):
            return None
        combined = _combined_class(original)
        args = codec.loads(message.args) if message.args else ()
        error = _bare_instance(combined, args)
    except Exception:  # layouts that do not mix, classes that do not load here: a plain RemoteError says it all
        return None
    for name, data in message.attributes.items():
        with contextlib.suppress(Exception):
            setattr(error, name, _loaded(data))
    error._lp_pipe_text = text
    rebuilt: RemoteError = error
    return rebuilt


def _combined_class(original: type[Exception]) -> Any:
    if issubclass(original, RemoteError):
        bases: tuple[type, ...] = (original,)
    else:
        bases = (RemoteError, original)
    namespace = {
        "__str__": lambda self: self._lp_pipe_text,
        "__repr__": functools.partialmethod(_repr, original),
        "__bool__": lambda self: True,  # concurrent.futures treats a false exception as none
        "__reduce__": _reduce,
        "__setattr__": object.__setattr__,  # that of a frozen dataclass refuses new values
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_lp_pipe_original_class": original,
    }
    return type(original.__name__, bases, namespace)


def _repr(error: RemoteError, original: type[Exception]) -> str:
    try:
        return original.__repr__(error)
    except Exception:  # it needs what could not travel
        return f"{original.__name__}({', '.join(map(repr, error.args))})"


def _bare_instance(combined: Any, args: tuple[Any, ...]) -> Any:
    # The class that defines the instance's layout must allocate it: OSError, or Exception for most. No user code runs.
    allocates = combined
    while allocates.__flags__ & _HEAP_TYPE:
        allocates = allocates.__base__
    error = allocates.__new__(combined, *args)
    error.args = args
    return error


def _reduce(error: RemoteError) -> tuple[Any, ...]:
    return rebuild, (capture(error), "call")
