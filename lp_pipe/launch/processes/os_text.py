"""Strings of the operating system (variables, paths, arguments) inside messages that only carry UTF-8.

They may hold bytes that are no UTF-8, which Python shows as lone surrogates: each byte travels as a character.
"""

import os
from collections.abc import Iterable, Mapping


def pack(text: str) -> str:
    """Any string that os.fsencode takes, as valid UTF-8."""
    return os.fsencode(text).decode("latin-1")


def unpack(text: str) -> str:
    """Undo `pack`."""
    return os.fsdecode(text.encode("latin-1"))


def pack_all(texts: Iterable[str]) -> list[str]:
    return [pack(text) for text in texts]


def unpack_all(texts: Iterable[str]) -> list[str]:
    return [unpack(text) for text in texts]


def pack_map(texts: Mapping[str, str]) -> dict[str, str]:
    return {pack(key): pack(value) for key, value in texts.items()}


def unpack_map(texts: Mapping[str, str]) -> dict[str, str]:
    return {unpack(key): unpack(value) for key, value in texts.items()}
