"""The few functions of NCCL that a channel needs, from the library that torch has loaded.

torch.distributed's process group does not do: its watchdog ends the whole process when a peer dies, and its first
`send` waits for the other end's `recv`, which here begins only when the message's header has arrived.
"""

import ctypes
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

LIBRARY = "libnccl.so.2"

_UINT8 = 1  # ncclDataType_t
_IN_PROGRESS = 7  # ncclResult_t: NCCL goes on in a thread of its own
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21700  # the oldest ncclConfig_t that has maxCTAs; newer NCCLs take it
_MAX_CTAS = 4  # a receive that waits occupies as many multiprocessors
_POLL_S = 5e-5
_Comm = ctypes.c_void_p
_Stream = ctypes.c_void_p
_Memory = ctypes.c_void_p


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
    )


Stopped = Callable[[], str | None]  # returns why a wait shall end, if it shall

_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(_Comm),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ],
    "ncclCommGetAsyncError": [_Comm, ctypes.POINTER(ctypes.c_int)],
    "ncclCommAbort": [_Comm],
    "ncclSend": [_Memory, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, _Stream],
    "ncclRecv": [_Memory, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, _Stream],
}


@functools.cache
def _library() -> Any:
    """Load the library, once.

    Raises:
        OSError: it is missing, or lacks a function.
    """
    library = ctypes.CDLL(LIBRARY)
    try:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [ctypes.c_int], ctypes.c_char_p
    except AttributeError as error:
        raise OSError(f"{LIBRARY} is too old: {error}") from error
    return library


def why_missing() -> str | None:
    """Return why NCCL cannot be used; None if it can."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


def new_id() -> bytes:
    """Return a new id, with which both ranks are made."""
    unique = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique)))
    return bytes(unique)


def version() -> tuple[int, int, int]:
    """Return NCCL's version."""
    found = ctypes.c_int()
    _check(_library().ncclGetVersion(ctypes.byref(found)))
    return found.value // 10_000, found.value // 100 % 100, found.value % 100


def init(unique_id: bytes, rank: int, patience: timedelta, stopped: Stopped) -> Any:
    """Make a communicator of two on the current GPU; wait for the other rank.

    The communicator does not block, so that it can be aborted while it connects, unless NCCL_COMM_BLOCKING=1 forces it.

    Raises:
        RuntimeError: says why not.
    """
    communicator = _Comm()
    unique = _UniqueId.from_buffer_copy(unique_id)
    config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNDEFINED, _UNDEFINED, _MAX_CTAS, None)
    _check(_library().ncclCommInitRankConfig(ctypes.byref(communicator), 2, unique, rank, ctypes.byref(config)))
    try:
        wait_until_ready(communicator, patience, stopped)
    except RuntimeError:
        abort(communicator)
        raise
    return communicator


def wait_until_ready(communicator: Any, patience: timedelta, stopped: Stopped) -> None:
    """Wait until NCCL has done the last call: before that it takes no other, and has put nothing on the stream.

    Raises:
        RuntimeError: the call failed, `stopped` gave a reason, or the time has passed.
    """
    deadline = time.monotonic() + patience.total_seconds()
    while (result := _async_result(communicator)) == _IN_PROGRESS:
        reason = stopped()
        if reason is not None:
            raise RuntimeError(reason)
        if time.monotonic() > deadline:
            raise RuntimeError(f"NCCL did not finish a call within {patience.total_seconds():g} s")
        time.sleep(_POLL_S)
    _check(result)


def send(communicator: Any, address: int, size: int, peer: int, stream: int) -> None:
    """Send on a stream; `wait_until_ready` returns once the send is queued there.

    Raises:
        RuntimeError: says why not.
    """
    _check(_library().ncclSend(address, size, _UINT8, peer, communicator, stream))


def recv(communicator: Any, address: int, size: int, peer: int, stream: int) -> None:
    """Receive on a stream, like `send`.

    Raises:
        RuntimeError: says why not.
    """
    _check(_library().ncclRecv(address, size, _UINT8, peer, communicator, stream))


def failure(communicator: Any) -> str | None:
    """Return the error of what was queued so far; None if there is none. Does not wait."""
    result = _async_result(communicator)
    return _text(result) if result not in (0, _IN_PROGRESS) else None


def abort(communicator: Any) -> None:
    """Abort what is queued, and free everything; may wait for the other rank."""
    _library().ncclCommAbort(communicator)


def _async_result(communicator: Any) -> int:
    found = ctypes.c_int()
    _check(_library().ncclCommGetAsyncError(communicator, ctypes.byref(found)))
    return found.value


def _check(result: int) -> None:
    if result not in (0, _IN_PROGRESS):
        raise RuntimeError(_text(result))


def _text(result: int) -> str:
    return f"{_library().ncclGetErrorString(result).decode()} (set NCCL_DEBUG=WARN for details)"
