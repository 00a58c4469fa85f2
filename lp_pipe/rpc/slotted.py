"""Classes with `__slots__` that travel by value keep their slots.

cloudpickle (3.1) makes the class first and sets `__slots__` on it afterwards, which has no effect: its instances get a
`__dict__`, and what they pickle to does not load where the class was written.
"""

import enum
import types
from typing import Any, NamedTuple

# What `__slots__` may name beside slots; a class has these in its own namespace only then, or when it has no __slots__.
_SPECIAL = ("__dict__", "__weakref__")


def with_slots(kind: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """cloudpickle's reduction of a class, so that the class is made with its slots."""
    namespace = vars(kind)
    if "__slots__" not in namespace or _makes_its_own(kind):
        return reduced
    slots = [name for name, value in namespace.items() if isinstance(value, types.MemberDescriptorType)]
    make, (metaclass, name, bases, contents, *rest), (attributes, more), *others = reduced
    contents = {**contents, "__slots__": (*slots, *(name for name in _SPECIAL if name in namespace))}
    # The slots' descriptors are made anew; private ones (`__x`) cloudpickle has left in, and they do not pickle.
    attributes = {name: value for name, value in attributes.items() if name not in slots}
    return make, (metaclass, name, bases, contents, *rest), (attributes, more), *others


def _makes_its_own(kind: type) -> bool:
    """Whether its metaclass sees to its slots: the members of an enum are made with it, and NamedTuple takes none."""
    return issubclass(kind, enum.Enum) or NamedTuple in vars(kind).get("__orig_bases__", ())
