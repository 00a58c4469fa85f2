"""The few functions of NCCL that a channel needs, from the library that torch has loaded.

torch.distributed's process group does not do: its watchdog ends the whole process when a peer dies, and its first
`send` waits for the other end's `recv`, which here begins only when the message's header has arrived.
"""

import ctypes
import functools
from typing import Any

LIBRARY = "libnccl.so.2"

_UINT8 = 1  # ncclDataType_t
_Comm = ctypes.c_void_p
_Stream = ctypes.c_void_p
_Memory = ctypes.c_void_p


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_Comm), ctypes.c_int, _UniqueId, ctypes.c_int],
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


def init(unique_id: bytes, rank: int) -> Any:
    """Make a communicator of two on the current GPU; wait for the other rank.

    Raises:
        RuntimeError: says why not.
    """
    communicator = _Comm()
    unique = _UniqueId.from_buffer_copy(unique_id)
    _check(_library().ncclCommInitRank(ctypes.byref(communicator), 2, unique, rank))
    return communicator


def send(communicator: Any, address: int, size: int, peer: int, stream: int) -> None:
    """Queue a send on a stream.

    Raises:
        RuntimeError: says why not.
    """
    _check(_library().ncclSend(address, size, _UINT8, peer, communicator, stream))


def recv(communicator: Any, address: int, size: int, peer: int, stream: int) -> None:
    """Queue a receive on a stream.

    Raises:
        RuntimeError: says why not.
    """
    _check(_library().ncclRecv(address, size, _UINT8, peer, communicator, stream))


def failure(communicator: Any) -> str | None:
    """Return the error of what was queued so far; None if there is none. Does not wait."""
    found = ctypes.c_int()
    _check(_library().ncclCommGetAsyncError(communicator, ctypes.byref(found)))
    return _text(found.value) if found.value else None


def abort(communicator: Any) -> None:
    """Abort what is queued, and free everything; may wait for the other rank."""
    _library().ncclCommAbort(communicator)


def _check(result: int) -> None:
    if result:
        raise RuntimeError(_text(result))


def _text(result: int) -> str:
    return f"{_library().ncclGetErrorString(result).decode()} (set NCCL_DEBUG=WARN for details)"
