"""Which reducer gets a key: the same in every process and on every host, unlike Python's `hash`."""

import hashlib
from typing import Any


def partition_of(key: Any, num_partitions: int) -> int:
    """Hash `key` to a partition (Dean & Ghemawat 2004, 4.1).

    Raises:
        TypeError: the key is not a str, bytes, int or tuple of these: equal keys might print differently.
    """
    _check(key, key)
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) % num_partitions


def _check(part: Any, key: Any) -> None:
    if type(part) is tuple:
        for item in part:
            _check(item, key)
    elif type(part) not in (str, bytes, int):
        raise TypeError(
            f"map_reduce key {key!r}: {part!r} is of type {type(part).__name__}, but keys are str, bytes, int "
            "or tuples of these; let the mapper convert it"
        )
