"""`client.step`: an object that can only be called, so that a mistake is found where it is written."""

import functools
from typing import Any, NoReturn

_OPERATORS = (
    *("bool", "len", "iter", "next", "contains", "getitem", "setitem", "delitem", "reversed", "str", "format"),
    *("int", "float", "complex", "index", "round", "neg", "pos", "abs", "invert", "lt", "le", "gt", "ge"),
    *("enter", "exit", "await", "aiter", "array", "bytes"),
    *(
        f"{side}{name}"
        for name in (
            "add",
            "sub",
            "mul",
            "matmul",
            "truediv",
            "floordiv",
            "mod",
            "pow",
            "and",
            "or",
            "xor",
            "lshift",
            "rshift",
            "divmod",
        )
        for side in ("", "r", "i")
    ),
)


class RemoteMethod(functools.partial[Any]):
    """A remote method; any use of it as if it were its result raises a TypeError that says what to do.

    func: a bound method of a client or one of its views, which takes the name and the arguments.
    """

    @property
    def __name__(self) -> str:
        name: str = self.args[0]
        return name

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            f"{self!r} is a method of the node, not a value: write .{self.__name__}(). For an attribute of the "
            "node's object, give its class a method that returns it"
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteMethod):
            return self.func.__self__ is other.func.__self__ and self.args == other.args  # type: ignore[attr-defined]
        self._refuse()

    def __hash__(self) -> int:
        return hash((id(self.func.__self__), self.args))  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self!r} has no {name!r}: it is a method of the node, so write .{self.__name__}().{name}"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"cannot set {name!r} of {self!r}: the value would never reach the node")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"{self.func.__self__!r}.{self.__name__}"  # type: ignore[attr-defined]


for _name in _OPERATORS:
    setattr(RemoteMethod, f"__{_name}__", RemoteMethod._refuse)
