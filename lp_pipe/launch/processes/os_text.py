"""Encode the operating system's strings (variables, paths, arguments) for messages that can carry only UTF-8.

Such strings may contain bytes that are not UTF-8, which Python represents as lone surrogates. A script may also have
put other lone surrogates into sys.path or sys.argv. `pack` encodes a string to bytes that allow them, and sends each
byte as one character.
"""

from collections.abc import Iterable, Mapping


def pack(text: str) -> str:
    """Return a string that any UTF-8 message can carry."""
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


def unpack(text: str) -> str:
    """Undo `pack`."""
    return text.encode("latin-1").decode("utf-8", "surrogatepass")


def pack_all(texts: Iterable[str]) -> list[str]:
    return [pack(text) for text in texts]


def unpack_all(texts: Iterable[str]) -> list[str]:
    return [unpack(text) for text in texts]


def pack_map(texts: Mapping[str, str]) -> dict[str, str]:
    return {pack(key): pack(value) for key, value in texts.items()}


def unpack_map(texts: Mapping[str, str]) -> dict[str, str]:
    return {unpack(key): unpack(value) for key, value in texts.items()}
