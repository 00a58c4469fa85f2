"""Which reducer gets a key, and in which order: the same in every process and on every host."""

import hashlib
from typing import Any


def partition_of(key: Any, num_partitions: int) -> int:
    """Hash `key` to a partition (Dean & Ghemawat 2004, 4.1); Python's own `hash` differs between processes."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) % num_partitions


def order_of(key: Any) -> tuple[str, Any]:
    """What to sort keys by: their own order, bytes before ints before strs before tuples, also inside of tuples."""
    return type(key).__name__, tuple(map(order_of, key)) if type(key) is tuple else key


def check_key(key: Any) -> None:
    """Before it is a dict's key, where 1, 1.0 and True are one.

    Raises:
        TypeError: the key is not a str, bytes, int or tuple of these: equal keys might print differently.
    """
    _check(key, key)


def _check(part: Any, key: Any) -> None:
    if type(part) is tuple:
        for item in part:
            _check(item, key)
    elif type(part) not in (str, bytes, int):
        raise TypeError(
            f"map_reduce key {key!r}: {part!r} is of type {type(part).__name__}, but keys are str, bytes, int "
            "or tuples of these; let the mapper convert it"
        )
