"""What the launcher and its template process say to each other: JSON behind its length, with file descriptors."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def send_message(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message; blocks until the other side has room."""
    data = json.dumps(message).encode()
    packet = _LENGTH.pack(len(data)) + data
    sent = socket.send_fds(sock, [packet], list(fds)) if fds else 0
    sock.sendall(packet[sent:])


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its file descriptors, or None when the other side has closed."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 8)
    if not head:
        return None
    head += _receive_exactly(sock, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    message: dict[str, Any] = json.loads(_receive_exactly(sock, length))
    return message, list(fds)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side ended inside a message")
        data += piece
    return bytes(data)
