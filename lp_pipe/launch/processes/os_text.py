"""Strings of the operating system (variables, paths, arguments) inside messages that only carry UTF-8.

They may hold bytes that are no UTF-8, which Python shows as lone surrogates, and a script may put others into sys.path
or sys.argv: each byte of an encoding that takes them travels as a character.
"""

from collections.abc import Iterable, Mapping


def pack(text: str) -> str:
    """Return any string as valid UTF-8."""
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
