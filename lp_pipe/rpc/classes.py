"""Classes that travel by value: the receiving process makes them without running the code that made them before.

cloudpickle makes an empty class first and sets its attributes afterwards. That runs the user's `__init_subclass__` and
metaclass on an empty class, loses what a member of an enum keeps beside its value, and gives instances of a class with
`__slots__` a `__dict__`. What this code did once is in the attributes of the class, which travel.
"""

import abc
import contextlib
import enum
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lp_pipe.private_python import boundary_of, class_tracker, data_type_of

# What `__slots__` may name beside slots. A class has these in its own namespace only then, or when it has no __slots__.
_SPECIAL_SLOTS = ("__dict__", "__weakref__")

# What EnumType computes from the members that it is given.
_OF_ENUM_TYPE = frozenset(
    f"_{name}_"
    for name in (
        *("member_names", "member_map", "value2member_map", "member_type", "hashable_values", "unhashable_values"),
        *("unhashable_values_map", "value_repr", "flag_mask", "singles_mask", "all_bits", "boundary", "inverted"),
    )
)
_OF_ENUM_MEMBER = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})
_MAKES_MEMBERS = ("__new__", "__init__", "__new_member__", "_new_member_", "_use_args_")

_unfilled: set[int] = set()  # ids of classes that were made here and still lack their attributes
_hook_lock = threading.RLock()


def reduce_class(kind: Any, reduced: tuple[Any, ...], by_value: Callable[[type], bool]) -> tuple[Any, ...]:
    """Return how pickle makes `kind` in another process; a process that has the class already keeps its own unchanged.

    reduced: what cloudpickle would do. by_value: tells which classes travel by value.
    """
    maker = next(metaclass for metaclass in type(kind).__mro__ if not by_value(metaclass))
    _, arguments, (attributes, _), *_ = reduced
    if issubclass(kind, enum.Enum):
        bases, name, *_ = arguments
        made_of = tracker_id(kind), type(kind), maker, name, bases, _members(kind), boundary_of(kind)
        return _make_enum, made_of, (maker, *_enum_attributes(kind, attributes)), None, None, _fill
    metaclass, name, bases, namespace, *_ = arguments
    namespace = {"__module__": kind.__module__, **namespace}
    if "__slots__" in vars(kind) and NamedTuple not in vars(kind).get("__orig_bases__", ()):
        namespace, attributes = _with_slots(kind, namespace, attributes)
    hook = _init_subclass_owner(kind.__mro__[1:])
    skips_hooks = maker is not metaclass or (hook is not None and by_value(hook))
    made_of = tracker_id(kind), metaclass, maker, name, bases, namespace, skips_hooks
    return _make_class, made_of, (maker, attributes, {}, ()), None, None, _fill


class ClassReference:
    """A reference, in a pickle, to a class that does not travel, for a process that has the class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _known_class, (tracker_id(self._kind), self._kind.__qualname__)


def _known_class(tracked_as: str, name: str) -> type:
    found = _known(tracked_as)
    if found is None:
        raise LookupError(f"this process does not have the class {name}")
    return found


def _known(tracked_as: str) -> type | None:
    return class_tracker().find(tracked_as)


def tracker_id(kind: type) -> str:
    """Return the id of the class, which is the same in every process that has it."""
    return class_tracker().id_of(kind)


def _make_class(
    tracked_as: str,
    metaclass: type,
    maker: type,
    name: str,
    bases: tuple[Any, ...],
    namespace: dict[str, Any],
    skips_hooks: bool,
) -> type:
    if (known := _known(tracked_as)) is not None:
        return known
    namespace = {sys.intern(key): value for key, value in namespace.items()}
    if skips_hooks:
        return _track(tracked_as, _make_without_hooks(metaclass, maker, name, bases, namespace))
    try:
        made = types.new_class(name, bases, {"metaclass": metaclass}, lambda body: body.update(namespace))
    except TypeError:  # a library's __init_subclass__ or metaclass needs the keywords of the class statement
        made = _make_without_hooks(metaclass, maker, name, bases, namespace)
    return _track(tracked_as, made)


def _track(tracked_as: str, made: type) -> type:
    _unfilled.add(id(made))
    tracked = class_tracker().add(tracked_as, made)
    if tracked is not made:  # another thread has made it meanwhile
        _unfilled.discard(id(made))
    return tracked


def _make_without_hooks(
    metaclass: type, maker: Any, name: str, bases: tuple[Any, ...], namespace: dict[str, Any]
) -> type:
    resolved = types.resolve_bases(bases)
    if resolved is not bases:
        namespace["__orig_bases__"] = bases
    with _without_init_subclass(resolved):
        try:
            made: type = maker.__new__(metaclass, name, resolved, dict(namespace))
        except TypeError:  # it needs keywords of the class statement, which are not known any more
            made = type.__new__(metaclass, name, resolved, namespace)
    return made


@contextlib.contextmanager
def _without_init_subclass(bases: Sequence[type]) -> Iterator[None]:
    """Skip `__init_subclass__` for this thread's new subclasses of `bases`; those of other threads still get it."""
    owner = _init_subclass_owner([kind for base in bases for kind in base.__mro__])
    if owner is None:
        yield
        return
    thread = threading.get_ident()
    with _hook_lock:
        hook = vars(owner)["__init_subclass__"]

        def silent(cls: type, /, **keywords: Any) -> None:
            if threading.get_ident() != thread:
                hook.__get__(None, cls)(**keywords)

        type.__setattr__(owner, "__init_subclass__", classmethod(silent))
        try:
            yield
        finally:
            type.__setattr__(owner, "__init_subclass__", hook)


def _init_subclass_owner(kinds: Sequence[type]) -> type | None:
    """Return the ancestor among `kinds` from which a class gets its `__init_subclass__`."""
    owners = [kind for kind in kinds if kind is not object and "__init_subclass__" in vars(kind)]
    for owner in owners:
        if not any(other is not owner and issubclass(other, owner) for other in owners):
            return owner
    return None


def _fill(kind: Any, state: tuple[Any, dict[str, Any], dict[str, Any], Sequence[str]]) -> None:
    """Set the attributes of a class that was made here; a class that the process had before is left alone."""
    if id(kind) not in _unfilled:
        return
    maker, attributes, members, superfluous = state
    set_attribute = type.__setattr__ if issubclass(kind, enum.Enum) else maker.__setattr__
    registered = attributes.pop("_abc_impl", ())
    first_line = attributes.pop("__firstlineno__", None)
    for name, value in attributes.items():
        set_attribute(kind, name, value)
    for name in superfluous:
        if name in vars(kind):
            type.__delattr__(kind, name)
    if first_line is not None:  # set last: Python deletes it when another attribute of the class statement is set
        set_attribute(kind, "__firstlineno__", first_line)
    for subclass in registered:
        abc.ABCMeta.register(kind, subclass)
    for name, own in members.items():
        vars(kind.__members__[name]).update(own)
    _unfilled.discard(id(kind))


def _with_slots(
    kind: type, namespace: dict[str, Any], attributes: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the namespace with which the class is made with its slots, and the attributes without them."""
    own = vars(kind)
    slots = [name for name, value in own.items() if isinstance(value, types.MemberDescriptorType)]
    namespace = {**namespace, "__slots__": (*slots, *(name for name in _SPECIAL_SLOTS if name in own))}
    # The slots' descriptors are made anew. cloudpickle leaves private ones (`__x`) in, and they do not pickle.
    return namespace, {name: value for name, value in attributes.items() if name not in slots}


def _members(kind: Any) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Return, by name (also of aliases), what makes the member as its data type (int, str), and its value."""
    return {name: (_data_of(member, data_type_of(kind)), member._value_) for name, member in kind.__members__.items()}


def _data_of(member: Any, data_type: Any) -> tuple[Any, ...]:
    if hasattr(data_type, "__getnewargs__"):
        arguments: tuple[Any, ...] = data_type.__getnewargs__(member)
        return arguments
    made_by, arguments, *_ = data_type.__reduce_ex__(member, 2)
    return arguments if made_by is type(member) else ()


def _enum_attributes(kind: Any, attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the attributes of the class, those of each member, and names that making the class leaves behind."""
    names = kind.__members__
    made_by = {name: value for name, value in vars(kind).items() if name in _MAKES_MEMBERS}
    own = {**attributes, **made_by, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = {name: value for name, value in own.items() if name not in _OF_ENUM_TYPE and name not in names}
    of_members = {
        name: {key: value for key, value in vars(member).items() if key not in _OF_ENUM_MEMBER}
        for name, member in names.items()
    }
    return own, of_members, [name for name in _MAKES_MEMBERS if name not in made_by]


def _make_enum(
    tracked_as: str,
    metaclass: Any,
    maker: Any,
    name: str,
    bases: tuple[type, ...],
    members: dict[str, tuple[tuple[Any, ...], Any]],
    boundary: Any,
) -> type:
    if (known := _known(tracked_as)) is not None:
        return known
    body = maker.__prepare__(name, bases)
    if members:
        body["__new__"], body["__init__"] = _new_member, _take_anything
    for member, data_and_value in members.items():
        body[member] = data_and_value
    keywords = {} if boundary is None else {"boundary": boundary}
    with _without_init_subclass(bases):
        return _track(tracked_as, maker.__new__(metaclass, name, bases, body, **keywords))


def _new_member(kind: Any, *given: Any) -> Any:
    data, value = given if len(given) == 2 else given[0]  # one argument where the members are tuples
    member = data_type_of(kind).__new__(kind, *data)
    member._value_ = value
    return member


def _take_anything(member: Any, *given: Any) -> None:
    """Stand in for a user's `__init__`, which has run in the process that the members come from."""
